"""What the tests of sharded arrays share: the op over shards, by name, by jit, and its types."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests import h200
from tests.ops import Arrays, Layout, TestedOp, specs
from tests.support import on_host

Tree = Any
_SHAPE = re.compile(r"\b(?:pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")


def line(count: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """So many of the CPUs."""
    return Mesh(np.array(jax.devices("cpu")[:count]), "x", axis_types=(kind,))


def with_pullback(fn: Callable[..., Any], num_args: int) -> Callable[..., Any]:
    """Of arguments and cotangents: what `fn` returns, and the gradients of the arguments."""

    def run(*xs: Any) -> Any:
        out, pull = jax.vjp(fn, *xs[:num_args])
        return out, pull(xs[num_args] if len(xs) == num_args + 1 else xs[num_args:])

    return run


def mapped(fn: Callable[..., Any], mesh: Mesh, ins: Tree, outs: Tree, **kwargs: Any) -> Any:
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs, **kwargs))


def placed(mesh: Mesh, xs: tuple[Any, ...], specs: tuple[P, ...]) -> tuple[Any, ...]:
    return tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(on_host(xs), specs, strict=True)
    )


def compiled(fn: Any, *xs: Any) -> tuple[Any, str]:
    """The compiled program, and its text."""
    program = jax.jit(fn).lower(*xs).compile()
    text = program.as_text()
    assert text is not None
    return program, text


def exchanges(hlo: str) -> dict[str, list[int]]:
    """By kind, how many numbers the collectives of a program bring each device."""
    found: dict[str, list[int]] = {}
    for text in hlo.splitlines():
        for kind in h200.count_collectives(text):
            result = text.split("=", 1)[1].split(kind)[0]
            sizes = [np.prod([int(n) for n in x.split(",") if n]) for x in _SHAPE.findall(result)]
            found.setdefault(kind, []).append(int(max(sizes)))
    return found


def place(mesh: Mesh, xs: Arrays, axes: tuple[str, ...], layout: Layout) -> Arrays:
    """By the names of their axes."""
    return placed(mesh, xs, specs(axes, layout))


def run(fn: Callable[..., Any], *args: Any) -> tuple[Any, dict[str, int]]:
    """The result, and the collectives that it took."""
    program, text = compiled(fn, *args)
    return program(*args), dict(h200.count_collectives(text))


def assert_sharded(xs: Arrays, axes: tuple[str, ...], mesh: Mesh, layout: Layout) -> None:
    for x, spec in zip(xs, specs(axes, layout), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), x.sharding


def summing(op: TestedOp, layout: Layout) -> set[str]:
    """The collectives of the op's gradient."""
    return {"all-reduce"} if op.sums_gradients(layout) else set()
