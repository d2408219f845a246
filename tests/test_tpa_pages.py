"""tpa_decode of a cache in pages, and what it refuses."""

import contextlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import h200, shards
from tests.ops import cpu_mesh
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_turn,
    kernel_implementation,
    on_host,
    random_cotangents,
    value_and_vjp,
)
from tests.tpa_decode import DTYPES8, both, factors, loop, quantised, widened

KERNEL = kernel_implementation()
Rng = np.random.Generator
TABLES = [
    dict(size=16, pages=5),
    dict(size=64, pages=2, b=3, n=2, h=17, rk=2, rv=2),
    dict(size=7, pages=9, h=34, rk=2, rv=1),
    dict(size=128, pages=1, h=47, rk=2, rv=2),
    dict(size=32, pages=3, full=True, window=40),
    dict(size=16, pages=7, b=3, h=78, rk=2, rv=2, window=70),  # two tiles
    dict(size=24, pages=4, h=66),
]


def paged(rng: Rng, dtype: Any, case_: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Factors in a pool, the same row by row, and the arguments that say so."""
    shape = dict(b=2, n=1, d=16, e=24, h=5) | case_
    size, pages, window = shape.pop("size"), shape.pop("pages"), shape.pop("window", None)
    count = shape["b"] * pages + 2
    pool = factors(rng, dtype, **(shape | dict(b=count, m=size)))
    own = factors(rng, dtype, **(shape | dict(m=1)))
    table = rng.integers(0, count, (shape["b"], pages))  # pages are shared
    lengths = rng.integers(shape["n"], size * pages + 1, shape["b"])
    cache = on_host((*pool[1:3], *pool[4:]))
    rows = [x[table].reshape(shape["b"], size * pages, *x.shape[2:]) for x in cache]
    xs, ys = ((own[0], *c[:2], own[3], *c[2:]) for c in (cache, rows))
    for row, length in zip(table, lengths, strict=True):
        unused = row[-(-length // size) :]
        unused[:] = rng.choice([-1, count, 2**31 - 1, -(2**31)], unused.size)
    given = dict(lengths=jnp.asarray(lengths), page_table=jnp.asarray(table, jnp.int32))
    return xs, ys, given | ({} if window is None else dict(window=window))


@pytest.mark.parametrize(
    ("table", "dtype"), in_turn([case(**table) for table in TABLES], [jnp.float32, jnp.bfloat16])
)
def test_pages(rng: Rng, table: dict[str, Any], dtype: Any) -> None:
    """As a cache of each row's own; table entries beyond the length are never followed."""
    xs, ys, given = paged(rng, dtype, table)
    whole = {k: v for k, v in given.items() if k != "page_table"}
    want = both("xla", **whole)(*ys)
    truth = loop(ys, whole["lengths"], window=whole.get("window"))
    for implementation in ("xla", KERNEL):
        assert_as_good_as_reference(both(implementation, **given)(*xs), want, truth)


@pytest.mark.slow
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_pages_of_eight_bits(rng: Rng, dtype8: Any) -> None:
    xs, _, given = paged(rng, jnp.bfloat16, TABLES[1])
    xs = on_host(quantised(xs, dtype8))
    lengths, table = given["lengths"], np.clip(given["page_table"], 0, len(xs[1]) - 1)
    ys = tuple(
        x if i in (0, 3) else x[table].reshape(len(table), -1, *x.shape[2:])
        for i, x in enumerate(widened(xs))
    )
    out, lse = zip(
        both(KERNEL, **given)(*xs), both("xla", **given)(*xs), loop(ys, lengths), strict=True
    )
    assert_as_good_as_reference(*out)
    assert_as_good_as_reference(*lse, floor=2.0**-16)


@pytest.mark.parametrize("implementation", [KERNEL, "xla"])
def test_pages_out_of_range_are_the_nearest(rng: Rng, implementation: Any) -> None:
    xs, *_ = paged(rng, jnp.float32, TABLES[0])
    last = len(xs[1]) - 1
    run = both(implementation, lengths=70)
    table = jnp.array([[-1, 0, last + 1, 2, -(2**31)], [1, 2**31 - 1, -last, 3, last]])
    beyond = jnp.full(table.shape, 2**32 - 3, jnp.uint32)  # in int32 they would be below 0
    for given, nearest in ((table, jnp.clip(table, 0, last)), (beyond, jnp.full_like(table, last))):
        got, want = (run(*xs, page_table=x) for x in (given, nearest))
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_a_pool_without_pages(rng: Rng) -> None:
    """Serves rows without keys."""
    xs, _, given = paged(rng, jnp.float32, TABLES[0])
    xs = tuple(x if i in (0, 3) else x[:0] for i, x in enumerate(xs))
    out, lse = both(None, **given | dict(lengths=jnp.zeros(2, jnp.int32)))(*xs)
    assert_close((out, lse), (np.zeros_like(out), np.full_like(lse, -np.inf)))


@pytest.mark.slow
def test_pages_of_a_row_do_not_depend_on_the_batch(rng: Rng) -> None:
    xs, _, given = paged(rng, jnp.bfloat16, TABLES[1])
    run = partial(both, KERNEL, batch_invariant=True)
    whole = run(**given)(*xs)
    one = run(**{k: v[1:2] for k, v in given.items()})(
        *(x[1:2] if i in (0, 3) else x for i, x in enumerate(xs))
    )
    np.testing.assert_array_equal(whole[0][1:2], one[0])


def test_gradients_through_pages(rng: Rng) -> None:
    xs, ys, given = paged(rng, jnp.float32, TABLES[0])
    lengths, table = given["lengths"], np.clip(given["page_table"], 0, len(xs[1]) - 1)
    weights = random_cotangents(rng, jax.eval_shape(both("xla", lengths=lengths), *ys))
    got = value_and_vjp(both(KERNEL, **given), xs, weights)[1]
    want = list(value_and_vjp(both("xla", lengths=lengths), ys, weights)[1])
    for i in (1, 2, 4, 5):
        own = np.asarray(want[i]).reshape(*table.shape, -1, *want[i].shape[2:])
        want[i] = np.zeros_like(xs[i])
        np.add.at(want[i], table, own)
    assert_close(list(got), want, terms=200)


@pytest.mark.parametrize(
    ("kind", "implementation"),
    in_turn([AxisType.Auto, AxisType.Explicit], [None, "interpret", "xla"]),
)
def test_pages_sharded(rng: Rng, implementation: Any, kind: AxisType) -> None:
    """Rows are split, and heads."""
    xs, _, given = paged(rng, jnp.float32, dict(size=16, pages=3, h=4))
    want = both("xla", **given)(*xs)
    queries, heads = P("y", None, "x"), P(None, None, "x")
    mesh, specs = cpu_mesh(kind), [queries, heads, heads, P("y"), P(), P()]

    def run(lengths: Any, table: Any, *xs: Any) -> Any:
        return both(implementation, lengths=lengths, page_table=table)(*xs)

    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        ys = (given["lengths"], given["page_table"], *xs)
        ys = shards.placed(mesh, ys, (P("y"), P("y"), *specs))
        compiled = jax.jit(run).lower(*ys).compile()
        got = compiled(*ys)
    assert not h200.count_collectives(compiled.as_text() or "")
    assert_close(got, want, terms=48)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, queries), 4)


def test_gradients_of_explicit_rows_that_do_not_depend_on_the_batch(rng: Rng) -> None:
    """The reference runs one row after the other, so its results are on every device."""
    xs, _, given = paged(rng, jnp.float32, dict(size=16, pages=3, h=4))
    weights = random_cotangents(rng, jax.eval_shape(both("xla", **given), *xs))
    want = value_and_vjp(both("xla", **given), xs, weights)[1]
    mesh, rows = cpu_mesh(AxisType.Explicit), P("y")
    specs = rows, rows, rows, P(), P(), rows, P(), P(), rows, rows
    with jax.set_mesh(mesh):
        arrays = given["lengths"], given["page_table"], *xs, *weights
        lengths, table, *ys = shards.placed(mesh, arrays, specs)
        run = both(None, lengths=lengths, page_table=table, batch_invariant=True)
        got = value_and_vjp(run, tuple(ys[:6]), tuple(ys[6:]))[1]
    assert_close(list(got), list(want), terms=200)


@pytest.mark.parametrize("pooled", [False, True])
def test_pages_vmapped(rng: Rng, pooled: bool) -> None:
    """Over sets of rows of one pool, and over pools."""
    pairs = [paged(rng, jnp.float32, TABLES[0]) for _ in range(2)]
    first, given = pairs[0][0], pairs[0][2]
    xs = [np.stack(x) for x in zip(*(pair[0] for pair in pairs), strict=True)]
    tables, lengths = (np.stack([pair[2][k] for pair in pairs]) for k in ("page_table", "lengths"))
    axes = [0 if pooled or i in (0, 3) else None for i in range(6)]
    xs = [x if axis == 0 else y for x, y, axis in zip(xs, first, axes, strict=True)]

    def run(xs: Any, table: Any, lengths: Any, implementation: Any) -> Any:
        return both(implementation, page_table=table, lengths=lengths)(*xs)

    got, want = (
        jax.vmap(partial(run, implementation=i), in_axes=(axes, 0, 0))(xs, tables, lengths)
        for i in (KERNEL, "xla")
    )
    assert given.keys() == {"page_table", "lengths"}
    assert_close(got, want, terms=80)


HUGE = jax.ShapeDtypeStruct((2, 2**27), "int32")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(lengths=None),
            ValueError,
            "lengths is None; accepted, with a page_table: integers",
        ),
        (dict(page_table=jnp.zeros(2, int)), ValueError, r"page_table.shape is \(2,\); accepted"),
        (dict(page_table=jnp.zeros((3, 1), int)), ValueError, r"page_table.shape is .*B=2"),
        (dict(page_table=jnp.zeros((2, 1))), TypeError, "page_table.dtype is 'float32'; accepted"),
        (dict(page_table=HUGE), ValueError, "page_table has 134217728 pages of 16 tokens a row; a"),
        (dict(bk=jnp.zeros((7, 16, 16), jnp.int8)), TypeError, "bv.dtype is 'float32'; accepted"),
        (dict(bk=jnp.zeros((7, 16, 16), jnp.int32)), TypeError, "bk.dtype is 'int32'; accepted"),
        (dict(ak=jnp.zeros((7, 16, 3), jnp.int8)), TypeError, "ak.dtype is 'int8'; accepted"),
    ],
)
def test_decoding_refuses(change: dict[str, Any], error: type, message: str) -> None:
    zeros = jnp.zeros
    given: dict[str, Any] = dict(
        aq=zeros((2, 1, 3, 4)), ak=zeros((7, 16, 3)), av=zeros((7, 16, 3)), bq=zeros((2, 1, 4, 16)),
        bk=zeros((7, 16, 16)), bv=zeros((7, 16, 8)), lengths=zeros(2, int),
        page_table=zeros((2, 3), int),
    )  # fmt: skip
    with pytest.raises(error, match=message):
        jax.eval_shape(pallas_ops.tpa_decode, **(given | change))


def test_export_of_any_number(rng: Rng) -> None:
    """One program for every number of rows, and of pages in the pool."""
    xs, _, given = paged(rng, jnp.float32, dict(b=5, size=4, pages=3))
    b, p = jax.export.symbolic_shape("b, p")
    rows = [xs[0], xs[3], *given.values()]

    def struct_of(x: Any) -> Any:
        return jax.ShapeDtypeStruct((b if any(x is y for y in rows) else p, *x.shape[1:]), x.dtype)

    fn: Any = jax.jit(lambda xs, given: pallas_ops.tpa_decode(*xs, **given))
    exported = jax.export.export(fn)(*jax.tree.map(struct_of, (xs, given)))
    assert_close(exported.call(xs, given), fn(xs, given), terms=16)
