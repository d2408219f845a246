"""Partial results of tpa_decode's splits, merged."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.launch import launch
from pallas_ops.core.tiles import Ref, span
from pallas_ops.ops.tpa_decode.config import tile
from pallas_ops.ops.tpa_decode.tiles import LOWEST, load


def merge(
    out: jax.Array, lse: jax.Array, out_dtype: str, block: int
) -> tuple[jax.Array, jax.Array]:
    """Partial results out [B, S, rows, E] and lse [B, S, rows], merged over S."""
    b, splits, rows, e = out.shape
    merged, total = launch(
        partial(_merge_kernel, splits=splits, block=block, e=e),
        out,
        lse,
        name="tpa_decode_merge",
        grid=(rows, b),
        in_specs=[
            pl.BlockSpec((None, splits, None, e), lambda i, b: (b, 0, i, 0)),
            pl.BlockSpec((None, splits, None), lambda i, b: (b, 0, i)),
        ],
        out_specs=[
            pl.BlockSpec((None, None, e), lambda i, b: (b, i, 0)),
            pl.BlockSpec((None, 1), lambda i, b: (b, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((b, rows, e), jnp.dtype(out_dtype)),
            jax.ShapeDtypeStruct((b, rows), jnp.float32),
        ],
        num_warps=max(1, min(8, block * tile(e) // 512)),
    )
    return merged, total


def _merge_kernel(
    out_ref: Ref,  # [S, E]
    lse_ref: Ref,  # [S]
    merged_ref: Ref,  # [E]
    total_ref: Ref,  # [1]
    *,
    splits: int,
    block: int,
    e: int,
) -> None:
    j = span(tile(e))

    def of_block(first: jax.Array | int) -> tuple[jax.Array, ...]:
        i = first + span(block)
        lse = plgpu.load(lse_ref.at[i], mask=i < splits, other=-jnp.inf) * LOG2E
        top = jnp.maximum(lse.max(), LOWEST)
        weight = jnp.exp2(lse - top)
        out = load(out_ref, i, j, (i < splits)[:, None] & (j < e)[None, :])
        return top, weight.sum(), (out * weight[:, None]).sum(axis=0)

    def step(k: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Splits without keys change no bit."""
        tops, totals, accs = zip(carry, of_block(k * block), strict=True)
        top = jnp.maximum(*tops)
        first, second = (jnp.exp2(x - top) for x in tops)
        return top, *(x * first + y * second for x, y in (totals, accs))

    top, total, acc = of_block(0)
    if splits > block:
        top, total, acc = lax.fori_loop(1, pl.cdiv(splits, block), step, (top, total, acc))
    empty = total == 0
    nonzero = jnp.where(empty, 1.0, total)
    plgpu.store(merged_ref.at[j], (acc * (1 / nonzero)).astype(merged_ref.dtype), mask=j < e)
    total_ref[0] = jnp.where(empty, -jnp.inf, (top + jnp.log2(nonzero)) / LOG2E)
