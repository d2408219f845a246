"""How chunk_cumsum_decay runs: the launcher first, then the kernel body."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.launch import launch
from pallas_ops.core.triton_ext import pipelined, scan
from pallas_ops.ops.chunk_cumsum_decay.tiles import (
    Chunks,
    Plan,
    Ref,
    Tile,
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
    table = None if cu_seqlens is None else table_of(plan, cu_seqlens)
    (out,) = launch(
        partial(_kernel, plan=plan),
        view,
        table,
        name=name,
        grid=plan.grid,
        in_specs=[_whole(view), None if table is None else _whole(table)],
        out_specs=[_whole(view)],
        out_shape=[jax.ShapeDtypeStruct(view.shape, dtype)],
        num_warps=plan.c.num_warps,
    )
    return (out.reshape(x.shape),)


def _whole(x: jax.Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _kernel(
    x_ref: Ref,  # [B, N, C]
    table_ref: Ref | None,  # [5, slots]
    out_ref: Ref,  # [B, N, C]
    *,
    plan: Plan,
) -> None:
    chunks = Chunks(plan, table_ref)
    tiles = chunks.tiles

    def step(t: jax.Array, before: jax.Array) -> jax.Array:  # [1, chunks, 1, columns]
        t = pipelined(t, plan.c.num_stages)
        tile = Tile(chunks, tiles - 1 - t if plan.backward else t)
        x = tile.load(x_ref)
        tile.store(out_ref, before + running_sum(x, backward=plan.backward))
        return before + x.sum(axis=0, keepdims=True).sum(axis=2, keepdims=True)

    if plan.tiles == 1:
        only = Tile(chunks, 0)
        only.store(out_ref, running_sum(only.load(x_ref), backward=plan.backward))
    else:
        before = jnp.zeros((1, plan.c.num_chunks, 1, plan.c.block_c))
        lax.fori_loop(0, tiles, step, before)
    if plan.late:
        store_edges(chunks, out_ref)


def running_sum(x: jax.Array, *, backward: bool) -> jax.Array:
    """Running sums along a tile's positions, of which a lane has one step if summed backward."""
    if x.shape[0] == 1 and backward:
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
