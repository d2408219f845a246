"""Linearised relative positional encoding: api, reference, vjp, kernel, config, in that order."""

from pallas_ops.ops.lrpe_cosine.api import lrpe_cosine, md_lrpe_cosine
from pallas_ops.ops.lrpe_cosine.config import LrpeCosineConfig

__all__ = ["LrpeCosineConfig", "lrpe_cosine", "md_lrpe_cosine"]
