"""Scans, gathers and pipelined loops, and what runs without the private JAX that they use."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import pallas_ops
from pallas_ops.core import launch, triton_ext
from pallas_ops.core.backend import NoKernelError
from tests import h200
from tests.support import assert_close, case, kernel_implementation, random_array

INTERPRETED = kernel_implementation() == "interpret"
Rng = np.random.Generator


def linear(before: Any, after: Any) -> Any:
    """h -> factor h + add, one such map after another."""
    return before[0] * after[0], after[0] * before[1] + after[1]


def scanned(a: jax.Array, b: jax.Array, **kwargs: Any) -> Any:
    """The scan of (a, b) in a kernel of one program."""

    def kernel(a_ref: Any, b_ref: Any, out_ref: Any) -> None:
        out_ref[...] = triton_ext.scan(linear, (a_ref[...], b_ref[...]), **kwargs)[1]

    return launch.launch(
        kernel,
        a,
        b,
        name="scan",
        grid=(1,),
        out_shape=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
        num_warps=2,
    )[0]


@pytest.mark.parametrize(
    "where",
    [
        case(shape=(32,), axis=0),
        case(shape=(16, 8), axis=0, reverse=True),
        case(shape=(4, 16), axis=1),
        case(shape=(4, 8, 8), axis=1, reverse=True),
        case(shape=(1, 8), axis=0),
    ],
)
def test_scan_is_the_associative_scan(rng: Rng, where: Any) -> None:
    where = dict(where)
    a, b = (random_array(rng, where["shape"]) for _ in range(2))
    kwargs = {name: where[name] for name in ("axis", "reverse") if name in where}
    with launch.interpreted(INTERPRETED):
        got = jax.jit(partial(scanned, **kwargs))(a, b)
    want = jax.jit(partial(lax.associative_scan, linear, **kwargs))((a, b))[1]
    assert_close(got, want, terms=32)


@pytest.mark.parametrize(("size", "shape"), [(64, (32,)), (4096, (64, 32)), (8, (4, 2, 16))])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gather_takes_numbers_in_any_order(
    rng: Rng, size: int, shape: tuple[int, ...], dtype: Any
) -> None:
    def kernel(x_ref: Any, index_ref: Any, out_ref: Any) -> None:
        out_ref[...] = triton_ext.gather(x_ref[...], index_ref[...])

    @jax.jit
    def gather(x: jax.Array, index: jax.Array) -> jax.Array:
        out = [jax.ShapeDtypeStruct(index.shape, x.dtype)]
        return launch.launch(
            kernel, x, index, name="gather", grid=(1,), out_shape=out, num_warps=4
        )[0]

    x, index = random_array(rng, (size,), dtype), rng.integers(0, size, shape, dtype=np.int32)
    with launch.interpreted(INTERPRETED):
        got = gather(x, index)
    np.testing.assert_array_equal(got, np.asarray(x)[index])


def test_every_supported_jax_has_what_is_private() -> None:
    assert triton_ext.AVAILABLE


def test_without_private_jax_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ext, "AVAILABLE", False)
    x = jax.ShapeDtypeStruct((2, 512, 96), jnp.float32)
    run = partial(pallas_ops.logcumsumexp, axis=1)
    with pytest.warns(UserWarning, match="logcumsumexp runs as jax.numpy: JAX .* has no scans in"):
        program = h200.compile_for_h200(run, x)
    assert not any("pallas_ops" in text for text in program.ptx)
    with pytest.raises(NoKernelError, match="has no scans in kernels; accepted: "):
        h200.compile_for_h200(partial(run, implementation="triton"), x)


@pytest.mark.parametrize("available", [True, False])
def test_heads_are_gathered_where_jax_can(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(triton_ext, "AVAILABLE", available)
    heads, features = (((2, 1024, 2, size), jnp.bfloat16) for size in (47, 64))
    query = ((2, 1, 47, 6), jnp.bfloat16), heads, heads, ((2, 1, 6, 64), jnp.bfloat16)
    xs = [jax.ShapeDtypeStruct(*x) for x in (*query, features, features)]
    program = h200.compile_for_h200(partial(pallas_ops.tpa_decode, implementation="triton"), *xs)
    (text,) = (x for x in program.ptx if ".entry pallas_ops_tpa_decode(" in x)
    # Rows of 47 heads are loaded number by number where they are not gathered; the query always is.
    assert (text.count("ld.global.b16") < 32) == available


@pytest.mark.parametrize("available", [True, False])
def test_loops_are_pipelined_where_asked(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    monkeypatch.setattr(triton_ext, "AVAILABLE", available)

    def kernel(x_ref: Any, out_ref: Any) -> None:
        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            i = triton_ext.pipelined(i, 3)
            total += x_ref[pl.ds(i * 64, 64), :]
            return total

        out_ref[...] = lax.fori_loop(0, 16, step, jnp.zeros((64, 64)))

    def run(x: jax.Array) -> Any:
        return launch.launch(
            kernel,
            x,
            name="sum",
            grid=(1,),
            out_shape=[jax.ShapeDtypeStruct((64, 64), jnp.float32)],
            num_warps=4,
        )[0]

    program = h200.compile_for_h200(run, jax.ShapeDtypeStruct((1024, 64), jnp.float32))
    assert any("cp.async" in text for text in program.ptx) == available
