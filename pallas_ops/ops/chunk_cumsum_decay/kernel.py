"""How chunk_cumsum_decay runs: the launcher first, then the kernel body."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.tiles import Ref
from pallas_ops.ops.chunk_cumsum_decay.config import Params, Plan, plan_of
from pallas_ops.ops.chunk_cumsum_decay.reference import previous
from pallas_ops.ops.chunk_cumsum_decay.tiles import Chunks, table_of
from pallas_ops.scan.running import plus, running_sums
from pallas_ops.scan.tile import Tile, loop
from pallas_ops.scan.view import launch_plan


def accumulate(
    x: jax.Array, edges: jax.Array | None, carry: jax.Array | None, *, params: Params
) -> tuple[jax.Array]:
    """The sums, in the dtype of the result. The first one in scan direction starts from `carry`."""
    plan = plan_of(x, edges, params)
    s = plan.view.s
    view = x.reshape(s.b, s.n, s.c)
    table = before = None
    carry = None if carry is None else carry.reshape(s.b, 1, s.c)
    if edges is not None:
        table = table_of(plan, edges)
    elif plan.c.num_segments > 1:
        before, carry = plus(carry, _sums_before(plan, view)), None
    shapes = [jax.ShapeDtypeStruct(view.shape, params.dtypes[1])]
    (out,) = launch_plan(_kernel, plan, params.name, shapes, view, table, before, carry)
    return (out.reshape(x.shape),)


def _sums_before(plan: Plan, x: jax.Array) -> jax.Array:
    """[B, segments, C], float32: for each segment the sum of all before it."""
    s, p, y = plan.view.s, plan.params, x.astype(jnp.float32)
    y = y if p.scale is None else y * p.scale
    if p.shift and not p.shift_result:
        y = previous(y, 1, p.reverse)
    y = jnp.pad(y, ((0, 0), (0, s.count * s.size - s.n), (0, 0)))
    totals = y.reshape(s.b, s.count, s.size, s.c).sum(axis=2)
    return previous(lax.cumsum(totals, 1, reverse=p.reverse), 1, p.reverse)


def _kernel(
    x_ref: Ref,  # [B, N, C]
    table_ref: Ref | None,  # [5, slots]
    before_ref: Ref | None,  # [B, segments, C]
    carry_ref: Ref | None,  # [B, 1, C]
    out_ref: Ref,  # [B, N, C]
    *,
    plan: Plan,
) -> None:
    chunks, view = Chunks(plan, table_ref), plan.view

    def step(t: Any, before: jax.Array | None) -> jax.Array | None:  # [chunks, columns]
        tile = Tile(chunks, t * view.block_n, view.block_n, view.num_steps)
        x = chunks.load_tile(tile, x_ref)
        sums, total = running_sums(x, before, reverse=view.mirrored, exclusive=chunks.exclusive)
        chunks.store_tile(tile, out_ref, sums)
        return plus(before, total)

    before = chunks.load_edges(x_ref)
    if before_ref is not None:
        before = plus(before, chunks.load(before_ref, chunks.number))
    if carry_ref is not None:
        before = plus(before, chunks.load(carry_ref, 0, chunks.is_first))
    if view.tiles > 1:
        before = plus(before, jnp.zeros(chunks.shape, jnp.float32))
    loop(chunks.tiles, step, before, plan.c.num_stages)
    if plan.params.shift_result:
        chunks.store_edges(out_ref)
