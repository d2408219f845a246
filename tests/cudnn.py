"""What cuDNN computes, in jax.numpy: for interpreted kernels, in place of JAX's private modules."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_ops.ops.tpa_decode import prompt, prompt_backward


def instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of cuDNN run here, on any platform."""
    cudnn = prompt.cudnn
    functions = dict(dot_product_attention=_attention, MaskType=cudnn.MaskType)
    functions["AttentionLayout"] = cudnn.AttentionLayout
    monkeypatch.setattr(prompt, "cudnn", SimpleNamespace(**functions))
    monkeypatch.setattr(prompt, "is_here", lambda: True)
    backward = SimpleNamespace(bind=_gradients)
    monkeypatch.setattr(prompt_backward, "CUDNN_BACKWARD", backward)


def _attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    _bias: None,
    _mask: None,
    *sizes: jax.Array,
    scale: float,
    mask_type: Any,
    return_residual: bool,
) -> Any:
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    masks: Any = dict(is_causal=mask_type.value >= 2)
    masks["key_value_seq_lengths"] = sizes[1] if sizes else None
    attention: Any = jax.nn.dot_product_attention
    out, lse = attention(q, k, v, scale=scale, return_residual=return_residual, **masks)
    return out.astype(dtype), lse.swapaxes(1, 2)  # as cuDNN rounds it


def _gradients(*operands: jax.Array, scale: float, mask_type: Any, **_others: Any) -> Any:
    """The derivative of a sum: that of weight * (dout v^T - dout out^T)."""
    q, k, v, *_, lse, out, dout = (x.astype(jnp.float32) for x in operands)
    n, m = q.shape[1], k.shape[1]
    seen = jnp.tri(n, m, 0 if mask_type.value >= 2 else m, dtype=bool)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        score = scale * jnp.einsum("bnhd,bmhd->bhnm", q, k) - lse[..., None]
        weight = jnp.exp(jnp.where(seen, score, -jnp.inf))
        delta = jnp.einsum("bnhd,bnhd->bhn", dout, out)
        return (weight * (jnp.einsum("bnhd,bmhd->bhnm", dout, v) - delta[..., None])).sum()

    return jax.grad(total, (0, 1, 2))(q, k, v)
