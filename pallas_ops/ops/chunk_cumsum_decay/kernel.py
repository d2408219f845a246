"""How chunk_cumsum_decay runs: the launcher first, then the kernel body."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.launch import launch
from pallas_ops.core.triton_ext import pipelined
from pallas_ops.ops.chunk_cumsum_decay.tiles import (
    Chunks,
    Plan,
    Ref,
    Tile,
    plan_of,
    running_sum,
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
