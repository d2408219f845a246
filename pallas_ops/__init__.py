"""GPU kernels for linear and tensor-product attention in JAX.

Axis letters: B batch, N sequence, M cached sequence, H heads, D key or feature width, E value width
or columns of theta, R query rank, Rk and Rv key and value rank, K axes of a grid, C columns (the
product of the axes after the scanned one), S packed sequences.

Each op is a folder under `pallas_ops.ops`; read it as api, reference, vjp, kernel, config.
"""

from jax.export import DisabledSafetyCheck as _DisabledSafetyCheck

from pallas_ops import reference
from pallas_ops.core.backend import plgpu as _plgpu
from pallas_ops.core.card import target_gpu
from pallas_ops.ops.chunk_cumsum_decay.api import chunk_cumsum_decay
from pallas_ops.ops.chunk_cumsum_decay.config import ChunkCumsumDecayConfig
from pallas_ops.ops.logcumsumexp.api import logcumsumexp, logcumsumexp_with_state
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig
from pallas_ops.ops.lrpe_cosine.api import lrpe_cosine, md_lrpe_cosine
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig
from pallas_ops.ops.tpa_decode.api import tpa_decode, tpa_decode_with_lse
from pallas_ops.ops.tpa_decode.cache import quantize_tpa_factors, tpa_append
from pallas_ops.ops.tpa_decode.config import TpaDecodeConfig
from pallas_ops.residuals import Residuals

__all__ = (
    "DISABLE_JAX_EXPORT_CHECKS",
    "ChunkCumsumDecayConfig",
    "LogcumsumexpConfig",
    "LrpeCosineConfig",
    "Residuals",
    "TpaDecodeConfig",
    "chunk_cumsum_decay",
    "logcumsumexp",
    "logcumsumexp_with_state",
    "lrpe_cosine",
    "md_lrpe_cosine",
    "quantize_tpa_factors",
    "reference",
    "target_gpu",
    "tpa_append",
    "tpa_decode",
    "tpa_decode_with_lse",
)

# What `jax.export.export(..., disabled_checks=...)` needs to be told of our kernels' custom call,
# and of cuDNN's attention (tpa_decode of many queries at default precision).
DISABLE_JAX_EXPORT_CHECKS = (
    _DisabledSafetyCheck.custom_call(
        getattr(_plgpu, "CUSTOM_CALL_TARGET_NAME", "__gpu$xla.gpu.triton")
    ),
    _DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax"),
    _DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmaxBackward"),
)

__version__ = "0.1.0"
