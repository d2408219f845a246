"""How tpa_decode differentiates.

Saved: the factors, and the small out (float32) and lse, named so that `jax.checkpoint` can keep
them. The backward pass recomputes the probabilities from lse, one tile at a time.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_ops.core import card
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.ops.tpa_decode import kernel, kernel_backward
from pallas_ops.ops.tpa_decode.config import TpaDecodeConfig, choose_backward
from pallas_ops.ops.tpa_decode.reference import attend, attend_naive
from pallas_ops.ops.tpa_decode.tiles import sizes

RESIDUALS = "pallas_ops.tpa_decode"

FACTORS = ("b n h r", "b m k h", "b m v h", "b n r d", "b m k d", "b m v e")
UNSHARDED = ("n", "m", "r", "k", "v", "d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    score_scale: float
    value_scale: float
    implementation: Implementation | None
    config: TpaDecodeConfig | None


def reference(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`attention` in jax.numpy, differentiated by JAX."""
    return _forward_reference(
        *operands, score_scale=p.score_scale, value_scale=p.value_scale, out_dtype=out_dtype
    )


def naive(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`reference` by materialising q, k and v, without the log-sum-exp."""
    run: Any = partial(attend_naive, score_scale=p.score_scale, value_scale=p.value_scale)
    return run(*operands).astype(out_dtype), None


def _forward_reference(
    *operands: Any,
    score_scale: float,
    value_scale: float,
    out_dtype: str,
    config: TpaDecodeConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    del config  # a launch choice
    run = partial(attend, score_scale=score_scale, value_scale=value_scale)
    out, lse = run(*operands)
    return out.astype(out_dtype), lse


def _backward_reference(
    *operands: Any, score_scale: float, value_scale: float
) -> tuple[jax.Array, ...]:
    *factors, lengths, _, lse, dout, dlse = operands
    run = partial(attend, lengths=lengths, score_scale=score_scale, value_scale=value_scale)
    pullback = jax.vjp(run, *factors)[1]
    grads: tuple[jax.Array, ...] = pullback((dout.astype(lse.dtype), dlse))
    return grads


def _backward_kernel(
    *operands: Any, score_scale: float, value_scale: float
) -> tuple[jax.Array, ...]:
    aq, ak, av, bq, _, bv, *_ = operands
    config = choose_backward(sizes(aq, ak, av, bq, bv), card.current())
    if config is None:
        return _backward_reference(*operands, score_scale=score_scale, value_scale=value_scale)
    return kernel_backward.backward(
        *operands, score_scale=score_scale, value_scale=value_scale, config=config
    )


FORWARD = Op(
    name="tpa_decode",
    kernel=kernel.forward,
    reference=_forward_reference,
    operands=(*FACTORS, "b"),
    results=("b n h e", "b n h"),
    unsharded=UNSHARDED,
)

BACKWARD = Op(
    name="tpa_decode_backward",
    kernel=_backward_kernel,
    reference=_backward_reference,
    operands=(*FACTORS, "b", "b n h e", "b n h", "b n h e", "b n h"),
    results=FACTORS,
    unsharded=UNSHARDED,
    summed=("e", "e", "e", "h e", "h e", "h"),
    added_once=((10, "e"),),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H] of six factors with a rank axis, and lengths or None."""
    out, lse = call(
        FORWARD,
        *operands,
        implementation=p.implementation,
        score_scale=p.score_scale,
        value_scale=p.value_scale,
        out_dtype=out_dtype,
        config=p.config,
    )
    return out, lse


def _forward(p: Params, out_dtype: str, *operands: jax.Array | None):  # type: ignore[no-untyped-def]
    out, lse = (checkpoint_name(x, RESIDUALS) for x in attention(p, "float32", *operands))
    return (out.astype(out_dtype), lse), (operands, out, lse)


def _backward(p: Params, out_dtype: str, saved, cotangents):  # type: ignore[no-untyped-def]
    operands, out, lse = saved
    dout, dlse = cotangents
    grads = call(
        BACKWARD,
        *operands,
        out,
        lse,
        dout,
        dlse,
        implementation=p.implementation,
        score_scale=p.score_scale,
        value_scale=p.value_scale,
    )
    return *reshard_like(grads, operands), None


attention.defvjp(_forward, _backward)
