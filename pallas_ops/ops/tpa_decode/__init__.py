"""Tensor-product-attention decoding: api, reference, vjp, kernel, config, in that order."""

from pallas_ops.ops.tpa_decode.api import tpa_decode, tpa_decode_with_lse
from pallas_ops.ops.tpa_decode.cache import quantize_tpa_factors, tpa_append
from pallas_ops.ops.tpa_decode.config import TpaDecodeConfig

__all__ = [
    "TpaDecodeConfig",
    "quantize_tpa_factors",
    "tpa_append",
    "tpa_decode",
    "tpa_decode_with_lse",
]
