"""How chunk_cumsum_decay runs: the launcher first, then the kernel body."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, whole
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.chunk_cumsum_decay import parts
from pallas_ops.ops.chunk_cumsum_decay.tiles import (
    Chunks,
    Plan,
    Tile,
    load_edges,
    plan_of,
    store_edges,
    table_of,
)


def run(
    x: jax.Array, cu_seqlens: jax.Array | None, *, name: str, dtype: str, **statics: Any
) -> tuple[jax.Array]:
    """The sums, like x but of `dtype`."""
    plan = plan_of(x, cu_seqlens, **statics)
    view = x.reshape(plan.s.b, plan.s.n, plan.s.c)
    table = carry = None
    if cu_seqlens is not None:
        table = table_of(plan, cu_seqlens)
    elif plan.c.num_parts > 1:
        plan = parts.split(plan)
        carry = parts.carries(plan, view)
    (out,) = launch(
        partial(_kernel, plan=plan),
        view,
        table,
        carry,
        name=name,
        grid=plan.grid,
        in_specs=[None if y is None else whole(y) for y in (view, table, carry)],
        out_specs=[whole(view)],
        out_shape=[jax.ShapeDtypeStruct(view.shape, dtype)],
        num_warps=plan.c.num_warps,
    )
    return (out.reshape(x.shape),)


def _kernel(
    x_ref: Ref,  # [B, N, C]
    table_ref: Ref | None,  # [5, slots]
    carry_ref: Ref | None,  # [B, parts, C]
    out_ref: Ref,  # [B, N, C]
    *,
    plan: Plan,
) -> None:
    chunks = Chunks(plan, table_ref)
    tiles = chunks.tiles

    def step(t: Any, before: jax.Array | None) -> jax.Array:  # [1, chunks, 1, columns]
        tile = Tile(chunks, tiles - 1 - t if plan.backward and plan.tiles > 1 else t)
        x = tile.load(x_ref)
        tile.store(out_ref, plus(before, running_sum(x, plan)))
        return plus(before, x.sum(axis=0, keepdims=True).sum(axis=2, keepdims=True))

    before = load_edges(chunks, x_ref)
    if carry_ref is not None:
        before = plus(before, parts.load_carries(chunks, carry_ref))
    if plan.tiles == 1:
        step(0, before)
    else:
        before = plus(before, jnp.zeros((1, plan.c.num_chunks, 1, plan.c.block_c)))
        lax.fori_loop(0, tiles, lambda t, y: step(pipelined(t, plan.c.num_stages), y), before)
    if plan.late:
        store_edges(chunks, out_ref)


def plus(before: jax.Array | None, x: jax.Array) -> jax.Array:
    return x if before is None else before + x


def running_sum(x: jax.Array, plan: Plan) -> jax.Array:
    """Running sums along a tile's positions."""
    if plan.exclusive:
        return scan(_exclusive, (jnp.zeros_like(x), x), axis=2, reverse=plan.backward)[0]
    if plan.backward:
        return scan(_add, (x,), axis=2, reverse=True)[0]
    if x.shape[0] == 1:
        return jnp.cumsum(x, axis=2)
    inner = jnp.cumsum(x, axis=0)
    if x.shape[2] == 1:
        return inner
    totals = x.sum(axis=0)
    before, _ = scan(_exclusive, (jnp.zeros_like(totals), totals), axis=1)
    return before[None] + inner


def _add(before: Any, after: Any) -> Any:
    return (before[0] + after[0],)


def _exclusive(before: Any, after: Any) -> Any:
    """The sum of all but the last, and of all; a difference of sums would not be exact."""
    return before[1] + after[0], before[1] + after[1]
