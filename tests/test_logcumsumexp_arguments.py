"""logcumsumexp: what is refused, what is chosen, and what that compiles to."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import LogcumsumexpConfig
from pallas_ops.core import card
from pallas_ops.core.implementations import LONGEST
from pallas_ops.ops.logcumsumexp.config import choose, choose_block_n
from pallas_ops.scan.view import Sizes
from tests import h200
from tests.logcumsumexp import loop, pulled
from tests.support import assert_close, case, random_array

Rng = np.random.Generator

# Refusals

REFUSED = [
    (dict(x=jnp.zeros((2, 3), jnp.int32)), TypeError, "x.dtype is 'int32'; accepted: bfloat16"),
    (dict(axis=2), ValueError, r"axis is 2 and x.shape \(2, 3\); accepted: -x.ndim <= axis"),
    (dict(axis=1.0), TypeError, "axis is 1.0; accepted: an int"),
    (dict(axis=True), TypeError, "axis is True; accepted: an int"),
    (dict(x=None), TypeError, "x is None; accepted: an array"),
    (dict(x="abc"), TypeError, "x is 'abc'; accepted: an array"),
    (dict(x=jnp.zeros(())), ValueError, r"axis is -1 and x.shape \(\)"),
    (dict(reverse=1), TypeError, "reverse is 1; accepted: True or False"),
    (dict(clip="1"), TypeError, "clip is '1'; accepted: None or a number >= 0"),
    (
        dict(clip=jnp.ones(2)),
        TypeError,
        r"clip is an array float32\[2\]; accepted: .* call jax.numpy.clip",
    ),
    (dict(clip=10**400), ValueError, "accepted: None or a number >= 0"),
    (dict(clip=-1.0), ValueError, "clip is -1.0; accepted: None or a number >= 0"),
    (
        dict(initial_state=jnp.zeros((2, 3))),
        ValueError,
        r"initial_state.shape is \(2, 3\).*\(2, 1\)",
    ),
    (dict(initial_state=jnp.zeros(2, jnp.int32)), TypeError, "initial_state.dtype is 'int32'"),
    (dict(implementation="cuda"), ValueError, "implementation is 'cuda'; accepted: None, 'triton'"),
    (dict(config=3), TypeError, "config is 3; accepted: None or a LogcumsumexpConfig"),
    (
        dict(config=LogcumsumexpConfig(block_n=8), implementation="xla"),
        ValueError,
        "are both given",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals_say_what_would_be_accepted(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: pallas_ops.logcumsumexp(**({"x": jnp.zeros((2, 3))} | change)))


def test_what_equals_an_accepted_argument_may_be_refused() -> None:
    x = jnp.zeros((2, 3))
    pallas_ops.logcumsumexp(x, axis=1, reverse=True, clip=1.0)
    for change in (dict(axis=1.0), dict(reverse=1), dict(clip=True)):
        options: dict[str, Any] = dict(axis=1, reverse=True, clip=1.0) | change
        with pytest.raises(TypeError, match=f"{next(iter(change))} is"):
            pallas_ops.logcumsumexp(x, **options)


@pytest.mark.parametrize(
    ("shape", "axis", "what"),
    [
        ((2**31,), 0, "axis 0"),
        ((2, 2**16, 2**15), 0, "product of the axes after"),
        ((2**16, 2**15, 2), -1, "product of the axes before"),
        ((2**16, 2, 2**15), 1, None),
    ],
)
def test_kernels_count_in_32_bits(shape: tuple[int, ...], axis: int, what: str | None) -> None:
    """An array may have more elements than that."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    program = str(jax.make_jaxpr(partial(pallas_ops.logcumsumexp, axis=axis))(x))
    assert ("pallas_ops_dispatch" in program) == (what is None)
    if what:
        message = rf"whose kernel does not take sizes above {LONGEST} \({what}\)"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(partial(pallas_ops.logcumsumexp, axis=axis, implementation="triton"), x)


@pytest.mark.filterwarnings("ignore:.* runs as jax.numpy. 4294967296 rows")
def test_more_rows_than_it_counts_run_the_reference() -> None:
    """Of `jax.vmap`, forward and backward."""
    run = jax.vmap(jax.grad(lambda x: jnp.square(pallas_ops.logcumsumexp(x)).mean()))
    for rows, is_kernel in ((2**14, True), (2**16, False)):
        x = jax.ShapeDtypeStruct((2**16, rows, 3), jnp.bfloat16)
        text = h200.lower_for_cuda(run, x).as_text()
        for name in ("pallas_ops_logcumsumexp", "pallas_ops_logcumsumexp_backward"):
            assert (f'name = "{name}"' in text) == is_kernel


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
        (dict(num_segments=0), "num_segments is 0; accepted: an int from 1 to 1048576"),
        (dict(num_warps=64), "num_warps is 64; accepted: an int from 1 to 32"),
        (dict(variant="scan"), "variant is 'scan'; accepted: 'parallel', 'recurrence'"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogcumsumexpConfig(**({"block_n": 4} | change))


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_clip_beyond_the_largest_number_clips_nothing(implementation: Any) -> None:
    x = jnp.array([np.inf, 1.0, -np.inf, 2.0], jnp.float32)
    run = partial(pallas_ops.logcumsumexp, reverse=True, implementation=implementation)
    assert_close(run(x, clip=1e300), run(x))


# Config


@pytest.mark.parametrize("n", [LONGEST, LONGEST - 63, 2**30 - 1])
@pytest.mark.parametrize("c", [1, 64])
def test_positions_of_a_long_axis_are_counted_in_32_bits(n: int, c: int) -> None:
    s = Sizes.of((1, n, c), 1, itemsize=2)
    config = choose(s, choose_block_n(s), card.H200)
    split = s.split(config.num_segments, config.block_n)
    assert split.count == config.num_segments > 100
    assert (split.count - 1) * split.size < n <= split.count * split.size < 2**31


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("n", [1, 100, 2048, 131_072])
@pytest.mark.parametrize("c", [1, 2, 64, 2048, 10**6])
def test_choice_fills_the_card(n: int, c: int, backward: bool) -> None:
    """With a program for each multiprocessor, as far as segments of a tile can make so many."""
    s = Sizes.of((1, n, c), 1, itemsize=2)
    block_n = choose_block_n(s)
    config = choose(s, block_n, card.H200, backward=backward)
    tiles, blocks = -(-n // block_n), -(-c // config.block_c)
    count = s.split(config.num_segments, block_n).count
    assert count * blocks >= min(132 - 4, tiles * blocks if c > 1 else tiles // 2)
    assert config.num_segments == 1 or tiles >= (1 if c > 1 else 2) * config.num_segments
    assert config.num_stages == 1 or tiles > config.num_segments
    assert config.block_n * config.block_c <= 4096


def test_more_segments_than_a_warp_has_lanes_for() -> None:
    """The launch that scans their totals has as many warps as there can be."""
    config = LogcumsumexpConfig(block_n=16, block_c=1, num_segments=8192)
    fn = partial(pallas_ops.logcumsumexp, axis=1, config=config)
    program = h200.compile_for_h200(fn, jax.ShapeDtypeStruct((1, 2**17, 2), jnp.bfloat16))
    assert "pallas_ops_segments" in [kernel.name for kernel in program.kernels]


def test_a_single_column_compiles() -> None:
    """Triton crashed where a lane had all of a tile."""
    config = LogcumsumexpConfig(variant="recurrence", block_n=16)
    fn = partial(pallas_ops.logcumsumexp, axis=1, config=config)
    x = jax.ShapeDtypeStruct((2, 77, 9), jnp.bfloat16)
    assert h200.compile_for_h200(lambda x: jax.vjp(fn, x)[1](x), x).kernels


H200 = [
    case(shape=(98304, 2048), axis=1),
    case(shape=(12, 8192, 2048), axis=1),
    case(shape=(1, 131_072, 64), axis=1),
    case(shape=(1000, 999), axis=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", H200)
def test_compiles_for_h200_without_a_spill(case: dict[str, Any]) -> None:
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
    assert max(kernel.spill_bytes for kernel in ours) == 0
