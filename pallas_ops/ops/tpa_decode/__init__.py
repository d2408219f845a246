"""Tensor-product-attention decoding: api, reference, vjp, kernel, config, in that order."""
