"""Partial results of tpa_decode's splits: outputs are merged, gradients summed."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import HUGE, Ref, power_of_two, span
from pallas_ops.ops.tpa_decode.config import tile
from pallas_ops.ops.tpa_decode.tiles import per_batch, per_split, store


def merge(
    out: jax.Array, lse: jax.Array, out_dtype: str, block: int
) -> tuple[jax.Array, jax.Array]:
    """Partial results out [B, S, rows, E] and lse [B, S, rows], merged over S.

    One launch merges `block` splits (at most 1,024) at a time. If there are more, another launch
    merges the results. A program takes so few rows and columns that a thread holds 64 numbers.
    """
    (b, splits, rows, e), block = out.shape, min(block, 1024)
    size, width = (128 // max(block, 32), min(64, tile(e))) if block <= 64 else (1, 32)
    blocks = pl.cdiv(splits, block)
    dtype = jnp.dtype(out_dtype if blocks == 1 else jnp.float32)
    results = [
        jax.ShapeDtypeStruct((b, blocks, rows, e), dtype),
        jax.ShapeDtypeStruct((b, blocks, rows), jnp.float32),
    ]
    out, lse = launch(
        partial(_merge_kernel, block=block, size=size, width=width),
        out,
        lse,
        name="tpa_decode_merge",
        grid=(pl.cdiv(rows, size), pl.cdiv(e, width), blocks, b),
        in_specs=[per_batch(out), per_batch(lse)],
        out_specs=[*map(per_split, results)],
        out_shape=results,
        num_warps=max(1, block * size * width // 2048),
    )
    return merge(out, lse, out_dtype, block) if blocks > 1 else (out[:, 0], lse[:, 0])


def _merge_kernel(
    out_ref: Ref,  # [S, rows, E]
    lse_ref: Ref,  # [S, rows]
    merged_ref: Ref,  # [rows, E], of this block
    merged_lse_ref: Ref,  # [rows]
    *,
    block: int,
    size: int,
    width: int,
) -> None:
    splits, rows, e = out_ref.shape
    i = pl.program_id(0) * size + span(size)
    j = pl.program_id(1) * width + span(width)
    k = pl.program_id(2) * block + span(block)
    inside = (k < splits)[:, None] & (i < rows)[None, :]
    lse = plgpu.load(lse_ref.at[k[:, None], i[None, :]], mask=inside, other=-jnp.inf)
    mask = inside[:, :, None] & (j < e)[None, None, :]
    place = k[:, None, None], i[None, :, None], j[None, None, :]
    out = plgpu.load(out_ref.at[place], mask=mask, other=jnp.zeros((), out_ref.dtype))
    top = jnp.maximum(lse.max(axis=0), -HUGE)
    weight = jnp.exp2((lse - top[None, :]) * LOG2E)
    total = weight.sum(axis=0)
    nonzero = jnp.where(total == 0, 1.0, total)
    out = (out.astype(jnp.float32) * weight[:, :, None]).sum(axis=0) / nonzero[:, None]
    # A split that is merged with splits without keys keeps its bits, however many these are.
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log2(nonzero) / LOG2E)
    store(merged_ref, out, i, j, (i < rows)[:, None] & (j < e)[None, :])
    plgpu.store(merged_lse_ref.at[i], lse, mask=(i < rows) & (pl.program_id(1) == 0))


def sum_splits(partials: list[jax.Array], like: list[jax.Array]) -> list[jax.Array]:
    """Float32 arrays [B, S, ..] summed over S in one launch, in the shapes and dtypes of `like`."""
    if partials[0].shape[1] == 1:
        return [x.astype(y.dtype).reshape(y.shape) for x, y in zip(partials, like, strict=True)]
    flat = [x.reshape(*x.shape[:2], -1) for x in partials]
    b, splits = flat[0].shape[:2]
    block, width = min(power_of_two(splits), 256), 32
    results = [
        jax.ShapeDtypeStruct((b, x.shape[2]), y.dtype) for x, y in zip(flat, like, strict=True)
    ]
    sums = launch(
        partial(_sum_kernel, block=block, width=width),
        *flat,
        name="tpa_decode_sum",
        grid=(sum(pl.cdiv(x.shape[2], width) for x in flat), b),
        in_specs=[*map(per_batch, flat)],
        out_specs=[*map(per_batch, results)],
        out_shape=results,
        num_warps=max(1, block * width // 2048),
    )
    return [x.reshape(y.shape) for x, y in zip(sums, like, strict=True)]


def _sum_kernel(*refs: Ref, block: int, width: int) -> None:
    """Sums [columns] of arrays [S, columns]. A program takes a block of columns of one array."""
    program, half = pl.program_id(0), len(refs) // 2
    for part_ref, sum_ref in zip(refs[:half], refs[half:], strict=True):
        blocks, j = pl.cdiv(sum_ref.shape[0], width), program * width + span(width)
        is_own = (program >= 0) & (program < blocks)
        pl.when(is_own)(partial(_sum_columns, part_ref, sum_ref, j, block))
        program -= blocks


def _sum_columns(part_ref: Ref, sum_ref: Ref, j: jax.Array, block: int) -> None:
    splits, columns = part_ref.shape

    def of_block(k: jax.Array | int) -> jax.Array:
        i = k * block + span(block)
        inside = (i < splits)[:, None] & (j < columns)[None, :]
        return plgpu.load(part_ref.at[i[:, None], j[None, :]], mask=inside, other=0.0).sum(axis=0)

    total = of_block(0)
    if splits > block:
        total = lax.fori_loop(1, pl.cdiv(splits, block), lambda k, x: x + of_block(k), total)
    plgpu.store(sum_ref.at[j], total.astype(sum_ref.dtype), mask=j < columns)
