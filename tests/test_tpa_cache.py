"""tpa_decode's cache: tokens written into it, pages, and feature factors in eight bits."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests import h200
from tests.ops import cpu_mesh
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_turn,
    kernel_implementation,
    random_array,
    random_cotangents,
    to_float64,
    value_and_vjp,
)
from tests.tpa_decode import both, factors, loop, loop_gradients

KERNEL = kernel_implementation()
Rng = np.random.Generator
DTYPES8 = [jnp.int8, jnp.float8_e4m3fn]


# Appending


def appended(cache: Any, new: Any, lengths: Any, table: Any = None) -> np.ndarray:
    """Token by token."""
    out, new = np.array(cache), np.asarray(new)
    pages, size = out.shape[:2]
    for b, n in np.ndindex(*new.shape[:2]):
        m = int(lengths[b]) + n
        if lengths[b] < 0:
            continue
        if table is None and m < size:
            out[b, m] = new[b, n]
        elif table is not None and m < size * table.shape[1]:
            page = table[b, m // size]
            if 0 <= page < pages:
                out[page, m % size] = new[b, n]
    return out


def caches(rng: Rng, *lead: int) -> dict[str, jax.Array]:
    """One of each dtype and number of axes."""
    return {
        "ak": random_array(rng, (*lead, 3)),
        "bk": random_array(rng, (*lead, 2, 5), jnp.bfloat16),
        "bv": jnp.asarray(rng.integers(-127, 128, (*lead, 4)), jnp.int8),
    }


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8, np.int64])
@pytest.mark.parametrize("lengths", [[0, 7, 5], [6, 8, 9], [-1, 100, 3]])
def test_append(rng: Rng, lengths: Any, dtype: Any) -> None:
    cache, new = caches(rng, 3, 9), caches(rng, 3, 2)
    lengths = np.array(lengths).astype(dtype)
    got = pallas_ops.tpa_append(cache, new, lengths)
    assert got.keys() == cache.keys()
    for name, x in cache.items():
        np.testing.assert_array_equal(got[name], appended(x, new[name], lengths))


@pytest.mark.parametrize("lengths", [[0, 7], [3, 8], [11, 12], [-1, 2**31 - 1]])
def test_append_to_pages(rng: Rng, lengths: list[int]) -> None:
    """Over the end of a page; a token whose page is none is not written."""
    pool, new = caches(rng, 6, 4), caches(rng, 2, 3)
    for table in ([[4, 0, 2], [1, 5, 3]], [[4, -1, 2], [1, 5, 6]]):
        got = pallas_ops.tpa_append(pool, new, jnp.array(lengths), page_table=jnp.array(table))
        for name, x in pool.items():
            np.testing.assert_array_equal(
                got[name], appended(x, new[name], lengths, np.array(table))
            )


def test_append_of_one_length_and_of_nothing(rng: Rng) -> None:
    cache, new = random_array(rng, (2, 5, 3)), random_array(rng, (2, 1, 3))
    got = pallas_ops.tpa_append(cache, new, 4)
    np.testing.assert_array_equal(got, appended(cache, new, [4, 4]))
    np.testing.assert_array_equal(pallas_ops.tpa_append(cache, new[:, :0], 4), cache)


def test_append_vmapped(rng: Rng) -> None:
    cache, new = random_array(rng, (2, 3, 5, 4)), random_array(rng, (2, 3, 2, 4))
    lengths = jnp.array([[0, 4, 5], [3, -1, 1]])
    got = jax.vmap(pallas_ops.tpa_append)(cache, new, lengths)
    np.testing.assert_array_equal(got, [*map(appended, cache, new, lengths)])


@pytest.mark.parametrize("paged", [False, True])
def test_append_in_place(paged: bool) -> None:
    """A donated cache is not copied, on an H200 either."""
    shapes = ((256, 64, 128) if paged else (32, 512, 128)), (32, 1, 128)
    struct: Any = jax.ShapeDtypeStruct
    lengths, table = struct((32,), jnp.int32), struct((32, 8), jnp.int32)
    tables = (table,) if paged else ()

    def with_table(cache: Any, new: Any, lengths: Any, table: Any = None) -> Any:
        return pallas_ops.tpa_append(cache, new, lengths, page_table=table)

    append: Any = jax.jit(with_table, donate_argnums=0)

    def xs(dtype: Any) -> Any:
        return *(struct(shape, dtype) for shape in shapes), lengths, *tables

    # XLA for CPUs scatters float32 alone.
    here = append.lower(*xs(jnp.float32)).compile().memory_analysis()
    for memory in (here, h200.compile_for_h200(append, *xs(jnp.bfloat16)).memory):
        assert memory.alias_size_in_bytes == memory.output_size_in_bytes >= 2 * 256 * 64 * 128
        assert memory.temp_size_in_bytes < 2**16


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("paged", [False, True])
def test_append_stays_sharded(rng: Rng, paged: bool, kind: AxisType) -> None:
    """Along the batch, and along heads or features; pages are everywhere, so tokens travel."""
    cache, new = random_array(rng, (4, 6, 8)), random_array(rng, (4, 1, 8))
    lengths, table = jnp.array([0, 5, 6, 2]), jnp.array([[1, 4], [0, 2], [3, 1], [2, 0]])
    tables = (table,) if paged else ()
    specs = [P(None if paged else "y", None, "x"), P("y", None, "x"), P("y"), P("y")]
    xs = put(cpu_mesh(kind), (cache, new, lengths, *tables), specs)

    def append(cache: Any, new: Any, lengths: Any, table: Any = None) -> Any:
        return pallas_ops.tpa_append(cache, new, lengths, page_table=table)

    compiled = jax.jit(append).lower(*xs).compile()
    assert paged or not h200.count_collectives(compiled.as_text() or "")
    got = compiled(*xs)
    np.testing.assert_array_equal(got, appended(cache, new, lengths, *map(np.asarray, tables)))
    assert got.sharding.is_equivalent_to(xs[0].sharding, 3)


def put(mesh: Mesh, xs: Sequence[Any], specs: Sequence[P]) -> list[jax.Array]:
    pairs = zip(xs, specs, strict=False)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(new=jnp.zeros((2, 1, 4))), ValueError, r"new.shape is \(2, 1, 4\); accepted: .*=3"),
        (dict(new=jnp.zeros((3, 1, 3))), ValueError, r"new.shape is \(3, 1, 3\); accepted: .*B=2"),
        (dict(new=jnp.zeros((2, 1, 3), jnp.bfloat16)), TypeError, "new.dtype is 'bfloat16'; acc"),
        (dict(new=[jnp.zeros((2, 1, 3))]), ValueError, "new is a tree .*; accepted: one like"),
        (dict(lengths=jnp.zeros(2)), TypeError, "lengths.dtype is 'float32'; accepted: integers"),
        (dict(lengths=jnp.zeros(3, int)), ValueError, r"lengths.shape is \(3,\); accepted: .*B=2"),
        (dict(page_table=jnp.zeros(2, int)), ValueError, r"page_table.shape is \(2,\); accepted"),
        (dict(page_table=jnp.zeros((2, 1))), TypeError, "page_table.dtype is 'float32'; accepted"),
    ],
)
def test_append_refuses(change: dict[str, Any], error: type, message: str) -> None:
    given = dict(cache=jnp.zeros((2, 5, 3)), new=jnp.zeros((2, 1, 3)), lengths=jnp.zeros(2, int))
    with pytest.raises(error, match=message):
        pallas_ops.tpa_append(**(given | change))


# Eight bits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_quantised_factors_are_near(rng: Rng, dtype: Any, dtype8: Any) -> None:
    """Within half a step of the largest feature; A factors keep their digits."""
    a = random_array(rng, (3, 40, 2, 7), dtype)
    b = jnp.asarray(rng.standard_normal((3, 40, 2, 16)) * 2.0 ** rng.integers(-6, 6, (2, 1)), dtype)
    got_a, got_b = pallas_ops.quantize_tpa_factors(a, b, dtype8)
    assert (got_a.dtype, got_b.dtype) == (dtype, dtype8)
    x, y, exact_a, exact_b = (to_float64(z) for z in (got_a, got_b, a, b))
    s = 2.0 ** np.round(np.log2(np.abs(x / exact_a).max(axis=-1, keepdims=True)))
    normal = np.abs(exact_a * s) >= float(jnp.finfo(dtype).tiny)
    np.testing.assert_array_equal(x, np.where(normal, exact_a * s, x))
    assert np.all(np.abs(x - exact_a * s) <= 2.0**-25)  # where float16 is subnormal
    error, top = np.abs(y * s - exact_b), np.abs(exact_b).max(axis=-1, keepdims=True)
    if dtype8 == jnp.int8:
        assert np.all(np.abs(y).max(axis=-1) > 63)
        assert np.all(error <= s / 2)
    else:
        assert np.all(np.abs(y).max(axis=-1) > 223)
        assert np.all(error <= np.maximum(np.abs(exact_b) / 16, top * 2.0**-18))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype8", DTYPES8)
def test_quantised_extremes(dtype: Any, dtype8: Any) -> None:
    """Neither infinities nor NaN nor subnormal A factors, unless they were there."""
    info = jnp.finfo(dtype)
    values = [0.0, float(info.max), float(info.tiny), 1.0, 1e-20, -1e20, -127.0]
    a, b = (jnp.asarray(x, dtype) for x in np.meshgrid(values, values))
    a, b = a.reshape(-1, 1), b.reshape(-1, 1)
    a = jnp.concatenate([a, jnp.roll(a, 3, axis=0)], axis=-1)
    x, y = (np.asarray(z, np.float32) for z in pallas_ops.quantize_tpa_factors(a, b, dtype8))
    assert np.isfinite(x).all()
    assert np.isfinite(y).all()
    assert np.all((x == 0) | (np.abs(x) >= float(info.tiny)))
    np.testing.assert_array_equal(x == 0, np.asarray(a == 0))
    np.testing.assert_array_equal(y[b[:, 0] == 0], 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_quantised_features_that_are_not_finite_make_nan(bad: float) -> None:
    a, b = jnp.ones((2, 3)), jnp.array([[1.0, bad], [1.0, 2.0]])
    x, y = pallas_ops.quantize_tpa_factors(a, b, jnp.int8)
    np.testing.assert_array_equal(jnp.isnan(x).all(axis=-1), [True, False])
    np.testing.assert_array_equal(y[1], [32, 64])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(dtype="int4"), ValueError, "dtype is 'int4'; accepted: int8 or float8_e4m3fn"),
        (dict(dtype=None), ValueError, "dtype is None; accepted: int8 or float8_e4m3fn"),
        (dict(b=jnp.zeros((3, 4))), ValueError, r"b.shape is \(3, 4\); accepted: \[..., D\] with"),
        (dict(a=jnp.zeros((2, 3), int)), TypeError, "a.dtype is 'int32'; accepted: bfloat16"),
    ],
)
def test_quantising_refuses(change: dict[str, Any], error: type, message: str) -> None:
    given: dict[str, Any] = dict(a=jnp.zeros((2, 3)), b=jnp.zeros((2, 4)), dtype=jnp.int8)
    with pytest.raises(error, match=message):
        pallas_ops.quantize_tpa_factors(**(given | change))


def quantised(xs: Any, dtype8: Any) -> tuple[Any, ...]:
    aq, ak, av, bq, bk, bv = xs
    ak, bk = pallas_ops.quantize_tpa_factors(ak, bk, dtype8)
    av, bv = pallas_ops.quantize_tpa_factors(av, bv, dtype8)
    return aq, ak, av, bq, bk, bv


def widened(xs: Any) -> tuple[Any, ...]:
    return (*xs[:4], *(x.astype(xs[1].dtype) for x in xs[4:]))


SHAPES = [
    case(b=2, n=1, m=67, h=5, r=6, d=24, e=16),
    case(b=1, n=2, m=45, h=17, r=4, d=16, e=34, rk=2, rv=3),
    case(b=1, n=1, m=40, h=34, r=6, d=64, e=64, rk=2, rv=2),
    case(b=1, n=1, m=70, h=47, d=32, e=16, rk=2, rv=2, full=True),
]


DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


EIGHT_BITS = [
    pytest.param(d8, d, id=f"{d8.__name__}-{d.__name__}")
    for d8, d in [
        (jnp.int8, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.bfloat16),
        (jnp.int8, jnp.float32),
        (jnp.float8_e4m3fn, jnp.float16),
    ]
]


@pytest.mark.parametrize(("shape", "dtype8", "dtype"), in_turn(SHAPES, EIGHT_BITS))
def test_decoding_of_eight_bits(rng: Rng, shape: Any, dtype8: Any, dtype: Any) -> None:
    """What the same numbers in 16 bits and more give, and their gradients."""
    xs = quantised(factors(rng, dtype, **shape), dtype8)
    lengths = jnp.asarray(rng.integers(shape["n"], shape["m"] + 1, shape["b"]), jnp.int32)
    smooth = [i for i in range(4) if xs[i] is not None]
    weights = random_cotangents(rng, jax.eval_shape(both("xla"), *xs))

    def of(implementation: Any) -> Any:
        def run(*ys: jax.Array) -> Any:
            filled = dict(zip(smooth, ys, strict=True))
            given: Any = [filled.get(i, x) for i, x in enumerate(xs)]
            return both(implementation, lengths=lengths)(*given)

        return value_and_vjp(run, tuple(xs[i] for i in smooth), weights)

    (got, grads), own = of(KERNEL), both("xla", lengths=lengths)(*xs)
    out, lse = zip(got, own, loop(widened(xs), lengths), strict=True)
    assert_as_good_as_reference(*out)
    if dtype == jnp.bfloat16:  # scores are within 2**-16 of their largest
        assert_as_good_as_reference(*lse, floor=2.0**-16)
    else:
        assert_as_good_as_reference(*lse)
    truth = loop_gradients(widened(xs), lengths, weights)
    assert_close(grads, tuple(truth[i] for i in smooth), terms=shape["m"])


def test_gradients_of_eight_bits_are_refused(rng: Rng) -> None:
    aq, ak, av, bq, bk, bv = quantised(factors(rng), jnp.float8_e4m3fn)

    def run(bk: jax.Array) -> jax.Array:
        return pallas_ops.tpa_decode(aq, ak, av, bq, bk, bv).sum()

    with pytest.raises(TypeError, match="factor of dtype float8_e4m3fn; accepted: in factors that"):
        jax.grad(run)(bk)


# Pages

TABLES = [
    dict(size=16, pages=5),
    dict(size=64, pages=2, b=3, n=2, h=17, rk=2, rv=2),
    dict(size=7, pages=9, h=34, rk=2, rv=1),
    dict(size=128, pages=1, h=47, rk=2, rv=2),
    dict(size=32, pages=3, full=True, window=40),
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
    cache = *pool[1:3], *pool[4:]
    rows = [x[table].reshape(shape["b"], size * pages, *x.shape[2:]) for x in cache]
    xs, ys = ((own[0], *c[:2], own[3], *c[2:]) for c in (cache, rows))
    for row, length in zip(table, lengths, strict=True):
        unused = row[-(-length // size) :]
        unused[:] = rng.choice([-1, count, 2**31 - 1, -(2**31)], unused.size)
    given = dict(lengths=jnp.asarray(lengths), page_table=jnp.asarray(table, jnp.int32))
    return xs, ys, given | ({} if window is None else dict(window=window))


@pytest.mark.parametrize(
    ("table", "dtype"), in_turn([case(**table) for table in TABLES], DTYPES[:2])
)
def test_pages(rng: Rng, table: dict[str, Any], dtype: Any) -> None:
    """As a cache of each row's own; table entries behind the length are never followed."""
    xs, ys, given = paged(rng, dtype, table)
    whole = {k: v for k, v in given.items() if k != "page_table"}
    want = both("xla", **whole)(*ys)
    np.testing.assert_array_equal(both("xla", **given)(*xs)[0], want[0])
    truth = loop(ys, whole["lengths"], window=whole.get("window"))
    assert_as_good_as_reference(both(KERNEL, **given)(*xs), want, truth)


@pytest.mark.parametrize("dtype8", DTYPES8)
def test_pages_of_eight_bits(rng: Rng, dtype8: Any) -> None:
    xs, _, given = paged(rng, jnp.bfloat16, TABLES[1])
    xs = quantised(xs, dtype8)
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


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_pages_out_of_range_are_the_nearest(rng: Rng, implementation: Any) -> None:
    xs, *_ = paged(rng, jnp.float32, TABLES[0])
    last = len(xs[1]) - 1
    run = both(implementation, lengths=70)
    table = jnp.array([[-1, 0, last + 1, 2, -(2**31)], [1, 2**31 - 1, -last, 3, last]])
    got, want = (run(*xs, page_table=x) for x in (table, jnp.clip(table, 0, last)))
    jax.tree.map(np.testing.assert_array_equal, got, want)


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
        own = want[i].reshape(*table.shape, -1, *want[i].shape[2:])
        want[i] = jnp.zeros_like(xs[i]).at[table].add(own)
    assert_close(list(got), want, terms=200)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["interpret", None, "xla"])
def test_pages_sharded(rng: Rng, implementation: Any, kind: AxisType) -> None:
    """Rows are split, and heads."""
    xs, _, given = paged(rng, jnp.float32, dict(size=16, pages=3, h=4))
    want = both("xla", **given)(*xs)
    queries, heads = P("y", None, "x"), P(None, None, "x")
    mesh, specs = cpu_mesh(kind), [queries, heads, heads, P("y"), P(), P()]

    def run(lengths: Any, table: Any, *xs: Any) -> Any:
        return both(implementation, lengths=lengths, page_table=table)(*xs)

    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        ys = put(mesh, (given["lengths"], given["page_table"], *xs), [P("y"), P("y"), *specs])
        compiled = jax.jit(run).lower(*ys).compile()
        got = compiled(*ys)
    assert not h200.count_collectives(compiled.as_text() or "")
    assert_close(got, want, terms=48)
    assert got[0].sharding.is_equivalent_to(NamedSharding(mesh, queries), 4)


@pytest.mark.parametrize("pooled", [False, True])
def test_pages_vmapped(rng: Rng, pooled: bool) -> None:
    """Over sets of rows of one pool, and over pools."""
    pairs = [paged(rng, jnp.float32, TABLES[0]) for _ in range(2)]
    first, given = pairs[0][0], pairs[0][2]
    xs = [jnp.stack(x) for x in zip(*(pair[0] for pair in pairs), strict=True)]
    tables, lengths = (jnp.stack([pair[2][k] for pair in pairs]) for k in ("page_table", "lengths"))
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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            dict(lengths=None),
            ValueError,
            "lengths is None; accepted: integers .*, for there are pa",
        ),
        (dict(page_table=jnp.zeros(2, int)), ValueError, r"page_table.shape is \(2,\); accepted"),
        (dict(page_table=jnp.zeros((3, 1), int)), ValueError, r"page_table.shape is .*B=2"),
        (dict(page_table=jnp.zeros((2, 1))), TypeError, "page_table.dtype is 'float32'; accepted"),
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
        pallas_ops.tpa_decode(**(given | change))
