"""How the head factors ak and av [M ranks, H] are loaded, and how sums over ranks are taken."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core import triton_ext
from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, joined, power_of_two, span, stack
from pallas_ops.ops.tpa_decode import tiles
from pallas_ops.ops.tpa_decode.keys import Keys
from pallas_ops.ops.tpa_decode.tiles import Rows


def source(keys: Keys, ref: Ref, ranks: int, wanted: jax.Array | bool = True) -> Any:
    """What `load` and `load_ranks` take: ak or av, or the block of it that is gathered."""
    return keys.load_block(ref, ranks, wanted) if keys.plan.gathers else ref


def load(keys: Keys, rows: Rows, ref: Any, ranks: int) -> jax.Array:
    """ak or av as [rows, entries], in float32."""
    if keys.plan.gathers:
        entry, exists = keys.entries(ranks, of_block=True)
        if keys.plan.heads_of_word == 2:
            x = _gather_pairs(ref, rows, entry, exists)
        else:
            x = jnp.where(exists[None, :], _gather(ref, rows, entry), 0)
    elif rows.tile_h > 32 and keys.plan.s.h % 2 == 0:
        x = _groups(keys, rows, ref, ranks)
        x = x.swapaxes(1, 2).reshape(-1, x.shape[1])
    else:
        x = tiles.load(ref, *keys.heads(rows, ranks)).T
    return rows.repeat_for_queries(x.astype(jnp.float32), 0)


def load_ranks(keys: Keys, rows: Rows, ref: Any, ranks: int) -> list[jax.Array]:
    """ak or av in octets: a tile [keys / 8, 8, rows] of each rank, in float32."""
    if keys.plan.gathers:
        entry, exists = keys.entries(ranks, of_block=True)
        x = _gather(ref, rows, entry, axis=1)
        x = jnp.where(exists[:, None] & rows.column_inside[None, :], x, 0)
    else:
        x = _groups(keys, rows, ref, ranks)
        x = x.swapaxes(0, 1).reshape(x.shape[1], -1)
    xs = split_ranks(x, ranks)
    return [rows.repeat_for_queries(x.astype(jnp.float32), 2) for x in xs]


def _gather(block: jax.Array, rows: Rows, entry: jax.Array, axis: int = 0) -> jax.Array:
    """These heads, along an axis, of each entry, from a flat block [entries H].

    A block is copied 16 bytes at a time, wherever its rows of H numbers begin. By the gather each
    thread then reads from shared memory the elements that its layout has.
    """
    h = rows.plan.s.h
    entry = jnp.expand_dims(entry, axis)
    head = jnp.expand_dims(jnp.minimum(rows.first_h + rows.column, h - 1), 1 - axis)
    if h == 64:  # rows are rotated (`Keys.load_block`)
        head = (head + 8 * entry) & (h - 1)
    return triton_ext.gather(block, entry * h + head)


def _gather_pairs(block: jax.Array, rows: Rows, entry: jax.Array, exists: jax.Array) -> jax.Array:
    """The same as float32 [rows, entries], from a block of words (`Plan.heads_of_word`)."""
    words = rows.plan.s.h // 2
    word = jnp.minimum(rows.first_h // 2 + span(rows.tile_h // 2), words - 1).reshape(-1, 8, 1)
    pair = triton_ext.gather(block, entry[None, None, :] * words + word)
    pair = jnp.where(exists[None, None, :], pair, 0)
    # bfloat16 is the upper half of float32.
    both = [lax.bitcast_convert_type(x, jnp.float32) for x in (pair << 16, pair & -(2**16))]
    return joined(*both, axis=1).reshape(rows.tile_h, -1)


def _groups(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
    """These heads of an array [M ranks, H], as [heads / 16, entries, 16].

    Shared memory holds tiles in the order of their axes: 16 heads of one entry are 32 bytes, and
    those of the next entry follow. In a tile [entries, 64 heads] the eight entries that a matrix
    load takes at once would lie 128 bytes apart, in the same banks. Triton would also give it the
    layout of the features' tile of that shape: eight numbers a thread, where rows of heads may
    have to be copied two at a time.
    """
    entry, inside = keys.entries(ranks)
    column, column_inside = (x.reshape(-1, 1, 16) for x in (rows.column, rows.column_inside))
    mask = inside[None, :, None] & column_inside
    return plgpu.load(ref.at[entry[None, :, None], rows.first_h + column], mask=mask, other=0.0)


def sum_ranks(x: jax.Array, ranks: int) -> jax.Array:
    """[rows, entries] as [rows, keys]"""
    size = power_of_two(ranks)
    return x if size == 1 else x.reshape(len(x), -1, size).sum(axis=2)


def each_rank(x: jax.Array, ranks: int) -> jax.Array:
    """[rows, keys] as [rows, entries]; the transpose of `sum_ranks`."""
    size = power_of_two(ranks)
    if size == 1:
        return x
    return jnp.broadcast_to(x[..., None], (*x.shape, size)).reshape(len(x), -1)


def split_ranks(x: jax.Array, ranks: int) -> list[jax.Array]:
    """[entries, rows] in octets as [keys / 8, 8, rows] of each rank.

    No axis here ever has size 1: Triton would give such a tile another layout, by way of shared
    memory.
    """
    size = power_of_two(ranks)
    return list(lax.split(x.reshape(-1, 8 * size, x.shape[1]), (8,) * size, 1))


def join_ranks(xs: list[jax.Array]) -> jax.Array:
    """The inverse of `split_ranks`."""
    return stack(xs).transpose(0, 3, 1, 2).reshape(-1, xs[0].shape[2])
