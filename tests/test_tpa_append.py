"""tpa_append: tokens written into a cache or its pages."""

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
from tests.support import in_turn, random_array

Rng = np.random.Generator


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


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_append_by_a_narrow_table(rng: Rng, dtype: Any) -> None:
    """There are more pages than its integers count; the second token is beyond the table."""
    pool, new = random_array(rng, (300, 4, 2)), random_array(rng, (1, 2, 2))
    table = np.array([[3]], dtype)
    got = pallas_ops.tpa_append(pool, new, 3, page_table=table)
    np.testing.assert_array_equal(got, appended(pool, new, [3], table))


def test_append_of_one_length_and_of_nothing(rng: Rng) -> None:
    cache, new = random_array(rng, (2, 5, 3)), random_array(rng, (2, 1, 3))
    got = pallas_ops.tpa_append(cache, new, 4)
    np.testing.assert_array_equal(got, appended(cache, new, [4, 4]))
    np.testing.assert_array_equal(pallas_ops.tpa_append(cache, new[:, :0], 4), cache)
    no_pages = np.zeros((2, 0), np.int32)
    np.testing.assert_array_equal(pallas_ops.tpa_append(cache, new, 0, page_table=no_pages), cache)


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
    xs = (cache, new, lengths, *tables)
    xs = shards.placed(cpu_mesh(kind), xs, tuple(specs[: len(xs)]))

    def append(cache: Any, new: Any, lengths: Any, table: Any = None) -> Any:
        return pallas_ops.tpa_append(cache, new, lengths, page_table=table)

    compiled = jax.jit(append).lower(*xs).compile()
    assert paged or not h200.count_collectives(compiled.as_text() or "")
    got = compiled(*xs)
    np.testing.assert_array_equal(got, appended(cache, new, lengths, *map(np.asarray, tables)))
    assert got.sharding.is_equivalent_to(xs[0].sharding, 3)


SPLIT = [P("x"), P(None, "x"), P("y", "x", None), P(None, ("x", "y")), P(None, None, "y")]


@pytest.mark.parametrize("lengths", [3, [0, 2, 5, 7], [-1, 1, 3, 6]])
@pytest.mark.parametrize(("spec", "kind"), in_turn(SPLIT, [AxisType.Explicit, AxisType.Auto]))
def test_append_of_tokens_on_every_device(rng: Rng, spec: P, kind: AxisType, lengths: Any) -> None:
    """To a cache that is split along its rows or its tokens: some lie across two devices."""
    cache, new = random_array(rng, (4, 8, 8)), random_array(rng, (4, 3, 8))
    want = appended(cache, new, np.broadcast_to(lengths, 4))
    with jax.set_mesh(mesh := cpu_mesh(kind)):
        cache = jax.device_put(cache, NamedSharding(mesh, spec))
        got = pallas_ops.tpa_append(cache, new, lengths)
    np.testing.assert_array_equal(got, want)
    assert kind == AxisType.Auto or got.sharding.is_equivalent_to(cache.sharding, 3)


@pytest.mark.parametrize(
    "specs", [(P(), P(), P("y"), P("x")), (P("x"), P("x", None, "y"), P(), P())]
)
def test_append_to_pages_that_are_split_differently(rng: Rng, specs: Any) -> None:
    """Cache, tokens, lengths and table, whose types say so."""
    pool, new = random_array(rng, (16, 4, 8)), random_array(rng, (4, 2, 8))
    lengths, table = np.array([0, 3, 9, 14]), rng.permutation(16).reshape(4, 4)
    xs = shards.placed(cpu_mesh(AxisType.Explicit), (pool, new, lengths, table), specs)
    got = jax.jit(lambda *xs: pallas_ops.tpa_append(*xs[:3], page_table=xs[3]))(*xs)
    np.testing.assert_array_equal(got, appended(pool, new, lengths, table))
    assert got.sharding.is_equivalent_to(xs[0].sharding, 3)


HUGE = jax.ShapeDtypeStruct((2, 2**31 // 5 + 1), "int32")


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
        (
            dict(page_table=HUGE),
            ValueError,
            "page_table has 429496730 pages of 5 tokens a row; acc",
        ),
    ],
)
def test_append_refuses(change: dict[str, Any], error: type, message: str) -> None:
    given = dict(cache=jnp.zeros((2, 5, 3)), new=jnp.zeros((2, 1, 3)), lengths=jnp.zeros(2, int))
    with pytest.raises(error, match=message):
        jax.eval_shape(pallas_ops.tpa_append, **(given | change))
