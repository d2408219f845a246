"""How the head factors ak and av [M ranks, H] are loaded, and how sums over ranks are taken."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref, power_of_two, span, stack, unstack
from pallas_ops.ops.tpa_decode import tiles
from pallas_ops.ops.tpa_decode.keys import Keys
from pallas_ops.ops.tpa_decode.tiles import Rows


def load(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
    """ak or av as [rows, entries], in float32."""
    if keys.plan.pairs:
        x = _of_pairs(keys, rows, ref, ranks)
    elif rows.tile_h > 32 and keys.plan.s.h % 2 == 0:
        x = _groups(keys, rows, ref, ranks)
        x = x.swapaxes(1, 2).reshape(-1, x.shape[1])
    else:
        x = tiles.load(ref, *keys.heads(rows, ranks)).T
    return rows.spread(x.astype(jnp.float32), 0)


def load_ranks(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> list[jax.Array]:
    """Of octets, each rank of ak or av as [keys / 8, 8, rows], in float32."""
    if keys.plan.pairs:
        xs = _two_ranks_of_pairs(keys, rows, ref)
    else:
        x = _groups(keys, rows, ref, ranks)
        xs = of_ranks(x.swapaxes(0, 1).reshape(x.shape[1], -1), ranks)
    return [rows.spread(x.astype(jnp.float32), 2) for x in xs]


def _groups(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
    """Of an array [M ranks, H] these heads, as [heads / 16, entries, 16].

    Shared memory holds tiles in the order of their axes: 16 heads of one entry are 32 bytes, and
    those of the next entry follow. In a tile [entries, 64 heads] the eight entries that a matrix
    load takes at once would lie 128 bytes apart, in the same banks. Triton would also give it the
    layout of the features' tile of that shape: eight numbers a thread, where rows of heads may
    have to be copied two at a time.
    """
    entry, inside = keys.entries(ranks)
    column, column_inside = (x.reshape(-1, 1, 16) for x in (rows.column, rows.column_inside))
    i, j = jnp.broadcast_arrays(entry[None, :, None], rows.first_h + column)
    mask = inside[None, :, None] & column_inside
    return plgpu.load(ref.at[i, j], mask=mask, other=0.0)


def _of_pairs(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> jax.Array:
    """Of a flat array [M ranks H] these heads, as [heads, entries]."""

    def parity(x: jax.Array) -> list[jax.Array]:
        """Those of even ranks and those of odd ranks, each [heads / 16, 8, entries / 2]."""
        x = x.swapaxes(1, 2)
        return unstack(x.reshape(*x.shape[:2], -1, 2))

    first, second, odd_of_odd = _pairs(keys, rows, ref, ranks)
    even, odd = parity(first), parity(second)
    even_heads = jnp.stack([even[0], odd[1]], axis=-1)
    odd_heads = jnp.stack([odd[0], odd_of_odd.swapaxes(1, 2)], axis=-1)
    x = jnp.stack([even_heads, odd_heads], axis=-1)  # [heads / 16, 8, entries / 2, 2, 2]
    return x.transpose(0, 4, 1, 2, 3).reshape(rows.tile_h, -1)


def _two_ranks_of_pairs(keys: Keys, rows: Rows, ref: Ref) -> list[jax.Array]:
    """Of a flat array [M 2 H] these heads of each rank, as [keys / 8, 8, heads]; in octets."""
    first, second, odd_of_odd = _pairs(keys, rows, ref, 2)
    even, odd = (lax.split(x.reshape(-1, 16, 8), (8, 8), 1) for x in (first, second))
    ranks = (even[0], odd[0]), (odd[1], odd_of_odd.reshape(-1, 8, 8))

    def joined(even: jax.Array, odd: jax.Array) -> jax.Array:
        x = jnp.stack([even, odd], axis=-1)  # [heads / 16 keys / 8, 8, 8, 2]
        if rows.tile_h == 16:  # no axis of size 1, as in `of_ranks`
            x = x.swapaxes(2, 3)
        else:
            x = x.reshape(rows.tile_h // 16, -1, 8, 8, 2).transpose(1, 2, 0, 4, 3)
        return x.reshape(-1, 8, rows.tile_h)

    return [joined(*x) for x in ranks]


def _pairs(keys: Keys, rows: Rows, ref: Ref, ranks: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a flat array [M ranks H], for odd H and an even number of ranks, pairs of numbers.

    An asynchronous copy takes at least four bytes, two numbers, and begins at an even place.
    Even ranks begin at an even place: their pairs of numbers are pairs of heads. Odd ranks
    begin at an odd place p. Their even heads are the second numbers of the pairs from p - 1 on,
    their odd heads the first numbers of the pairs from p + 1 on.

    Returns:
      The first and the second numbers of all ranks, those of odd ranks from p - 1 on, and the
      first ones of odd ranks from p + 1 on. Each is [heads / 16, entries, 8].
    """
    column = span(rows.tile_h).reshape(-1, 1, 16)
    heads = keys.plan.s.h - rows.first_h

    def load_pairs(shift: int, entry: jax.Array, inside: jax.Array) -> list[jax.Array]:
        stop = heads - 1 if shift else heads + 1
        place = 2 * ((entry * keys.plan.s.h + rows.first_h + shift) >> 1)
        mask = inside[None, :, None] & (column < stop)
        x = plgpu.load(ref.at[place[None, :, None] + column], mask=mask, other=0.0)
        return unstack(x.reshape(*x.shape[:2], 8, 2))

    first, second = load_pairs(0, *keys.entries(ranks))
    return first, second, load_pairs(1, *keys.entries(ranks, odd=True))[0]


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


def of_ranks(x: jax.Array, ranks: int) -> list[jax.Array]:
    """[entries, rows] in octets as [keys / 8, 8, rows] of each rank.

    No axis here ever has size 1: Triton would give such a tile another layout, by way of shared
    memory.
    """
    size = power_of_two(ranks)
    return list(lax.split(x.reshape(-1, 8 * size, x.shape[1]), (8,) * size, 1))


def join_ranks(xs: list[jax.Array]) -> jax.Array:
    """The inverse of `of_ranks`."""
    return stack(xs).transpose(0, 3, 1, 2).reshape(-1, xs[0].shape[2])
