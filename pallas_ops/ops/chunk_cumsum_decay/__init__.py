"""Running sums that restart at every chunk: api, reference, vjp, kernel, config, in that order."""

from pallas_ops.ops.chunk_cumsum_decay.api import chunk_cumsum_decay
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig

__all__ = ["ChunkCumsumDecayConfig", "chunk_cumsum_decay"]
