"""Arguments that lrpe_cosine and md_lrpe_cosine accept or refuse; activations; parts."""

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import LrpeCosineConfig
from pallas_ops.core import launch
from pallas_ops.core.tiles import MOST_PARTS, split_evenly
from pallas_ops.ops.lrpe_cosine import activation
from pallas_ops.ops.lrpe_cosine.config import Softmax
from pallas_ops.ops.lrpe_cosine.reference import Act
from tests.support import assert_close, random_array

X, THETA = jnp.ones((2, 6, 3, 4)), jnp.ones((3, 4))
SEQUENCE = LrpeCosineConfig(block_n=4, block_d=4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=X[0, 0]), ValueError, r"x.shape is \(3, 4\); accepted: \[B, N, H, D\] or \[B, N"),
        (dict(x=X.astype(int)), TypeError, "x.dtype is 'int32'; accepted: bfloat16, float16"),
        (dict(x=X[:, 0], layout="BHND"), ValueError, r"accepted: \[B, H, N, D\]$"),
        (dict(layout="NBHD"), ValueError, "layout is 'NBHD'; accepted: 'BNHD', 'BHND'"),
        (
            dict(theta=THETA[:2]),
            ValueError,
            r"theta.shape is \(2, 4\); accepted: \[1, E\] or \[H, E\] with H = 3",
        ),
        (dict(theta=jnp.ones((3, 5))), ValueError, "E from 1 to D = 4"),
        (dict(theta=THETA.astype(int)), TypeError, "theta.dtype is 'int32'; accepted: a float"),
        (dict(offset=1.5), TypeError, "offset is 1.5; accepted: an integer"),
        (dict(offset=True), TypeError, "offset is True; accepted: an integer"),
        (dict(offset="1"), TypeError, "offset is '1'; accepted: an integer"),
        (dict(offset=[1, 2, 3]), ValueError, r"offset.shape is \(3,\); accepted: \[\] or"),
        (dict(x=None), TypeError, "x is None; accepted: an array"),
        (dict(theta=None), TypeError, "theta is None; accepted: an array"),
        (dict(theta=jnp.ones((2, 4)), x=X[:, :, :1]), ValueError, r"accepted: \[1, E\] and E from"),
        (dict(x=X.swapaxes(1, 2), positions=jnp.arange(6), theta=THETA[:1]), ValueError, "N=3"),
        (dict(act=X), ValueError, r"act is an array float32\[2, 6, 3, 4\]; accepted: 'none'"),
        (dict(offset=2**40), ValueError, "offset is 1099511627776; accepted: -2"),
        (dict(offset=[0, 2**31]), ValueError, "offset is .*2147483648.; accepted: int32"),
        (dict(offset=jnp.ones(2)), TypeError, "offset.dtype is 'float32'; accepted: integers"),
        (dict(offset=jnp.arange(3)), ValueError, r"offset.shape is \(3,\); accepted: \[\] or"),
        (
            dict(offset=np.array([0, 2**30 + 1])),
            ValueError,
            r"offset has numbers beyond 2\*\*30; accepted",
        ),
        (dict(offset=1, positions=jnp.arange(6)), ValueError, "are both given; accepted: one"),
        (
            dict(positions=jnp.arange(5)),
            ValueError,
            r"positions.shape is \(5,\); accepted: \[N\] or .* N=6",
        ),
        (dict(positions=jnp.ones((1, 2, 6))), ValueError, r"accepted: \[N\] or \[B, N\]"),
        (dict(positions=jnp.ones(6, bool)), TypeError, "positions.dtype is 'bool'"),
        (dict(act="gelu"), ValueError, "act is 'gelu'; accepted: 'none', 'relu', 'sigmoid'"),
        (dict(act="silu", axis=1), ValueError, "axis is 1; accepted: None, as act is 'silu'"),
        (dict(act="softmax"), ValueError, r"axis is None; accepted, for a softmax: 3 or -1"),
        (dict(act="softmax", axis=True), ValueError, "axis is True; accepted, for a softmax"),
        (dict(act="softmax", axis=2), ValueError, r"axis is 2; accepted.* 1 or -3 \(the seq"),
        (dict(implementation="cuda"), ValueError, "implementation is 'cuda'; accepted: None"),
        (dict(config=3), TypeError, "config is 3; accepted: None or a LrpeCosineConfig"),
        (dict(config=LrpeCosineConfig(), implementation="xla"), ValueError, "are both given"),
        (dict(act="softmax", axis=1, config=SEQUENCE), ValueError, "accepted, .* 'block'"),
        (
            dict(act="softmax", axis=3, config=LrpeCosineConfig(block_d=2)),
            ValueError,
            "block_d is 2; accepted, for a softmax over the features: at least D = 4",
        ),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"x": X, "theta": THETA, **change}
    with pytest.raises(error, match=message):
        pallas_ops.lrpe_cosine(arguments.pop("x"), arguments.pop("theta"), **arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(shape=(2, 2)), ValueError, r"shape is \(2, 2\) and num_prefix_tokens 0; accepted"),
        (dict(shape=None), TypeError, "shape is None; accepted: the sizes of"),
        (dict(shape=()), TypeError, r"shape is \(\); accepted"),
        (dict(shape=(-1, -6)), ValueError, "accepted: no negative sizes"),
        (dict(num_prefix_tokens=-1), ValueError, "num_prefix_tokens is -1; accepted: an int >= 0"),
        (dict(num_prefix_tokens=1.0), TypeError, "num_prefix_tokens is 1.0; accepted: an int"),
        (
            dict(theta=THETA[:, :1]),
            ValueError,
            r"theta.shape is \(3, 1\); accepted: .* 2 \* E >= D = 4",
        ),
        (
            dict(positions=jnp.ones((6, 3))),
            ValueError,
            r"positions.shape is \(6, 3\).* K=2 \(as in sh",
        ),
        (dict(positions=jnp.ones((2, 5, 2)), shape=None), ValueError, r"accepted: .* with N=6"),
        (dict(positions=jnp.arange(6)), ValueError, r"accepted: \[N, K\] or \[B, N, K\]"),
        (dict(shape=None, positions=jnp.ones((6, 0))), ValueError, "an int for K, 1 or more"),
        (
            dict(positions=jnp.ones((6, 2)), shape=None, num_prefix_tokens=7),
            ValueError,
            "num_prefix_tokens is 7; accepted: at most N = 6",
        ),
    ],
)
def test_grid_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"theta": THETA, "shape": (2, 3), **change}
    with pytest.raises(error, match=message):
        pallas_ops.md_lrpe_cosine(X, arguments.pop("theta"), **arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(variant="rows"), "variant is 'rows'; accepted: 'sequence', 'block'"),
        (dict(block_n=3), "block_n is 3; accepted: a power of two"),
        (dict(num_warps=0), "num_warps is 0; accepted: an int from 1 to 32"),
        (dict(cache_angles=1), "cache_angles is 1; accepted: True or False"),
        (dict(num_parts=2), "num_parts is 2; accepted: 1, with variant='sequence'"),
        (dict(num_stages=2), "num_stages is 2; accepted: 1, with variant='sequence'"),
    ],
)
def test_configs_refuse(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"LrpeCosineConfig.{message}"):
        LrpeCosineConfig(**settings)


def test_float64_runs_the_reference() -> None:
    with jax.enable_x64(True):
        x = jnp.ones((1, 2, 1, 2), jnp.float64)
        assert pallas_ops.lrpe_cosine(x, jnp.ones((1, 2))).dtype == jnp.float64
        with pytest.raises(ValueError, match="whose kernel does not take float64"):
            pallas_ops.lrpe_cosine(x, jnp.ones((1, 2)), implementation="triton")


def test_offsets_may_be_of_any_integers() -> None:
    """Positions are counted in int32, also where JAX would count in 64 bits, or in 8."""
    x = jnp.ones((2, 30, 3, 4))
    want = pallas_ops.reference.lrpe_cosine(x, THETA, offset=100)
    assert_close(pallas_ops.reference.lrpe_cosine(x, THETA, offset=jnp.int8(100)), want)
    with jax.enable_x64(True):
        for offset in (jnp.int64(100), jnp.int32(100)):
            assert_close(pallas_ops.lrpe_cosine(x, THETA, offset=offset), want)


def test_a_traced_offset_compiles_once() -> None:
    traces = []

    @jax.jit
    def run(offset: Any) -> jax.Array:
        traces.append(offset)
        return pallas_ops.lrpe_cosine(X, THETA, offset=offset)

    for offset in (0, 7, -3):
        want = pallas_ops.reference.lrpe_cosine(X, THETA, offset=offset)
        assert_close(run(offset), want, scale=1.0)
    assert len(traces) == 1


@pytest.mark.parametrize("shape", [(0, 4, 3, 10), (2, 0, 3, 10), (2, 4, 0, 10), (2, 4, 3, 0)])
def test_empty_arrays(shape: tuple[int, ...]) -> None:
    x, theta = jnp.ones(shape), jnp.ones((1, 1))
    assert pallas_ops.lrpe_cosine(x, theta).shape == (*shape[:3], 2 * shape[3])


def test_activations_are_those_of_one_table(rng: np.random.Generator) -> None:
    """A name without an entry is an error, and each derivative is that of its function."""
    assert get_args(Act) == (*activation.ACTIVATIONS, "softmax")
    x, da, softmax = random_array(rng, (4, 8)), random_array(rng, (4, 8)), Softmax()
    with launch.interpreted(True):
        for name, entry in activation.ACTIVATIONS.items():
            want, pull = jax.vjp(entry.reference, x)
            assert_close(activation.activate(name, x, softmax), want)
            assert_close(activation.pull(name, x, da, softmax), pull(da)[0])
        for unknown in ("gelu", "softmax"):
            with pytest.raises(KeyError, match=unknown):
                activation.activate(unknown, x, softmax)
            with pytest.raises(KeyError, match=unknown):
                activation.pull(unknown, x, da, softmax)


@pytest.mark.parametrize("n", [1, 7, 525_000, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("parts", [1, 3, 4224, MOST_PARTS])
def test_parts_are_even_and_do_not_overflow(n: int, parts: int) -> None:
    """In int32, also where part * n does not fit; the only part has bounds that are known."""
    start, stop = (np.atleast_1d(y) for y in split_evenly(n, parts, jnp.arange(parts)))
    assert parts == 1 or start.dtype == stop.dtype == np.int32
    assert (start[0], stop[-1]) == (0, n)
    np.testing.assert_array_equal(stop[:-1], start[1:])
    sizes = stop - start
    assert n // parts <= sizes.min() <= sizes.max() <= -(-n // parts)
    traced = map(np.atleast_1d, split_evenly(jnp.int32(n), parts, jnp.arange(parts)))
    np.testing.assert_array_equal(np.stack([*traced]), (start, stop))
