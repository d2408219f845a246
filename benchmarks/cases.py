"""What is measured, and whether it is right: cases, providers, and the truth they are held to."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records, timing

Function = Callable[..., Any]
Point = dict[str, Any]
Data = Callable[[jax.Array], jax.Array]
Grid = Mapping[str, Sequence[int | str]]  # the values of each axis
Sizes = Literal["all", "few", "largest", "none"]  # few: the least and the largest

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
TOLERANCE = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 1e-4}
PERIOD = 65_537  # prime, so that no two rows are alike
FLOAT64_BYTES = 2**30  # cases that move more are held to a float32 reference
UNTUNED = {"xla_gpu_autotune_level": 0}  # a truth runs once: XLA need not look for fast products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An op at one shape: random inputs, and the function that says what it means."""

    title: str  # with {metric}, {mode} and {dtype} left to fill in
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    reference: Function
    data: Data | None = None  # what to make of standard normal inputs
    further: tuple[
        np.ndarray[Any, Any], ...
    ] = ()  # arguments behind them: as they are, no gradient
    extra_bytes: int = 0  # what a backward pass reads besides its inputs, or need not read of them
    tolerance: float = 1.0  # times that of the dtype and of a provider, where the op rounds more


@dataclasses.dataclass(kw_only=True)
class Provider(records.Column):
    """A way to compute an op; an error from `make` or its function is the reason for a -1."""

    make: Callable[..., Function]  # of a point of the grid
    tolerance: float = 1.0  # times that of the dtype; `note` says why
    sizes: Sizes = "all"  # how many of a table's sizes the run of all ops takes
    modes: Sequence[str] = ("fwd", "bwd")
    needs: Sequence[str] = ()  # modules that must be installed
    has: Callable[..., bool] = lambda **_: True  # whether it computes a point of the grid

    def column(self) -> records.Column:
        names = [field.name for field in dataclasses.fields(records.Column)]
        return records.Column(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Benchmark:
    """An op, where to measure it, and whom to compare."""

    op: str
    case: Callable[..., Case]  # of a dtype and a point of the grid
    providers: Sequence[Provider]
    x: str  # the axis of the grid that a table's rows go through
    grid: Grid
    quick: Grid  # the axes that --quick shortens
    small: Grid  # the axes that are shorter without a GPU
    modes: Sequence[str] = ("fwd",)
    dtypes: Sequence[str] = ("bf16",)
    has: Callable[..., bool] = lambda **_: True  # whether a point of the grid is a case
    sizes: Callable[..., Sizes] = lambda **_: "all"  # those of a mode and point in a run of all ops
    point_s: float = 0.8  # seconds that a jitted point takes on an H200, most of it to compile
    proposals: Callable[..., Sequence[Provider]] = lambda **_: ()  # launches that --sweep tries


EAGER: dict[str, Any] = dict(jit=False, sizes="largest")  # what makes a column slow


def implementation() -> Literal["triton", "interpret"]:
    """What a kernel's provider asks of pallas_ops: to compile it, or without a GPU to interpret."""
    return "triton" if timing.on_gpu() else "interpret"


def normal(shapes: Any, *, seed: int, data: Data | None = None) -> Any:
    """`data` of standard normal arrays, each PERIOD values over and over.

    Made on the device, which never holds more than the results: its peak is to be the call's own.
    """
    rng = np.random.default_rng(seed)

    def make(shape: jax.ShapeDtypeStruct) -> Any:
        values = jnp.asarray(rng.standard_normal(PERIOD, np.float32), shape.dtype)
        return jax.block_until_ready(_repeated(values, shape=shape.shape, data=data))

    return jax.tree.map(make, shapes)


@functools.partial(jax.jit, static_argnames=("shape", "data"))
def _repeated(values: jax.Array, *, shape: tuple[int, ...], data: Data | None) -> jax.Array:
    place = jax.lax.iota(jnp.uint32, math.prod(shape)) % jnp.uint32(PERIOD)
    x = values[place].reshape(shape)
    return data(x) if data else x


def inputs(case: Case) -> tuple[jax.Array, ...]:
    further = (jnp.asarray(x) for x in case.further)
    return *normal(case.inputs, seed=0, data=case.data), *further


def prepare(
    provider: Provider,
    point: Point,
    arguments: tuple[jax.Array, ...],
    *,
    mode: str,
    constants: int = 0,
) -> tuple[Function, tuple[Any, ...]]:
    """What to measure, and on what: going backward, a residual is an argument like any other."""
    function = provider.make(**point)
    function = jax.jit(function) if provider.jit else function
    if mode == "fwd":
        return function, arguments
    shapes = jax.eval_shape(function, *arguments)
    pull = _vjp(function, arguments, constants)
    return jax.jit(_pull) if provider.jit else _pull, (pull, normal(shapes, seed=1))


def _vjp(function: Function, arguments: tuple[jax.Array, ...], constants: int) -> Function:
    """The pullback to all arguments but the last `constants`."""
    count = len(arguments) - constants
    pull: Function = jax.vjp(lambda *xs: function(*xs, *arguments[count:]), *arguments[:count])[1]
    return pull


def _pull(pull: Function, cotangents: Any) -> Any:
    return pull(cotangents)


def truth(case: Case, arguments: tuple[jax.Array, ...], *, mode: str) -> Any:
    """What should come out, in float64 where that is affordable and the reference allows it."""
    wide = jnp.float64 if moved_bytes(case, mode=mode) <= FLOAT64_BYTES else jnp.float32
    shapes = jax.eval_shape(case.reference, *arguments)
    with jax.enable_x64(wide == jnp.float64):
        count = len(case.inputs)
        arguments = (*(x.astype(wide) for x in arguments[:count]), *arguments[count:])
        if mode == "fwd":
            return jax.jit(case.reference, compiler_options=UNTUNED)(*arguments)
        results = jax.eval_shape(case.reference, *arguments)
        cotangents = jax.tree.map(
            lambda x, like: x.astype(like.dtype), normal(shapes, seed=1), results
        )
        pull = jax.jit(
            lambda xs, dy: _vjp(case.reference, xs, len(case.further))(dy),
            compiler_options=UNTUNED,
        )
        return pull(arguments, cotangents)


def deviation(got: Any, want: Any) -> float:
    """The largest |got - want| / (|want| + root mean square of want); NaN if that is anywhere."""
    with jax.enable_x64(True):
        return float(np.max(jax.tree.leaves(jax.tree.map(_worst, got, want))))


@jax.jit
def _worst(got: jax.Array, want: jax.Array) -> jax.Array:
    got = got.astype(want.dtype)
    finite = jnp.where(jnp.isfinite(want), want, 0)
    size = jnp.abs(finite) + jnp.sqrt(jnp.mean(finite * finite))
    return jnp.max(jnp.where(got == want, 0, jnp.abs(got - want) / size), initial=0)


def moved_bytes(case: Case, *, mode: str) -> int:
    """Inputs and results, each once; backward: inputs, cotangents and gradients."""
    results = jax.eval_shape(case.reference, *case.inputs, *case.further)
    if mode == "fwd":
        return _bytes((case.inputs, case.further, results))
    return _bytes((case.inputs, results, case.inputs)) + case.extra_bytes


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
