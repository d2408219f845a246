"""tpa_decode: what is refused, and what is chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import TpaDecodeConfig
from pallas_ops.core.card import H200
from pallas_ops.ops.tpa_decode.choose import choose
from pallas_ops.ops.tpa_decode.config import Sizes
from pallas_ops.ops.tpa_decode.shared_memory import forward_bytes
from tests.support import assert_close
from tests.tpa_decode import both, factors, loop

Rng = np.random.Generator

# Refusals

REFUSED = [
    (
        dict(aq=jnp.zeros((2, 3, 4))),
        ValueError,
        r"aq.shape is \(2, 3, 4\); accepted: \[B, N, H, R\]",
    ),
    (dict(bk=jnp.zeros((2, 9, 16))), ValueError, r"bk.shape is \(2, 9, 16\).*M=40"),
    (dict(av=jnp.zeros((2, 40, 7))), ValueError, r"av.shape is \(2, 40, 7\).*H=3"),
    (dict(av=jnp.zeros((2, 40, 2, 3))), ValueError, r"bv.shape is .*; accepted: \[B, M, Rv, E\]"),
    (
        dict(bv=jnp.zeros((2, 40, 8), jnp.bfloat16)),
        TypeError,
        r"bv.dtype is 'bfloat16'; accepted: .*float32",
    ),
    (
        dict(aq=jnp.zeros((2, 1, 3, 4), jnp.int32)),
        TypeError,
        r"aq.dtype is 'int32'; accepted: bfloat16",
    ),
    (dict(lengths=jnp.zeros((3,), jnp.int32)), ValueError, r"lengths.shape is \(3,\).*B=2"),
    (dict(lengths=jnp.zeros((2,))), TypeError, r"lengths.dtype is 'float32'; accepted: integers"),
    (dict(scale=jnp.ones(2)), TypeError, r"scale is an array float32\[2\]; accepted: None, a real"),
    (dict(scale="1"), TypeError, r"scale is '1'; accepted: None, a real number"),
    (dict(scale_q=np.nan), ValueError, "scale_q is nan; accepted: None or a finite number"),
    (dict(scale=1e30, scale_q=1e30), ValueError, r"scale \* scale_q \* scale_k is 1e\+60; acc"),
    (dict(scale=1, scale_q=3e38, scale_k=1), ValueError, r"3e\+38; accepted: at most 2.35866e"),
    (dict(scale_k=10**400), ValueError, "accepted: None or a finite number"),
    (dict(scale_v=np.inf), ValueError, "scale_v is inf; accepted: None or a finite number"),
    (dict(bv=None), TypeError, "bv is None; accepted: an array"),
    (
        dict(bq=jnp.zeros((2, 1, 5, 16))),
        ValueError,
        r"aq.shape is .*; accepted: \[B, N, H, R\] with .*R=5 \(as in bq\), H=3 \(as in ak\)",
    ),
    (
        dict(bq=None),
        ValueError,
        r"aq.shape is .*; accepted: \[B, N, H, D\] with .*D=16 \(as in bk\)",
    ),
    (dict(window=0), ValueError, "window is 0; accepted: an int >= 1"),
    (dict(window=1.5), TypeError, "window is 1.5; accepted: an int >= 1"),
    (
        dict(precision="exact"),
        ValueError,
        "precision is 'exact'; accepted: None, 'highest', 'high'",
    ),
    (dict(batch_invariant=1), TypeError, "batch_invariant is 1; accepted: True or False"),
    (
        dict(batch_invariant=True, config=TpaDecodeConfig(block_h=16)),
        ValueError,
        "config and batch_invariant are both given",
    ),
    (dict(aq=jnp.zeros((2, 1, 4, 3))), ValueError, r"aq.shape is \(2, 1, 4, 3\); .* R=4.*, H=3"),
    (dict(lengths="all"), TypeError, "lengths is 'all'; accepted: an array"),
    (dict(axis_name="x"), ValueError, "axis_name is 'x'; accepted: None, or a mesh axis of the"),
    (
        dict(implementation="cuda"),
        ValueError,
        r"implementation is 'cuda'; accepted: None, 'triton'",
    ),
    (dict(config=3), TypeError, r"config is 3; accepted: None or a TpaDecodeConfig"),
    (dict(config=TpaDecodeConfig(block_h=16), implementation="xla"), ValueError, "are both given"),
    (dict(axis_name=0), TypeError, "axis_name is 0; accepted: None, a str or a tuple of"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_refusals_say_what_would_be_accepted(
    rng: Rng, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    xs = dict(zip(("aq", "ak", "av", "bq", "bk", "bv"), factors(rng), strict=True)) | change
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda: pallas_ops.tpa_decode(**xs))


def test_what_equals_an_accepted_argument_may_be_refused(rng: Rng) -> None:
    pallas_ops.tpa_decode(*factors(rng), scale=1.0)
    with pytest.raises(TypeError, match="scale is True; accepted"):
        pallas_ops.tpa_decode(*factors(rng), scale=True)


def test_float64_runs_the_reference_and_is_refused_as_a_kernel(rng: Rng) -> None:
    with jax.enable_x64(True):
        xs = factors(rng, jnp.float64)
        assert_close(both()(*xs), loop(xs, [40, 40]), terms=40)
        with pytest.raises(
            ValueError, match="implementation is 'triton', whose kernel does not take float64"
        ):
            pallas_ops.tpa_decode(*xs, implementation="triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_m=24), "block_m is 24; accepted: a power of two"),
        (dict(block_m=4), "block_m is 4; accepted: an int from 8 to 1048576"),
        (dict(num_splits=0), "num_splits is 0; accepted: an int from 1 to"),
        (dict(block_h=1.5), "block_h is 1.5; accepted: an int from 1 to"),
        (dict(num_stages=True), "num_stages is True; accepted: an int from 1 to"),
    ],
)
def test_config_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TpaDecodeConfig(**({"block_h": 4} | change))


def test_blocks_of_few_keys_need_several_ranks(rng: Rng) -> None:
    config = TpaDecodeConfig(block_h=4, block_m=8)
    with pytest.raises(ValueError, match=r"config.block_m is 8; accepted: 16 or more for one rank"):
        pallas_ops.tpa_decode(*factors(rng, rk=2), config=config)


# Config


@pytest.mark.parametrize("b", [1, 8, 32, 100, 500])
@pytest.mark.parametrize("m", [1, 256, 32768, 2**20])
def test_choice_fills_the_card_without_idle_splits(b: int, m: int) -> None:
    s = Sizes(b=b, n=1, m=m, h=32, r=16, d=128, e=128, rk=1, rv=1, dtype="bfloat16")
    c = choose(s, H200)
    assert c.num_splits * b <= max(132, b)
    assert c.num_splits <= -(-m // 32)
    assert forward_bytes(s, c) <= H200.shared_memory
    assert c.num_stages >= 3


@pytest.mark.parametrize("m", [100, 5000, 2**28])
def test_choice_that_knows_nothing_of_the_batch(m: int) -> None:
    of_batch = {
        choose(
            Sizes(b=b, n=1, m=m, h=32, r=16, d=128, e=128, rk=1, rv=1, dtype="bfloat16"),
            H200,
            batch_invariant=True,
        )
        for b in (1, 8, 500)
    }
    assert len(of_batch) == 1
