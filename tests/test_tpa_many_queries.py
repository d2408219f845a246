"""Gradients of tpa_decode for many queries: in blocks of a kernel, or in chunks of jax.numpy."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.core import card, launch
from pallas_ops.core.card import H200
from pallas_ops.ops.tpa_decode import backward, formed, reference
from pallas_ops.ops.tpa_decode.choose import queries_of_pass
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes
from tests.support import (
    EPS32,
    assert_as_good_as_reference,
    case,
    in_turn,
    kernel_implementation,
    random_array,
    random_cotangents,
)
from tests.tpa_decode import both, factors, loop_gradients, pulled

KERNEL = kernel_implementation()
Rng = np.random.Generator


@pytest.mark.parametrize(("window", "at_once"), [(None, 2**26), (7, 17_000)])
def test_gradients_of_many_queries_come_in_blocks(
    rng: Rng, window: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, all at once or two; filled up, also where some queries come before all keys."""
    monkeypatch.setattr(backward, "NUMBERS_AT_ONCE", at_once)
    shape: dict[str, Any] = dict(b=3, n=9, m=40, h=9, r=4, d=16, e=8, rk=2)
    s = Sizes(**(shape | dict(rv=1)), dtype="float32")
    assert queries_of_pass(s, H200) == 4
    xs, lengths = factors(rng, **shape), jnp.asarray([40, 12, 5], jnp.int32)
    out, lse = random_cotangents(rng, jax.eval_shape(both(), *xs))
    cotangents = out, lse.at[:, :4].set(0)  # of queries whose log-sum-exp is -inf
    got, own = (pulled(i, window)(xs, lengths, cotangents)[1] for i in (KERNEL, "xla"))
    truth = loop_gradients(xs, lengths, cotangents, window)
    assert_as_good_as_reference(got, own, truth, floor=16 * EPS32)


MASKS = [case(has_lengths=True), case(window=7), case(has_lengths=True, window=7)]


@pytest.mark.parametrize(("masks", "dtype"), in_turn(MASKS, [jnp.float32, jnp.bfloat16]))
def test_gradients_of_many_queries_come_in_chunks(
    rng: Rng, dtype: Any, masks: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four queries; the last one is filled up. Two of four sequences at a time."""
    for name, value in dict(
        CHUNK=4, SCORES=1, LEAST_QUERIES=1, BYTES_AT_ONCE=8 * 40 * 5 * 24
    ).items():
        monkeypatch.setattr(formed, name, value)
    jax.clear_caches()  # the same calls may have been made without
    has_lengths, window = "has_lengths" in masks, masks.get("window")
    shape: dict[str, Any] = dict(b=4, n=11, m=40, h=5, r=4, d=16, e=8, rk=2)
    xs, ends = factors(rng, dtype, **shape), [40, 12, 5, 38] if has_lengths else [40] * 4
    lengths = jnp.asarray(ends, jnp.int32) if has_lengths else None
    out, lse = random_cotangents(rng, jax.eval_shape(both(), *xs))
    unseeing = 6 if has_lengths else 0  # queries whose log-sum-exp is -inf
    cotangents = out, lse.at[:, :unseeing].set(0)
    got, own = (pulled(i, window)(xs, lengths, cotangents)[1] for i in (KERNEL, "xla"))
    truth = loop_gradients(xs, ends, cotangents, window)
    assert_as_good_as_reference(got, own, truth, floor=16 * EPS32)


def test_how_many_queries_have_their_gradient_from_formed_keys() -> None:
    s = Sizes(b=1, n=64, m=8192, h=34, r=6, d=64, e=64, rk=2, rv=2, dtype="bfloat16")
    assert formed.takes(s)
    assert not formed.takes(dataclasses.replace(s, n=63))
    assert not formed.takes(dataclasses.replace(s, n=255, rk=1, rv=1))
    assert not formed.takes(dataclasses.replace(s, n=511, m=2**18))
    assert formed.takes(dataclasses.replace(s, n=512, m=2**18))


def test_passes_that_no_kernel_takes_are_summed_in_float32(rng: Rng) -> None:
    xs = factors(rng, jnp.bfloat16, b=1, n=128, m=20, h=300, r=2, d=8, e=8, rk=1)
    xs = tuple(x if x.ndim == 4 else x[:, :, None] for x in xs)
    p = Params(out_dtype="bfloat16", has_lse=False)
    out, lse = reference.forward(*xs, None, None, p=p)
    dout = random_array(rng, out.shape, jnp.bfloat16)
    o = Operands(*xs)._replace(out=out, lse=lse, dout=dout)
    with launch.interpreted(True), card.known(), pytest.warns(UserWarning, match="no kernel for"):
        got = jax.jit(partial(backward.backward, p=p))(*o)
    wide = [None if x is None else x.astype(jnp.float32) for x in o]
    want = jax.jit(partial(reference.backward, p=p))(*wide)
    for x, y in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float32) - y) / np.linalg.norm(y)
        assert error < 2**-9  # rounded once; rounded in each of 128 passes, some exceed it
