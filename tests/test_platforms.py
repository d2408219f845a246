"""Every op where programs are made: how often they are compiled, and for which platform."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tests.ops import OPS, TERMS, TestedOp, every_op, random_weights, words
from tests.support import assert_close, kernel_implementation, value_and_vjp

KERNEL = kernel_implementation()
Rng = np.random.Generator
ROOT = pathlib.Path(__file__).parents[1]


# Compilations


@pytest.fixture
def events() -> Iterator[list[str]]:
    """The traces and compilations that JAX reports, as they come."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event.endswith(("jaxpr_trace_duration", "backend_compile_duration")):
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("op", [op for op in OPS if op.integers], ids=words)
def test_integers_compile_once(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    traces = []

    @jax.jit
    def fn(*xs: jax.Array) -> Any:
        traces.append(xs)
        return op.fn(*xs)[0]

    results = [
        fn(*xs[: op.num_floating], *(op.argument(rng, i) for i in op.integers)) for _ in range(5)
    ]
    assert len(traces) == 1
    assert not np.array_equal(results[0], results[1])


@every_op
def test_eager_calls_share_one_program(rng: Rng, op: TestedOp, events: list[str]) -> None:
    calls = [op.arguments(rng, b=3) for _ in range(2)]  # a size of this test's own
    # JAX 0.12 adds an option when it first interprets a kernel, and traces everything anew.
    op.fn(*op.arguments(rng), implementation=KERNEL)
    op.fn(*calls[0], implementation=KERNEL)
    assert events
    events.clear()
    op.fn(*calls[1], implementation=KERNEL)
    assert not events


# Platforms


@every_op
def test_triton_elsewhere_says_what_to_pass(rng: Rng, op: TestedOp) -> None:
    traced = jax.jit(partial(op.fn, implementation="triton")).trace(*op.arguments(rng))
    message = f'{op.name}: implementation="triton" needs an NVIDIA GPU.*pass implementation=None'
    with pytest.raises(ValueError, match=message):
        traced.lower(lowering_platforms=("tpu",))


@every_op
def test_a_cpu_never_traces_the_kernel(
    rng: Rng, op: TestedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("traced a kernel")

    monkeypatch.setattr(pl, "pallas_call", refuse)
    # Of a size of this test's own, for which nothing has been traced.
    xs = jax.device_put(op.arguments(rng, b=5), jax.devices("cpu")[0])
    weights = random_weights(rng, op, xs)
    got, want = (
        value_and_vjp(partial(op.fn, implementation=implementation), xs, weights)
        for implementation in (None, "xla")
    )
    assert_close(got[0], want[0], terms=TERMS)
    assert_close(got[1][: op.num_floating], want[1][: op.num_floating], terms=TERMS)
    with pytest.raises(AssertionError, match="traced a kernel"):
        op.fn(*xs, implementation="interpret")


def test_import_and_tracing_start_no_backend() -> None:
    program = """
import jax
from tests.ops import OPS
for op in OPS:
    xs = op.structs("f4", **op.sizes)
    jax.make_jaxpr(op.fn)(*xs)
    jax.make_jaxpr(jax.vmap(op.fn))(*[jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in xs])
"""
    env = os.environ | dict(JAX_PLATFORMS="there-is-none")
    subprocess.run([sys.executable, "-c", program], check=True, env=env, cwd=ROOT)
