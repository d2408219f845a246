"""The cache of tpa_decode: new tokens written into it, and feature factors in eight bits."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike

from pallas_ops.core import checks
from pallas_ops.core.partition import is_explicit
from pallas_ops.core.tiles import as_int32, wide
from pallas_ops.ops.tpa_decode.refusals import QUANTISED, tokens_of_table

Tree = TypeVar("Tree")


def tpa_append(
    cache: Tree,
    new: Tree,
    lengths: ArrayLike | Sequence[int],
    *,
    page_table: ArrayLike | None = None,
) -> Tree:
    """Writes each row's new tokens after the ones it has: cache[b, lengths[b] + i] = new[b, i].

    In place where the cache is donated (`jax.jit(..., donate_argnames=...)`).

    Args:
      cache: an array [B, M, ...], or a tree of them, of any dtypes, such as ak and bk. With a page
        table, pools [P, page_size, ...].
      new: the same with [B, n, ...], in the dtypes of the cache.
      lengths: integers [B] or [], may be traced: the tokens that each row has already. A token
        whose place is out of range (beyond M, or of a row with a negative length) is not written.
      page_table: integers [B, pages], may be traced: token m of row b lies in page
        page_table[b, m // page_size], at m % page_size. A token whose page is out of range is not
        written; two rows must not write to the same place of a page.

    Returns:
      The cache with the tokens in it.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.
    """
    lengths = checks.array("lengths", lengths)
    table = checks.optional_array("page_table", page_table)
    checks.integers("lengths", lengths)
    if table is not None:
        checks.integers("page_table", table)
        table = as_int32(table)  # narrower integers may not hold the number of pages
    trees: Any = jax.tree.structure(cache), jax.tree.structure(new)
    if trees[0] != trees[1]:
        raise ValueError(f"new is a tree {trees[1]}; accepted: one like that of cache, {trees[0]}")

    def write(path: Any, old: Any, tokens: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        old, tokens = checks.array(f"cache{name}", old), checks.array(f"new{name}", tokens)
        axes, others = checks.Axes(), "".join(f" axis{i}" for i in range(2, old.ndim))
        axes.check(f"cache{name}", old, ("B M" if table is None else "P page_size") + others)
        axes.check(f"new{name}", tokens, "B n" + others)
        axes.check("lengths", lengths, "", "B")
        if table is not None:
            axes.check("page_table", table, "B pages")
            tokens_of_table(axes.sizes["pages"], axes.sizes["page_size"])
        if tokens.dtype != old.dtype:
            raise TypeError(
                f"new{name}.dtype is '{tokens.dtype}'; accepted: that of the cache, {old.dtype}"
            )
        return _append(old, tokens, lengths, table)

    return jax.tree.map_with_path(write, cache, new)


@partial(jax.jit, inline=True)
def _append(
    old: jax.Array, tokens: jax.Array, lengths: jax.Array, table: jax.Array | None
) -> jax.Array:
    b, n = tokens.shape[:2]
    size = old.shape[1]
    m = size if table is None else size * table.shape[1]
    if m == 0:
        return old
    begin = jnp.minimum(as_int32(lengths), m)
    begin = jnp.broadcast_to(jnp.where(lengths < 0, m, begin), (b,))
    place = begin[:, None] + jnp.arange(n, dtype=jnp.int32)[None]
    if table is None:
        return _written(old, place, tokens)
    to = None
    if is_explicit(old):  # every device then has all rows, and writes those of its own pages
        to = jax.typeof(old).sharding
        wanted = P(None, None), P(None, None), P(None, None, *to.spec[2:])
        where = tuple(NamedSharding(to.mesh, spec) for spec in wanted)
        table, place, tokens = jax.sharding.reshard((table, place, tokens), where)
    page = jnp.take_along_axis(table, place // size, axis=1, mode="fill", fill_value=-1)
    page = jnp.where((page >= 0) & (page < old.shape[0]), page, old.shape[0])
    return old.at[page, place % size].set(tokens, mode="drop", unique_indices=True, out_sharding=to)


def _written(old: jax.Array, place: jax.Array, tokens: jax.Array) -> jax.Array:
    """The cache with `tokens` at `place` of its rows.

    Where types say how the cache is split, each device writes into its own part.
    """
    # A batched scatter stays sharded along the batch.
    write_rows: Any = jax.vmap(lambda row, i, x: row.at[i].set(x, mode="drop", unique_indices=True))
    if not is_explicit(old):
        return write_rows(old, place, tokens)
    sharding = jax.typeof(old).sharding
    rows, keys, *others = sharding.spec

    def write_own(old: jax.Array, place: jax.Array, tokens: jax.Array) -> jax.Array:
        if keys is not None:
            place -= lax.axis_index(keys) * old.shape[1]
            # Places before this part are moved past its end, where they are dropped.
            place = jnp.where(place < 0, old.shape[1] - place, place)
        return write_rows(old, place, tokens)

    specs = sharding.spec, P(rows), P(rows, None, *others)
    to = tuple(NamedSharding(sharding.mesh, spec) for spec in specs)
    write = jax.shard_map(write_own, mesh=sharding.mesh, in_specs=specs, out_specs=specs[0])
    return write(*jax.sharding.reshard((old, place, tokens), to))


def quantize_tpa_factors(
    a: ArrayLike, b: ArrayLike, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """The outer product a b with b in eight bits: (a s, b / s), s a power of two for each token.

        s = the least power of two with max |b| / s <= 127 (int8) or 448 (float8_e4m3fn)

    `tpa_decode` takes the two in place of ak and bk, or of av and bv. Scores and values are linear
    in a, so s needs no place of its own, and multiplying by it is exact (but in float16 a s may be
    subnormal: there small factors lose bits). Where a s would not be finite, s is smaller, and
    b / s is clipped. Otherwise only b / s is rounded: with normal factors (D = 128)
    the output differs by 1 to 2 % (int8) and 3 to 5 % (float8_e4m3fn) in the mean; with three
    features twenty times as large as the others by 4 to 15 % with either.

    Args:
      a: head factors [..., H]; bfloat16, float16 or float32.
      b: feature factors [..., D], with the same leading axes: one s each.
      dtype: int8, or float8_e4m3fn (kernels: from sm_89 on). Kernels take even D and E.

    Returns:
      a s in the dtype of a, and b / s rounded to the nearest in `dtype`. Finite factors give finite
      ones; a is NaN where b is not finite.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.
    """
    a, b = checks.array("a", a), checks.array("b", b)
    checks.floating("a", a)
    checks.floating("b", b)
    is_array = isinstance(dtype, jax.Array | np.ndarray)
    narrow = None if is_array else next((each for each in QUANTISED if each == dtype), None)
    if narrow is None:
        raise ValueError(f"{checks.shown('dtype', dtype)}; accepted: int8 or float8_e4m3fn")
    if not a.ndim or not b.ndim or a.shape[:-1] != b.shape[:-1]:
        raise ValueError(
            f"b.shape is {b.shape}; accepted: [..., D] with the leading axes of a.shape {a.shape}"
        )
    if is_explicit(a):  # one device has the factors of a token
        to = jax.typeof(a).sharding
        b = jax.sharding.reshard(b, NamedSharding(to.mesh, P(*to.spec[:-1], None)))
    return _quantised(a, b, narrow)


@partial(jax.jit, static_argnums=2, inline=True)
def _quantised(a: jax.Array, b: jax.Array, narrow: Any) -> tuple[jax.Array, jax.Array]:
    is_int = narrow == jnp.int8
    top = 127.0 if is_int else float(jnp.finfo(narrow).max)
    y = b.astype(wide(b.dtype))
    known = jnp.isfinite(y).all(axis=-1, keepdims=True)
    y = jnp.where(known, y, 0)
    least = (_largest(y) / top).astype(jnp.float32)
    exponent = _exponent(least)
    exponent = jnp.where(least > _power_of_two(exponent), exponent + 1, exponent)
    s = _power_of_two(_in_range(jnp.where(_largest(y) > 0, exponent, 0), a))
    y = y / s.astype(y.dtype)
    y = jnp.clip(jnp.round(y) if is_int else y, -top, top)
    x = a.astype(wide(a.dtype)) * jnp.where(known, s, jnp.nan).astype(wide(a.dtype))
    return x.astype(a.dtype), y.astype(narrow)


def _in_range(exponent: jax.Array, a: jax.Array) -> jax.Array:
    """The nearest exponent at which a s is finite and, in dtypes with 8 exponent bits, normal.

    What is not finite already does not count: other heads have the same s.
    """
    info = jnp.finfo(a.dtype)
    x = jnp.abs(a.astype(wide(a.dtype)))
    x = jnp.where(jnp.isfinite(x), x, 0)
    most = info.maxexp - 1 - _exponent(_largest(x))
    least = jnp.full_like(most, -126)
    if info.nexp >= 8:
        smallest = jnp.min(x, axis=-1, keepdims=True, where=x > 0, initial=1.0)
        least = jnp.maximum(least, info.minexp - _exponent(smallest))
    return jnp.clip(exponent, jnp.minimum(least, most), jnp.minimum(most, 127))


def _exponent(x: jax.Array) -> jax.Array:
    """floor(log2(x)) of positive numbers, as float32 has it; -127 of those below 2**-126 and of 0.

    From its bits: jnp.frexp forgets how x is sharded (JAX 0.12).
    """
    return (lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) >> 23) - 127


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent, from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _largest(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x), axis=-1, keepdims=True, initial=0.0)
