"""logcumsumexp: reference against a loop, kernels against the loop, laws."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import LogcumsumexpConfig
from tests.logcumsumexp import arguments, assert_exact, both, loop, pulled
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    in_float64,
    in_turn,
    kernel_implementation,
    random_array,
    to_float64,
    value_and_vjp,
)

KERNEL = kernel_implementation()
Rng = np.random.Generator
SHAPES = [
    case(shape=(77,), axis=0),
    case(shape=(3, 37), axis=-1),
    case(shape=(2, 3, 17, 2), axis=-2, reverse=True),
    case(shape=(4, 1), axis=1),
    case(shape=(1, 1, 1), axis=0, reverse=True),
]


# Reference


@pytest.mark.parametrize("case", SHAPES)
def test_reference_is_the_loop(rng: Rng, case: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"}
    xs = arguments(rng, case["shape"], case["axis"])
    assert_exact(pulled("xla", **options)(*xs), loop(*xs, **options), xs[2], case["axis"])


@pytest.mark.parametrize("state", [jnp.float32, jnp.bfloat16])
def test_references_have_the_ops_arguments(rng: Rng, state: Any) -> None:
    x, initial, *_ = arguments(rng, (3, 8), 1)
    initial = (3 * initial).astype(state)
    options: dict[str, Any] = dict(axis=1, reverse=True, clip=0.7)
    got = pallas_ops.reference.logcumsumexp_with_state(x, initial_state=initial, **options)
    assert_close(got, both("xla", **options)(x, initial))
    out = pallas_ops.reference.logcumsumexp(x, initial_state=initial, **options)
    assert_close(out, both("xla", **options)(x, initial)[0])


def test_reference_of_a_long_axis(rng: Rng) -> None:
    xs = arguments(rng, (65_537, 1), 0)
    out, final = both("xla", axis=0)(*xs[:2])
    want = np.logaddexp.accumulate(np.concatenate([xs[1], xs[0]]).astype(np.float64))
    assert_close(out, want[1:], scale=1.0, terms=4)
    assert_close(final, want[-1:], scale=1.0, terms=4)


# Forward and gradient


@pytest.mark.parametrize("case", SHAPES)
def test_kernel_is_the_loop(rng: Rng, case: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"}
    xs = arguments(rng, case["shape"], case["axis"])
    assert_exact(pulled(KERNEL, **options)(*xs), loop(*xs, **options), xs[2], case["axis"])


LONG = [
    case(n=65_537, axis=0),
    case(n=65_537, axis=1, reverse=True),
    case(n=16_385, axis=0, config=LogcumsumexpConfig(block_n=64, block_c=4, block_exact=16)),
    case(
        n=16_385,
        axis=0,
        config=LogcumsumexpConfig(variant="recurrence", block_n=16, block_c=4, num_segments=16),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG)
def test_a_long_odd_axis(rng: Rng, case: dict[str, Any]) -> None:
    """Each gradient is held to the size of what it is a sum of."""
    n, options = case["n"], {k: v for k, v in case.items() if k != "n"}
    x, initial, do, dfinal = arguments(rng, (n, 3), 0)
    x = x.at[:, 1].multiply(60).at[: n // 3, 2].set(-jnp.inf)
    initial = initial.at[:, 2].set(-jnp.inf)
    xs = [jnp.moveaxis(y, 0, options["axis"]) for y in (x, initial, do, dfinal)]
    reference = pulled("xla", **{k: v for k, v in options.items() if k != "config"})
    got, want = pulled(KERNEL, **options)(*xs), in_float64(reference, *xs)
    sizes = in_float64(reference, *xs[:2], *map(jnp.abs, xs[2:]))
    assert_exact(got, want, xs[2], options["axis"])
    for g, w, size in zip(got[2:], want[2:], sizes[2:], strict=True):
        assert (np.abs(to_float64(g) - w) <= 1e-5 * size + 1e-30).all()


SIXTEEN_BITS = [
    case(axis=0, block_n=32, block_c=4, block_exact=32),
    case(axis=0, block_n=2, block_c=8, num_segments=2),
    case(axis=1, block_n=32, block_c=4, block_exact=32),
]


@pytest.mark.parametrize(("launch", "dtype"), in_turn(SIXTEEN_BITS, [jnp.bfloat16, jnp.float16]))
def test_16_bits_are_as_good_as_the_reference(rng: Rng, launch: Any, dtype: Any) -> None:
    axis = launch["axis"]
    config = LogcumsumexpConfig(**{k: v for k, v in launch.items() if k != "axis"})
    xs = arguments(rng, (40, 40), axis, dtype)
    got = pulled(KERNEL, axis=axis, config=config)(*xs)
    assert got[0].dtype == got[2].dtype == dtype
    own = pulled("xla", axis=axis)(*xs)
    assert_as_good_as_reference(got, own, loop(*xs, axis=axis), floor=2e-6)


# Laws


@pytest.mark.parametrize(("axis", "reverse"), [(0, False), (1, True)])
@pytest.mark.parametrize(
    ("implementation", "config"),
    [("xla", None), (KERNEL, LogcumsumexpConfig(block_n=16, block_c=16, block_exact=16))],
)
def test_a_sequence_may_be_split_anywhere(
    rng: Rng, implementation: Any, config: Any, reverse: bool, axis: int
) -> None:
    x, initial, do, dfinal = arguments(rng, (48, 3)[:: 1 - 2 * axis], axis)
    x = 30 * x
    whole = both(implementation, axis=axis, reverse=reverse, config=config)

    def parts(x: jax.Array, initial: jax.Array) -> Any:
        first, second = jnp.split(x, [17], axis)
        if reverse:
            first, second = second, first
        one, state = whole(first, initial)
        two, state = whole(second, state)
        return jnp.concatenate([two, one] if reverse else [one, two], axis), state

    got, grads = value_and_vjp(parts, (x, initial), (do, dfinal))
    want = loop(x, initial, do, dfinal, axis=axis, reverse=reverse)
    assert_exact((*got, *grads), want, do, axis)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)])
def test_segments_of_each_batch_element(rng: Rng, in_axes: Any) -> None:
    config = LogcumsumexpConfig(block_n=8, block_c=4, block_exact=8, num_segments=5)
    args = tuple(random_array(rng, (3, *shape)) for shape in ((45, 6), (1, 6)))
    args = tuple(x if axis == 0 else x[0] for x, axis in zip(args, in_axes, strict=True))
    cotangents = random_array(rng, (3, 45, 6)), random_array(rng, (3, 1, 6))

    def batched(implementation: Any, **options: Any) -> Any:
        call = jax.vmap(both(implementation, axis=0, **options), in_axes)
        return value_and_vjp(call, args, cotangents)

    assert_close(batched(KERNEL, config=config), batched("xla"), terms=45)


@pytest.mark.parametrize("reverse", [True, False])
def test_many_segments(rng: Rng, reverse: bool) -> None:
    """20 of a column: more than 16, so a launch of its own scans their totals."""
    config = LogcumsumexpConfig(block_n=2, block_c=1, block_exact=2, num_segments=20)
    args, cotangents = (
        (random_array(rng, (79, 3)), random_array(rng, (1, 3))) for _ in ("args", "cotangents")
    )

    def run(implementation: Any, **options: Any) -> Any:
        fn = both(implementation, axis=0, reverse=reverse, **options)
        return value_and_vjp(fn, args, cotangents)

    assert_close(run(KERNEL, config=config), run("xla"), terms=79)


@pytest.mark.slow
@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_result_has_no_gradient(rng: Rng, used: int) -> None:
    """The other one's is as with an explicit zero."""
    x = random_array(rng, (2, 40, 3))
    run = partial(pallas_ops.logcumsumexp_with_state, axis=1, implementation=KERNEL)
    results, pull = jax.vjp(run, x)
    cotangents = [jnp.zeros_like(y) for y in results]
    cotangents[used] = random_array(rng, results[used].shape)
    (alone,) = jax.vjp(lambda x: run(x)[used], x)[1](cotangents[used])
    np.testing.assert_array_equal(alone, pull(tuple(cotangents))[0])


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_the_state_broadcasts(rng: Rng, implementation: Any) -> None:
    x = random_array(rng, (2, 20, 3))
    call = both(implementation, axis=1)
    for shape in ((), (1, 3), (2, 1, 1)):
        state = random_array(rng, shape, jnp.bfloat16)
        full = jnp.broadcast_to(state, (2, 1, 3)).astype(jnp.float32)
        assert_close(call(x, state), call(x, full))


def test_reversal_is_flipping(rng: Rng) -> None:
    x = random_array(rng, (3, 45))
    got = both(KERNEL, reverse=True)(x)[0]
    assert_close(got, jnp.flip(both(KERNEL)(jnp.flip(x, 1))[0], 1))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3), (0, 40), (2, 0, 40)])
def test_an_axis_of_size_zero(shape: tuple[int, ...]) -> None:
    out, final = pallas_ops.logcumsumexp_with_state(jnp.zeros(shape), axis=-1)
    assert out.shape == shape
    assert final.shape == (*shape[:-1], 1)
    assert (np.asarray(final) == -np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("num_segments", [1, 2])
def test_second_derivative_of_the_kernel(rng: Rng, num_segments: int) -> None:
    """Through the pair before the first position, which has to be that of the state itself."""
    x, initial, do, _ = arguments(rng, (45, 3), 0)
    initial = initial.at[0, 0].set(-jnp.inf)
    weight = random_array(rng, (45, 3))
    config = LogcumsumexpConfig(block_n=2, block_c=8, block_exact=2, num_segments=num_segments)

    def twice(implementation: Any, config: Any = None) -> Any:
        def once(x: jax.Array, initial: jax.Array) -> jax.Array:
            call = both(implementation, axis=0, config=config)
            pull = jax.vjp(lambda x: call(x, initial)[0], x)[1]
            return jnp.vdot(pull(do)[0], weight)

        return jax.jit(jax.grad(once, (0, 1)))(x, initial)

    assert_close(twice(KERNEL, config), twice("xla"), terms=16)


def test_the_gradient_of_a_broadcast_state_is_not_summed_in_16_bits(rng: Rng) -> None:
    """Along the first axis, which the op takes for a batch, as along any other."""
    x, weights = random_array(rng, (3, 100, 5)), random_array(rng, (3, 100, 5))
    initial = random_array(rng, (5,), jnp.bfloat16)

    def gradient(axis: int) -> jax.Array:
        y, cotangent = (jnp.moveaxis(z, 0, axis) for z in (x, weights))
        run = partial(pallas_ops.logcumsumexp, y, axis=axis, implementation="xla")
        return jax.jit(jax.vjp(lambda initial: run(initial_state=initial), initial)[1])(cotangent)[
            0
        ]

    assert_close(gradient(0), gradient(1))
