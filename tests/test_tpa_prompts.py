"""tpa_decode with precision="default": which calls cuDNN takes, and the memory of a prompt."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.core import card, launch
from pallas_ops.ops.tpa_decode import formed, prompt, prompt_backward
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes, TpaDecodeConfig
from tests import cudnn, h200
from tests.support import random_array, to_float64

Rng = np.random.Generator


def test_whose_gradients_cudnn_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.instead(monkeypatch)
    shapes = dict(aq=(1, 512, 32, 128), ak=(1, 512, 1, 32), av=(1, 512, 1, 32))
    shapes |= dict(bk=(1, 512, 1, 128), bv=(1, 512, 1, 128))
    o = Operands(**{k: jax.ShapeDtypeStruct(x, jnp.bfloat16) for k, x in shapes.items()})
    p = Params(precision="default", has_lse=False)
    longer = {
        k: jax.ShapeDtypeStruct((1, 513, *x.shape[2:]), x.dtype)
        for k, x in zip(("ak", "av", "bk", "bv"), (o.ak, o.av, o.bk, o.bv), strict=True)
    }
    with launch.interpreted(True):
        assert prompt_backward.has_gradient(o, p)
        assert not prompt_backward.has_gradient(o, dataclasses.replace(p, has_lse=True))
        assert not prompt_backward.has_gradient(o, dataclasses.replace(p, precision="highest"))
        assert not prompt_backward.has_gradient(o._replace(lengths=jnp.ones(1, jnp.int32)), p)
        assert prompt_backward.has_gradient(o._replace(**longer), p)


def test_what_is_taken_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn.instead(monkeypatch)
    sizes: dict[str, Any] = dict(b=1, n=512, m=8192, h=32, r=16, d=128, e=128, rk=1, rv=1)
    s, p = Sizes(**sizes, dtype="bfloat16", precision="default"), Params(precision="default")
    others: tuple[dict[str, Any], ...] = (
        dict(precision="highest"),
        dict(dtype="float32"),
        dict(n=64),
        dict(n=8193),
        dict(d=64),
        dict(d=124, e=124),
        dict(d=256, e=256),
        dict(m=2**19),
    )
    options: tuple[dict[str, Any], ...] = (
        dict(window=7),
        dict(batch_invariant=True),
        dict(config=TpaDecodeConfig(block_h=32)),
    )
    with launch.interpreted(True):
        assert prompt.takes(s, p)
        for change in others:
            assert not prompt.takes(dataclasses.replace(s, **change), p), change
        for change in options:
            assert not prompt.takes(s, dataclasses.replace(p, **change)), change


@pytest.mark.slow
def test_gradients_of_a_prompt_take_less_memory_than_materialised_ones() -> None:
    """1,024 queries of 32 heads behind 8,192 tokens."""
    heads, features = (1, 8192, 32), (1, 8192, 128)
    shapes = (1, 1024, 32, 16), heads, heads, (1, 1024, 16, 128), features, features
    xs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def bytes_of(decode: Any) -> int:
        out = jax.eval_shape(decode, *xs)
        program = h200.compile_for_h200(lambda xs, do: jax.vjp(decode, *xs)[1](do), xs, out)
        return int(program.memory.temp_size_in_bytes)

    most = 0.6 * 2 * 4 * (1024 * 32 * 8192)  # scores and weights in float32
    for precision in ("highest", "default"):
        assert bytes_of(partial(pallas_ops.tpa_decode, precision=precision)) < most


def test_a_group_of_sequences_goes_the_way_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN has the gradient of 37 sequences of 1,023 tokens, though not of one alone."""
    cudnn.instead(monkeypatch)
    monkeypatch.setattr(formed, "BYTES_AT_ONCE", 1)
    n, m = 51, 1023

    def operands(b: int) -> Operands:
        shapes = dict(aq=(b, n, 64, 64), ak=(b, m, 1, 64), av=(b, m, 1, 64), bk=(b, m, 1, 64))
        shapes |= dict(bv=(b, m, 1, 64), out=(b, n, 64, 64), dout=(b, n, 64, 64))
        of_rows = dict(lse=jax.ShapeDtypeStruct((b, n, 64), jnp.float32))
        return Operands(
            **{k: jax.ShapeDtypeStruct(x, jnp.bfloat16) for k, x in shapes.items()}, **of_rows
        )

    calls = []
    gradients = prompt_backward.CUDNN_BACKWARD.bind

    def bind(*xs: Any, **options: Any) -> Any:
        calls.append(xs)
        return gradients(*xs, **options)

    monkeypatch.setattr(prompt_backward.CUDNN_BACKWARD, "bind", bind)
    p = Params(precision="default", has_lse=False)
    with launch.interpreted(True):
        assert prompt_backward.has_gradient(operands(37), p)
        assert not prompt_backward.has_gradient(operands(1), p)
        grads = jax.eval_shape(partial(formed.backward, p=p), operands(37))
    assert [x.shape for x in grads] == [x.shape for x in operands(37)[:6] if x is not None]
    assert [xs[0].shape[:2] for xs in calls] == [(1, 52)] * 2


def test_second_derivatives_by_cudnn(rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN takes no cotangent of the log-sum-exp, which second derivatives have."""
    cudnn.instead(monkeypatch)
    monkeypatch.setattr(prompt, "LEAST_ROWS", 4)
    shapes = (1, 4, 2, 3), (1, 8, 2), (1, 8, 2), (1, 4, 3, 64), (1, 8, 64), (1, 8, 64)
    xs = [random_array(rng, shape, jnp.bfloat16) for shape in shapes]
    do = random_array(rng, (1, 4, 2, 64), jnp.bfloat16)

    def second(decode: Any) -> Any:
        def total(xs: Any) -> jax.Array:
            grads = jax.vjp(decode, *xs)[1](do)
            return jnp.stack([jnp.square(g.astype(jnp.float32)).sum() for g in grads]).sum()

        return jax.jit(jax.grad(total))(xs)

    decode = partial(pallas_ops.tpa_decode, scale=0.5)
    got = second(partial(decode, precision="default", implementation="interpret"))
    want = second(partial(decode, implementation="xla"))
    for x, y in zip(map(to_float64, got), map(to_float64, want), strict=True):
        assert np.linalg.norm(x - y) < 0.15 * np.linalg.norm(y)  # q and the weights are rounded


@pytest.mark.parametrize(
    ("capability", "version", "is_here"),
    [(90, 90_000, True), (103, 91_000, False), (103, 91_100, True), (90, None, False)],
)
def test_a_cudnn_that_is_absent_or_does_not_know_the_card_is_not_called(
    capability: int, version: int | None, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check() -> int:
        if version is None:
            raise RuntimeError("cuDNN is not detected.")
        return version

    monkeypatch.setattr(prompt, "cudnn", SimpleNamespace(check_cudnn_version=check))
    monkeypatch.setattr(card, "is_here", lambda: True)
    monkeypatch.setattr(card, "current", lambda: SimpleNamespace(capability=capability))
    assert prompt.is_here() == is_here
