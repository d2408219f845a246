"""Steps over all cards beside one card: `python -m benchmarks.devices`

A step feeds its result to the next one, 16 times in one jitted loop. It runs on one card, and over
all of them in two ways: under `jax.jit` with sharded arrays, and inside `jax.shard_map`. First the
states after one step are compared, with exact matrix products. Times are medians of the wall clock.

On CPUs (XLA_FLAGS=--xla_force_host_platform_device_count=8) small steps run.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from benchmarks import suite, timing

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

from linear_attention import LinearAttention

_OUT = flags.DEFINE_string("out", None, "file for JSON")
_ONLY = flags.DEFINE_string("only", "", "steps whose name has this text")

STEPS, CALLS = 16, 10
TOLERANCE = 2e-3  # of the change of the state, in the mean
SEQUENCE = P(None, "x")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """`run(state, fixed, axis_name)` is the next state; specs say how the arrays are sharded."""

    name: str
    run: Callable[[Any, Any, str | None], Any]
    arrays: Callable[[], tuple[Any, Any]]
    specs: tuple[Any, Any]
    forms: Sequence[str] = ("jit", "shard_map")


def decode(state: jax.Array, fixed: Any, axis_name: str | None) -> jax.Array:
    """One token; the next query takes a little of the output."""
    out = pallas_ops.tpa_decode(state.astype(jnp.bfloat16), *fixed, axis_name=axis_name)
    step: jax.Array = 0.1 * out[..., : state.shape[-1]].astype(state.dtype)
    return state + step


def decoding(batch: int, m: int) -> Step:
    h, r, d = 32, 16, 128

    def arrays() -> tuple[Any, Any]:
        shapes = (batch, m, h), (batch, m, h), (batch, 1, r, d), (batch, m, d), (batch, m, d)
        state, *fixed = random((batch, 1, h, r), *shapes)
        return state.astype(jnp.float32), tuple(fixed)

    specs = P(), (SEQUENCE, SEQUENCE, P(), SEQUENCE, SEQUENCE)
    return Step(name=f"tpa_decode, B {batch}, M {m}", run=decode, arrays=arrays, specs=specs)


def descend(x: jax.Array, _: Any, axis_name: str | None) -> jax.Array:
    """A step down the gradient of half the sum of squares."""
    out, pullback = jax.vjp(partial(pallas_ops.logcumsumexp, axis=1, axis_name=axis_name), x)
    step: jax.Array = 1e-3 * pullback(out)[0]
    return x - step


def scanning(n: int, columns: int) -> Step:
    return Step(
        name=f"logcumsumexp, {n} positions of {columns} columns, forward and gradient",
        run=descend,
        arrays=lambda: (random((1, n, columns))[0], ()),
        specs=(SEQUENCE, ()),
    )


def training(batch: int, n: int, *, width: int, heads: int, over: str) -> Step:
    """examples/linear_attention.py, its batch or its sequence sharded."""
    make = partial(LinearAttention, width, heads, width // heads, chunk_size=min(128, n // 8))
    graph = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]

    def arrays() -> tuple[Any, Any]:
        return nnx.split(make(rngs=nnx.Rngs(0)))[1], tuple(random(*2 * [(batch, n, width)]))

    def run(weights: Any, fixed: Any, axis_name: str | None) -> Any:
        x, target = fixed

        def loss(weights: Any) -> jax.Array:
            layer: Any = nnx.merge(graph, weights)
            out = layer(x, axis_name=axis_name).astype(jnp.float32)
            return jnp.square(out - target).sum() / (batch * n * width)

        grads = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    spec = P("x") if over == "batch" else SEQUENCE
    return Step(
        name=f"linear_attention, B {batch}, N {n}, width {width}, {heads} heads, {over} sharded",
        run=run,
        arrays=arrays,
        specs=(P(), (spec, spec)),
        forms=["jit"] if over == "batch" else ["shard_map"],
    )


def random(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal numbers in bfloat16, made on the device."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [draw(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]


def looped(step: Step, count: int, axis_name: str | None = None) -> Callable[..., Any]:
    def loop(state: Any, fixed: Any) -> Any:
        body = lambda _, state: step.run(state, fixed, axis_name)  # noqa: E731
        return jax.lax.fori_loop(0, count, body, state)

    return loop


def forms(step: Step, mesh: Mesh) -> Iterator[tuple[str, Callable[[int], Any], tuple[Any, Any]]]:
    """Name, what makes the function of so many steps, and arguments: on one device first."""
    whole = step.arrays()
    yield "one", lambda count: jax.jit(looped(step, count)), whole
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), step.specs)
    placed = tuple(jax.device_put(x, s) for x, s in zip(whole, shardings, strict=True))
    if "jit" in step.forms:
        yield "jit", lambda count: jax.jit(looped(step, count), out_shardings=shardings[0]), placed
    if "shard_map" in step.forms:

        def over(count: int) -> Any:
            specs = dict(in_specs=step.specs, out_specs=step.specs[0])
            return jax.jit(jax.shard_map(looped(step, count, "x"), mesh=mesh, **specs))

        yield "shard_map", over, placed


def wall_ms(run: Callable[..., Any], arrays: tuple[Any, Any]) -> float:
    """The median milliseconds of a step."""
    times = []
    jax.block_until_ready(run(*arrays))
    for _ in range(CALLS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        times.append(1e3 * (time.perf_counter() - start) / STEPS)
    return statistics.median(times)


def deviation(got: Any, want: Any, start: Any) -> float:
    """The largest of all arrays: |got - want| over |want - start|, root mean squares."""

    def of_array(got: Any, want: Any, start: Any) -> float:
        got, want, start = (jax.device_get(x).astype("float32") for x in (got, want, start))
        return float(np.linalg.norm(got - want) / np.linalg.norm(want - start))

    return max(map(of_array, *map(jax.tree.leaves, (got, want, start))))


def measure(step: Step, mesh: Mesh) -> dict[str, Any]:
    row: dict[str, Any] = dict(step=step.name)
    want = None
    for name, make, arrays in forms(step, mesh):
        with jax.default_matmul_precision("highest"):
            result = make(1)(*arrays)
        want = result if want is None else want
        row[f"{name}_deviation"] = error = deviation(result, want, arrays[0])
        if not error <= TOLERANCE:
            continue
        row[f"{name}_ms"] = wall_ms(make(STEPS), arrays)
        if name != "one":
            row[f"{name}_times_as_fast"] = row["one_ms"] / row[f"{name}_ms"]
    return row


def steps() -> list[Step]:
    if not timing.on_gpu():
        small = partial(training, 8, 128, width=32, heads=4)
        return [decoding(2, 256), scanning(512, 8), small(over="batch"), small(over="sequence")]
    train = partial(training, width=1024, heads=16)
    return [
        decoding(8, 2**20),
        decoding(1, 2**20),
        *(scanning(2**20, columns) for columns in (64, 256, 1024)),
        train(16, 8192, over="batch"),
        train(8, 16384, over="sequence"),
    ]


def main(_: Sequence[str]) -> None:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    rows = []
    for step in steps():
        if _ONLY.value in step.name:
            rows.append(measure(step, mesh))
            numbers = (f"{key} {value:.4g}" for key, value in rows[-1].items() if key != "step")
            print(step.name, *numbers, sep="\n  ", flush=True)
    if _OUT.value:
        about = dict(date=time.strftime("%Y-%m-%d"), card=suite.card(), cards=jax.device_count())
        about |= dict(jax=jax.__version__, note=f"median wall clock of a step, loops of {STEPS}")
        pathlib.Path(_OUT.value).write_text(json.dumps(about | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
