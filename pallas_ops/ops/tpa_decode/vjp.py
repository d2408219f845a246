"""How tpa_decode differentiates.

Saved: the factors, and the small out (float32) and lse, named so that `jax.checkpoint` can keep
them. The backward pass recomputes the probabilities from lse, one tile at a time.
"""

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_ops.core import card
from pallas_ops.core.dispatch import Implementation, Op
from pallas_ops.core.partition import call, reshard_like
from pallas_ops.core.shards import Names
from pallas_ops.ops.tpa_decode import kernel, kernel_backward
from pallas_ops.ops.tpa_decode.choose import choose_backward
from pallas_ops.ops.tpa_decode.config import TpaDecodeConfig
from pallas_ops.ops.tpa_decode.reference import (
    attend,
    attend_naive,
    by_row,
    dequantised,
    from_pages,
    local_lengths,
    merge_shards,
)
from pallas_ops.ops.tpa_decode.tiles import sizes

RESIDUALS = "pallas_ops.tpa_decode"

FACTORS = ("b n h r", "b m k h", "b m v h", "b n r d", "b m k d", "b m v e")
UNSHARDED = ("n", "r", "k", "v", "d")
LENGTHS = 6  # its place among the operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The static arguments."""

    score_scale: float
    value_scale: float
    window: int | None
    batch_invariant: bool
    implementation: Implementation | None
    config: TpaDecodeConfig | None

    @property
    def static(self) -> dict[str, Any]:
        """Those of forward and backward passes."""
        names = ("score_scale", "value_scale", "window", "batch_invariant")
        return {name: getattr(self, name) for name in names}


def reference(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`attention` in jax.numpy, differentiated by JAX."""
    return _forward_reference(*operands, **p.static, out_dtype=out_dtype)


def naive(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """`reference` by materialising q, k and v, without the log-sum-exp."""
    run: Any = partial(
        attend_naive, score_scale=p.score_scale, value_scale=p.value_scale, window=p.window
    )
    return run(*without_pages(*operands)).astype(out_dtype), None


def without_pages(*operands: Any) -> tuple[Any, ...]:
    """The six factors and the lengths, with each row's own cache."""
    if len(operands) == 7:
        return operands
    aq, ak, av, bq, bk, bv, lengths, table = operands
    ak, av, bk, bv = from_pages(table, ak, av, bk, bv)
    return aq, ak, av, bq, bk, bv, lengths


def _forward_reference(
    *operands: Any,
    out_dtype: str,
    batch_invariant: bool,
    config: TpaDecodeConfig | None = None,
    **static: Any,
) -> tuple[jax.Array, jax.Array]:
    del config  # a launch choice
    operands = without_pages(*operands)
    run: Any = partial(attend, **static)
    out, lse = by_row(run, operands) if batch_invariant else run(*operands)
    return out.astype(out_dtype), lse


def _backward_reference(
    aq: jax.Array, ak: jax.Array, av: jax.Array, bq: jax.Array | None, *others: Any, **static: Any
) -> tuple[jax.Array, ...]:
    """Of these keys' part in an attention to more of them, whose out and lse are given."""
    bk, bv, lengths, out, lse, dout, dlse = others
    del static["batch_invariant"]  # of results, not of gradients
    run = partial(attend, lengths=lengths, **static)
    (own, own_lse), pullback = jax.vjp(run, aq, ak, av, bq, bk, bv)
    weight = jnp.exp(own_lse - jnp.where(lse == -jnp.inf, 0, lse))
    dout = dout.astype(lse.dtype)
    dlse = dlse + ((own - out.astype(lse.dtype)) * dout).sum(axis=-1)
    grads = pullback((weight[..., None] * dout, weight * dlse))
    return tuple(g for g in grads if g is not None)


def _backward_kernel(*operands: Any, **static: Any) -> tuple[jax.Array, ...]:
    config = choose_backward(sizes(*operands[:6]), card.current())
    if config is None:
        return _backward_reference(*operands, **static)
    del static["batch_invariant"]
    return kernel_backward.backward(*operands, **static, config=config)


def _lengths_of_shard(mesh_axes: Names, operands: Any, window: int | None) -> Any:
    """The operands with lengths that count from the shard's first key."""
    aq, ak, lengths = operands[0], operands[1], operands[LENGTHS]
    lengths = local_lengths(lengths, aq.shape[1], ak.shape[1], window, mesh_axes)
    if lengths is not None and not lengths.ndim:
        lengths = jnp.broadcast_to(lengths, aq.shape[:1])
    return *operands[:LENGTHS], lengths, *operands[LENGTHS + 1 :]


def _forward_of_shard(
    run: Any, mesh_axes: Names, *operands: Any, out_dtype: str, **static: Any
) -> tuple[jax.Array, jax.Array]:
    """Partial results are float32, and merged."""
    operands = _lengths_of_shard(mesh_axes, operands, static["window"])
    out, lse = run(FORWARD, *operands, **static, out_dtype="float32")
    out, lse = merge_shards(out, lse, mesh_axes)
    return out.astype(out_dtype), lse


def _backward_of_shard(
    run: Any, mesh_axes: Names, *operands: Any, **static: Any
) -> tuple[jax.Array, ...]:
    operands = _lengths_of_shard(mesh_axes, operands, static["window"])
    grads: tuple[jax.Array, ...] = run(backward_op(operands[3] is not None), *operands, **static)
    return grads


FORWARD = Op(
    name="tpa_decode",
    kernel=kernel.forward,
    reference=_forward_reference,
    operands=(*FACTORS, "b"),
    results=("b n h e", "b n h"),
    unsharded=UNSHARDED,
    shards=("m", _forward_of_shard),
)


PAGED = dataclasses.replace(
    FORWARD,
    name="tpa_decode_paged",
    operands=(*(x.replace("b m", "p s") for x in FACTORS), "b", "b t"),
    unsharded=(*UNSHARDED, "p", "s", "t"),
    shards=None,
)


@functools.cache
def backward_op(has_bq: bool) -> Op:
    """The gradients of those factors that there are."""
    summed = dict(zip(FACTORS, ("e m", "e", "e", "h e m", "h e", "h"), strict=True))
    if not has_bq:
        del summed["b n r d"]
    return Op(
        name="tpa_decode_backward",
        kernel=_backward_kernel,
        reference=_backward_reference,
        operands=(*FACTORS, "b", "b n h e", "b n h", "b n h e", "b n h"),
        results=tuple(summed),
        unsharded=UNSHARDED,
        summed=tuple(summed.values()),
        added_once=((10, "e"),),
        shards=("m", _backward_of_shard),
    )


def paged_attention(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """`attention` through a page table, the last operand; it has the reference's gradient."""
    static = p.static | dict(out_dtype=out_dtype, config=p.config)
    out, lse = call(PAGED, *operands, implementation=p.implementation, **static)
    return out, lse


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(
    p: Params, out_dtype: str, *operands: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """out [B, N, H, E] and lse [B, N, H] of six factors with a rank axis, and lengths or None.

    Queries without factors have aq [B, N, H, D], and bq is None.
    """
    static = p.static | dict(out_dtype=out_dtype, config=p.config)
    out, lse = call(FORWARD, *operands, implementation=p.implementation, **static)
    return out, lse


def _forward(p: Params, out_dtype: str, *operands: jax.Array | None):  # type: ignore[no-untyped-def]
    out, lse = (checkpoint_name(x, RESIDUALS) for x in attention(p, "float32", *operands))
    return (out.astype(out_dtype), lse), (operands, out, lse)


def _backward(p: Params, out_dtype: str, saved, cotangents):  # type: ignore[no-untyped-def]
    operands, out, lse = saved
    ak, bk, has_bq = operands[1], operands[4], operands[3] is not None
    features = (dequantised(ak, x) for x in operands[4:6])
    grads: list[jax.Array | None] = list(
        call(
            backward_op(has_bq),
            *operands[:4],
            *features,
            operands[LENGTHS],
            out,
            lse,
            *cotangents,
            implementation=p.implementation,
            **p.static,
        )
    )
    if not has_bq:
        grads.insert(3, None)
    if bk.dtype != ak.dtype:
        grads[4:] = None, None
    return *reshard_like(grads, operands), None


attention.defvjp(_forward, _backward)
