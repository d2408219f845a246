"""logcumsumexp: reference against a loop, kernels against the loop, laws, refusals, config."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

import pallas_ops
from pallas_ops import LogcumsumexpConfig
from pallas_ops.ops.logcumsumexp.config import Sizes, choose, choose_block_n
from tests import h200
from tests.support import (
    assert_as_good_as_reference,
    assert_close,
    case,
    kernel_implementation,
    random_array,
    to_float64,
    value_and_vjp,
)

KERNEL = kernel_implementation()
Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]
SHAPES = [
    case(shape=(77,), axis=0),
    case(shape=(3, 37), axis=-1),
    case(shape=(2, 3, 17, 2), axis=-2, reverse=True),
    case(shape=(4, 1), axis=1),
    case(shape=(1, 1, 1), axis=0, reverse=True),
]


def loop(
    x: Any, initial: Any, do: Any, dfinal: Any, *, axis: int, reverse: bool = False
) -> tuple[Float64, Float64, Float64, Float64]:
    """Output, final state and the gradients of x and of the state, in float64.

    States have length 1 on the axis. What is -inf passes no gradient on.
    """
    x, initial, do, dfinal = (
        np.moveaxis(np.asarray(y).astype(np.float64), axis, 0) for y in (x, initial, do, dfinal)
    )
    x, do = (y[::-1] if reverse else y for y in (x, do))
    y = np.concatenate([initial, x])
    out, dy = np.empty(y.shape), np.zeros(y.shape)
    with np.errstate(invalid="ignore"):
        for column in np.ndindex(y.shape[1:]):
            at = (slice(None), *column)
            out[at] = np.logaddexp.accumulate(y[at])
        grads = np.concatenate([np.zeros(initial.shape), do])
        grads[-1:] += dfinal
        for i in range(1, len(y)):
            weight = np.exp(y[: i + 1] - out[i])
            dy[: i + 1] += np.where(out[i] == -np.inf, 0, grads[i] * weight)
    results = (out[1:], dy[1:])
    out_, dx = (z[::-1] if reverse else z for z in results)
    out, dx, final, dinitial = (np.moveaxis(z, 0, axis) for z in (out_, dx, out[-1:], dy[:1]))
    return out, final, dx, dinitial


@functools.cache
def both(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Of x and initial state: output and final state, compiled."""

    def call(x: jax.Array, initial: jax.Array | None = None) -> Any:
        return pallas_ops.logcumsumexp_with_state(
            x, initial_state=initial, implementation=implementation, **kwargs
        )

    return jax.jit(call)


@functools.cache
def pulled(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Of x, initial state and cotangents: output, final state and gradients, compiled."""

    def call(x: Any, initial: Any, *cotangents: Any) -> Any:
        out, pull = jax.vjp(both(implementation, **kwargs), x, initial)
        return *out, *pull(cotangents)

    return jax.jit(call)


def arguments(rng: Rng, shape: tuple[int, ...], axis: int, dtype: Any = jnp.float32) -> Any:
    """x, initial state and cotangents."""
    state = tuple(1 if i == axis % len(shape) else size for i, size in enumerate(shape))
    x, do = (random_array(rng, shape, dtype) for _ in range(2))
    initial, dfinal = (random_array(rng, state) for _ in range(2))
    return x, initial, do, dfinal


def assert_exact(got: Any, want: Any, do: Any, axis: int) -> None:
    """To float32 rounding: outputs of max(1, |o|), gradients of sum |do|."""
    scale = np.abs(np.asarray(do)).astype(np.float64).sum(axis=axis, keepdims=True) + 1
    with np.errstate(invalid="ignore"):
        sizes = [np.maximum(1, np.abs(np.where(np.isfinite(y), y, 0))) for y in want[:2]]
    for name, g, w, size, limit in zip(
        ("out", "final", "dx", "dinitial"),
        map(to_float64, got),
        want,
        (*sizes, scale, scale),
        (2e-6, 2e-6, 1e-5, 1e-5),
        strict=True,
    ):
        special = ~(np.isfinite(g) & np.isfinite(w))
        np.testing.assert_array_equal(g[special], w[special], f"{name}: NaN or infinite")
        error = np.abs(np.where(special, 0, g) - np.where(special, 0, w)) / size
        assert (error <= limit).all(), f"{name}: {error.max():.2g}"


# Reference


@pytest.mark.parametrize("case", SHAPES)
def test_reference_is_the_loop(rng: Rng, case: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"}
    xs = arguments(rng, case["shape"], case["axis"])
    assert_exact(pulled("xla", **options)(*xs), loop(*xs, **options), xs[2], case["axis"])


def test_references_have_the_ops_arguments(rng: Rng) -> None:
    x, initial, *_ = arguments(rng, (3, 8), 1)
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

CONFIGS = [
    case(axis=1, block_n=64, block_c=2, block_exact=16),
    case(axis=1, block_n=16, block_exact=16, num_parts=3),
    case(axis=0, block_n=32, block_c=4, block_exact=8),
    case(axis=0, block_n=8, block_c=2, block_exact=8, num_parts=4, num_warps=2),
    case(axis=0, variant="recurrence", block_n=4, block_c=4),
    case(axis=1, variant="recurrence", block_n=2, block_c=2, num_parts=3),
]


@pytest.mark.parametrize("case", SHAPES)
def test_kernel_is_the_loop(rng: Rng, case: dict[str, Any]) -> None:
    options = {k: v for k, v in case.items() if k != "shape"}
    xs = arguments(rng, case["shape"], case["axis"])
    assert_exact(pulled(KERNEL, **options)(*xs), loop(*xs, **options), xs[2], case["axis"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("axis", [0, 1])
def test_16_bits_are_as_good_as_the_reference(rng: Rng, axis: int, dtype: Any) -> None:
    xs = arguments(rng, (40, 40), axis, dtype)
    config = LogcumsumexpConfig(block_n=32, block_c=4, block_exact=32)
    got = pulled(KERNEL, axis=axis, config=config)(*xs)
    assert got[0].dtype == got[2].dtype == dtype
    own = pulled("xla", axis=axis)(*xs)
    assert_as_good_as_reference(got, own, loop(*xs, axis=axis), floor=2e-6)


RANGES: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "wide": lambda rng, shape: 1e4 * rng.standard_normal(shape),
    "rising": lambda rng, shape: np.sort(1e3 * rng.standard_normal(shape), axis=0),
    "falling": lambda rng, shape: -np.sort(1e3 * rng.standard_normal(shape), axis=0),
    "spiky": lambda rng, shape: rng.choice([-300.0, 0.0, 500.0], shape, p=[0.9, 0.05, 0.05]),
    "padded": lambda rng, shape: np.where(
        np.arange(shape[0])[:, None] < 20, -np.inf, rng.standard_normal(shape)
    ),
    "lowest": lambda rng, shape: rng.choice([np.finfo(np.float32).min, -1e30, 0.0], shape),
    "nothing": lambda rng, shape: np.full(shape, -np.inf),
}


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_exact_for_every_range(rng: Rng, config: dict[str, Any]) -> None:
    axis = config["axis"]
    chosen = LogcumsumexpConfig(**{k: v for k, v in config.items() if k != "axis"})
    _, initial, do, dfinal = arguments(rng, (45, 5), 0)
    for name, make in RANGES.items():
        x = jnp.asarray(make(rng, (45, 5)), jnp.float32)
        state = jnp.full_like(initial, -jnp.inf) if name in ("padded", "nothing") else initial
        xs = tuple(jnp.moveaxis(y, 0, axis) for y in (x, state, do, dfinal))
        got = pulled(KERNEL, axis=axis, config=chosen)(*xs)
        assert_exact(got, loop(*xs, axis=axis), xs[2], axis)


ANY_RANGE = hnp.arrays(
    np.float32,
    (40, 4),
    elements=st.one_of(
        st.floats(-1e4, 1e4, width=32),
        st.floats(-4, 4, width=32),
        st.sampled_from([-np.inf, -300.0, 0.0, 500.0]),
    ),
)
SPECIAL = st.lists(
    st.tuples(st.integers(0, 39), st.integers(0, 3), st.sampled_from([np.inf, np.nan, -np.inf])),
    max_size=4,
)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("implementation", ["xla", KERNEL])
@hypothesis.given(
    x=ANY_RANGE,
    order=st.sampled_from(["", "rising", "falling"]),
    special=SPECIAL,
    seed=st.integers(0, 99),
)
def test_exact_whatever_the_numbers(
    implementation: Any, axis: int, x: Any, order: str, special: Any, seed: int
) -> None:
    if order:
        x = np.sort(x, axis=0) if order == "rising" else -np.sort(-x, axis=0)
    for i, j, value in special:
        x[i, j] = value
    _, initial, do, dfinal = arguments(np.random.default_rng(seed), (40, 4), 0)
    initial = initial.at[0, 0].set(-jnp.inf)
    xs = tuple(jnp.moveaxis(jnp.asarray(y), 0, axis) for y in (x, initial, do, dfinal))
    config = LogcumsumexpConfig(block_n=16, block_c=4, block_exact=8)
    kwargs = {} if implementation == "xla" else dict(config=config)
    got = pulled(implementation, axis=axis, **kwargs)(*xs)
    assert_exact(got, loop(*xs, axis=axis), xs[2], axis)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_gradient_at_infinity_is_that_of_logsumexp(rng: Rng, implementation: Any) -> None:
    inf = jnp.inf
    x = jnp.asarray([[0.5, inf, 2, -inf], [1, -inf, jnp.nan, 2], [inf, inf, -inf, 0]])
    do = random_array(rng, x.shape)

    def ends(x: jax.Array) -> jax.Array:
        logsumexp = jax.scipy.special.logsumexp
        return jnp.stack([logsumexp(x[:, : i + 1], axis=1) for i in range(4)], axis=1)

    nothing = jnp.full((3, 1), -inf), jnp.zeros((3, 1))
    out, _, dx, _ = pulled(implementation)(x, nothing[0], do, nothing[1])
    np.testing.assert_allclose(out, ends(x), rtol=1e-6)
    np.testing.assert_allclose(dx, jax.vjp(ends, x)[1](do)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_clip_clamps_x_and_state_without_gradient_outside(rng: Rng, implementation: Any) -> None:
    x, initial, do, dfinal = arguments(rng, (45, 5), 0)
    x, initial = 3 * x, jnp.asarray([[-9.0, 9.0, 0.5, -jnp.inf, jnp.inf]])
    got = pulled(implementation, axis=0, clip=2.0)(x, initial, do, dfinal)
    clipped = np.clip(x, -2, 2), np.clip(initial, -2, 2)
    out, final, dx, dinitial = loop(*clipped, do, dfinal, axis=0)
    inside = [np.abs(y) <= 2 for y in (x, initial)]
    assert_exact(got, (out, final, dx * inside[0], dinitial * inside[1]), do, 0)
    out = both(implementation, axis=0, clip=2.0)(x)[0]
    nothing = np.full((1, 5), -np.inf)
    assert_close(out, loop(clipped[0], nothing, do, dfinal, axis=0)[0], scale=1.0, terms=4)


# Laws


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("implementation", ["xla", KERNEL])
def test_a_sequence_may_be_split_anywhere(
    rng: Rng, implementation: Any, reverse: bool, axis: int
) -> None:
    x, initial, do, dfinal = arguments(rng, (48, 3)[:: 1 - 2 * axis], axis)
    x = 30 * x
    config = LogcumsumexpConfig(block_n=16, block_c=16, block_exact=16)
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


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_an_axis_of_size_zero(shape: tuple[int, ...]) -> None:
    out, final = pallas_ops.logcumsumexp_with_state(jnp.zeros(shape), axis=-1)
    assert out.shape == shape
    assert final.shape == (*shape[:-1], 1)
    assert (np.asarray(final) == -np.inf).all()


def test_second_derivative_of_the_kernel(rng: Rng) -> None:
    x, initial, do, _ = arguments(rng, (2, 20), 1)
    initial = initial.at[0].set(-jnp.inf)
    weight = random_array(rng, (2, 20))

    def twice(implementation: Any) -> Any:
        def once(x: jax.Array, initial: jax.Array) -> jax.Array:
            pull = jax.vjp(lambda x: both(implementation)(x, initial)[0], x)[1]
            return jnp.vdot(pull(do)[0], weight)

        return jax.jit(jax.grad(once, (0, 1)))(x, initial)

    assert_close(twice(KERNEL), twice("xla"), terms=16)


# Refusals

REFUSED = [
    (dict(x=jnp.zeros((2, 3), jnp.int32)), TypeError, "x.dtype is 'int32'; accepted: bfloat16"),
    (dict(axis=2), ValueError, r"axis is 2 and x.shape \(2, 3\); accepted: -x.ndim <= axis"),
    (dict(axis=1.0), TypeError, "axis is 1.0; accepted: an int"),
    (dict(x=jnp.zeros(())), ValueError, r"axis is -1 and x.shape \(\)"),
    (dict(reverse=1), TypeError, "reverse is 1; accepted: True or False"),
    (dict(clip="1"), TypeError, "clip is '1'; accepted: a Python or NumPy real number"),
    (dict(clip=-1.0), ValueError, "clip is -1.0; accepted: None or a number >= 0"),
    (
        dict(initial_state=jnp.zeros((2, 3))),
        ValueError,
        r"initial_state.shape is \(2, 3\).*\(2, 1\)",
    ),
    (dict(initial_state=jnp.zeros(2, jnp.int32)), TypeError, "initial_state.dtype is 'int32'"),
    (dict(implementation="cuda"), ValueError, "implementation is 'cuda'; accepted: None, 'triton'"),
    (dict(config=3), TypeError, "config is 3; accepted: None or a LogcumsumexpConfig"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals_say_what_would_be_accepted(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: pallas_ops.logcumsumexp(**({"x": jnp.zeros((2, 3))} | change)))


def test_float64_runs_the_reference_and_is_refused_as_a_kernel(rng: Rng) -> None:
    with jax.enable_x64(True):
        xs = tuple(random_array(rng, shape, jnp.float64) for shape in ((9, 2), (1, 2)) * 2)
        assert_close(pulled(axis=0)(*xs), loop(*xs, axis=0), terms=40)
        with pytest.raises(
            ValueError, match="implementation is 'triton', whose kernel does not take float64"
        ):
            pallas_ops.logcumsumexp(xs[0], implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_n=24), "block_n is 24; accepted: a power of two"),
        (dict(num_parts=0), "num_parts is 0; accepted: an int >= 1"),
        (dict(variant="scan"), "variant is 'scan'; accepted: 'parallel', 'recurrence'"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogcumsumexpConfig(**({"block_n": 4} | change))


# Config


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("n", [1, 100, 2048, 131_072])
@pytest.mark.parametrize("c", [1, 2, 64, 2048, 10**6])
def test_choice_fills_the_card_without_idle_parts(n: int, c: int, last: bool) -> None:
    s = Sizes(b=1, n=n, c=c, last=last, itemsize=2)
    block_n = choose_block_n(n, 1 if last else c)
    config = choose(s, block_n)
    tiles, blocks = -(-n // block_n), -(-c // config.block_c)
    assert config.num_parts <= tiles
    assert config.num_parts * blocks >= min(132, tiles * blocks)
    assert config.block_n * config.block_c <= 4096


H200 = [
    case(shape=(98304, 2048), axis=1),
    case(shape=(12, 8192, 2048), axis=1),
    case(shape=(1, 131_072, 64), axis=1),
    case(shape=(1000, 999), axis=0),
]


@pytest.mark.parametrize("case", H200)
def test_compiles_for_h200_without_spills(case: dict[str, Any]) -> None:
    x = jax.ShapeDtypeStruct(case["shape"], jnp.bfloat16)
    fn = partial(pallas_ops.logcumsumexp, axis=case["axis"])

    def pull(x: jax.Array, do: jax.Array) -> Any:
        return jax.vjp(fn, x)[1](do)

    program = h200.compile_for_h200(pull, x, x)
    ours = [kernel for kernel in program.kernels if kernel.name.startswith("pallas_ops")]
    assert {kernel.name for kernel in ours} >= {
        "pallas_ops_logcumsumexp",
        "pallas_ops_logcumsumexp_backward",
    }
    assert not any(kernel.spill_bytes for kernel in ours)
