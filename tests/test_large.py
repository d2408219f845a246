"""More than 2**31 elements, with each axis the long one: `pytest -m large`, on a GPU of 80 GiB."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops

pytestmark = pytest.mark.large
LONG = 2**23 + 77  # positions; times 257 or 64 * 4 more than 2**31 elements
THETA = 1.5


def array(shape: Sequence[int], seed: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Numbers between -1 and 1 that look random; made on the device."""
    place = jnp.full(shape, seed * 7919, jnp.uint32)
    for axis, factor in enumerate((2_654_435_761, 40_503, 2_246_822_519, 3_266_489_917)):
        if axis < len(shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
            place = (place ^ (index * jnp.uint32(factor))) * jnp.uint32(0x9E3779B1)
    return ((place >> 16).astype(jnp.float32) / 2**15 - 1).astype(dtype)


def vjp(fn: Callable[..., Any], *xs: jax.Array) -> Any:
    """Output, and the gradients for a cotangent of the output's own numbers."""
    out, pull = jax.vjp(fn, *xs)
    return out, pull(out)


def compare(fn: Callable[..., Any], x: jax.Array, axis: int, parts: Sequence[slice]) -> None:
    """Parts along an axis on which nothing depends but the same part of x."""
    assert x.size > 2**31
    run = jax.jit(partial(vjp, partial(fn, implementation="triton")))
    reference = jax.jit(partial(vjp, partial(fn, implementation="xla")))
    out, (dx,) = run(x)
    for part in parts:
        ends = dict(start_index=part.start, limit_index=part.stop, axis=axis)
        take = jax.jit(partial(jax.lax.slice_in_dim, **ends))
        want, (dwant,) = reference(take(x))
        alike(take(out), want)
        alike(take(dx), dwant)


def alike(got: jax.Array, want: jax.Array, tolerance: float = 2**-7) -> None:
    """Beside the largest number."""
    wide = np.asarray(want, np.float32)
    scale = np.abs(wide).max()
    np.testing.assert_allclose(np.asarray(got, np.float32) / scale, wide / scale, atol=tolerance)


def ends(size: int) -> list[slice]:
    """The first, some in the middle, and the last."""
    return [slice(0, 2), slice(size // 2, size // 2 + 2), slice(size - 2, size)]


lcse = pallas_ops.logcumsumexp
chunks = pallas_ops.chunk_cumsum_decay


@pytest.mark.parametrize(
    ("shape", "axis", "part_axis"),
    [
        ((2**22 + 3, 8, 64), 1, 0),
        ((1, 16, 2**27 + 64), 1, 2),
        ((2**21 + 5, 1024), 1, 0),
        ((1, LONG, 257), 1, 2),
        ((257, LONG), 1, 0),
    ],
)
@pytest.mark.parametrize("op", ["logcumsumexp", "chunks", "one chunk"])
def test_scans(op: str, shape: tuple[int, ...], axis: int, part_axis: int) -> None:
    fn: Any = partial(lcse, axis=axis)
    if op != "logcumsumexp":
        size = 100 if op == "chunks" else shape[axis]
        fn = partial(chunks, chunk_size=size, axis=axis, shift="sequence")
    if op == "one chunk" and shape[axis] < LONG:
        pytest.skip("the axis is short")
    x = jax.jit(partial(array, shape, 1))()
    compare(fn, x, part_axis, ends(shape[part_axis]))


@pytest.mark.parametrize("act", ["none", "softmax"])
@pytest.mark.parametrize(
    ("shape", "part_axis"),
    [((2**20 + 3, 8, 4, 64), 0), ((1, LONG, 4, 64), 2), ((1, 4, 2**21 + 3, 256), 2)],
)
def test_rotations(act: Any, shape: tuple[int, ...], part_axis: int) -> None:
    theta = np.linspace(0, THETA, shape[-1], dtype=np.float32)[None]
    options: Any = dict(act=act, axis=1) if act == "softmax" else {}

    def fn(x: jax.Array, implementation: Any) -> jax.Array:
        return pallas_ops.lrpe_cosine(x, theta, implementation=implementation, **options)

    x = jax.jit(partial(array, shape, 1))()
    compare(fn, x, part_axis, ends(shape[part_axis]))


def test_thetas_gradient_of_a_long_sequence() -> None:
    x = jax.jit(partial(array, (1, LONG, 4, 64), 1))()
    theta = jnp.asarray(np.linspace(0, THETA, 256, dtype=np.float32).reshape(4, 64))

    def gradient(implementation: Any, x: jax.Array, theta: jax.Array) -> jax.Array:
        fn = partial(pallas_ops.lrpe_cosine, x, act="silu", implementation=implementation)
        out, pull = jax.vjp(fn, theta)
        grad: jax.Array = pull(out[:, ::-1])[0]
        return grad

    got = jax.jit(partial(gradient, "triton"))(x, theta)
    want = jax.jit(partial(gradient, "xla"))(x[:, :, :1], theta[:1])
    alike(got[:1], want, 1e-4)


@pytest.mark.parametrize(("b", "m"), [(2**18 + 1, 64), (1, 2**24 + 77)])
def test_decoding(b: int, m: int) -> None:
    shapes = [(b, 1, 4, 2), (b, m, 4), (b, m, 4), (b, 1, 2, 128), (b, m, 128), (b, m, 128)]
    xs = [jax.jit(partial(array, shape, i))() for i, shape in enumerate(shapes)]
    assert xs[-1].size > 2**31

    def run(implementation: Any, xs: Sequence[jax.Array]) -> Any:
        fn = partial(pallas_ops.tpa_decode, implementation=implementation, scale=1.0)
        out, grads = vjp(fn, *xs)
        return out, *grads

    got = jax.jit(partial(run, "triton"))(xs)
    for part in ends(b) if b > 1 else [slice(0, 1)]:
        want = jax.jit(partial(run, "xla"))([x[part] for x in xs])
        for y, like in zip(got, want, strict=True):
            alike(y[part][..., -1000:], like[..., -1000:])
