"""Kernels on a CPU as a card would run them: compiled for the H200, and their PTX run in NumPy.

`install` makes `implementation="triton"` mean this in the process, where it is refused otherwise.
"""

import collections
import contextlib
import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_ops.core import dispatch
from tests import h200, ptx

KERNELS = "PALLAS_OPS_KERNELS"  # "interpret": no emulation

_PROGRAMS: dict[str, tuple[ptx.Program, tuple[int, ...]]] = {}
_traffic: list[dict[str, collections.Counter[str]]] = []


def is_possible() -> bool:
    return os.environ.get(KERNELS) != "interpret" and h200.why_unavailable() is None


@functools.cache
def install() -> None:
    pallas_call = importlib.import_module("jax._src.pallas.pallas_call")
    interpret = pallas_call._pallas_call_lowering

    def lower_call(ctx: Any, *xs: Any, **params: Any) -> Any:
        if params["interpret"]:
            return interpret(ctx, *xs, **params)
        structs = ([_struct(x) for x in avals] for avals in (ctx.avals_in, ctx.avals_out))
        run = _emulated(functools.partial(pallas_call.pallas_call_p.bind, **params), *structs)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *xs)

    def lower_dispatch(*xs: jax.Array, bound: dispatch.Bound) -> Any:
        if bound.implementation == "triton":
            return bound.kernel(*xs)
        return dispatch._lower_elsewhere(*xs, bound=bound)

    mlir.register_lowering(pallas_call.pallas_call_p, lower_call, platform="cpu")
    mlir.register_lowering(dispatch.dispatch_p, dispatch._rule(lower_dispatch), platform="cpu")


@contextlib.contextmanager
def traffic() -> Iterator[dict[str, collections.Counter[str]]]:
    """Counts by kernel, as they run: "loads bytes", "stores sectors", .."""
    _traffic.append(collections.defaultdict(collections.Counter))
    try:
        yield _traffic[-1]
    finally:
        _traffic.pop()


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _emulated(kernel: Callable[..., Any], operands: Any, results: Any) -> Callable[..., Any]:
    program, grid = _compiled(kernel, operands)

    def on_host(*arrays: Any) -> Any:
        out, counts = ptx.run(program, grid, [np.asarray(x) for x in arrays], results)
        for each in _traffic:
            each[program.name] += counts
        return out

    return functools.partial(jax.pure_callback, on_host, results)


def _compiled(kernel: Callable[..., Any], operands: Any) -> tuple[ptx.Program, tuple[int, ...]]:
    text = h200.lower_for_cuda(kernel, *operands).as_text()
    if text not in _PROGRAMS:
        with jax.enable_x64(False):
            compiled = h200.compile_for_h200(kernel, *operands)
        programs = map(ptx.parse, compiled.ptx)
        (program,) = (x for x in programs if x.name.startswith("pallas_ops"))
        grid = re.search(r"grid_x = (\d+) .*?grid_y = (\d+) .*?grid_z = (\d+) ", compiled.hlo)
        assert grid is not None
        _PROGRAMS[text] = program, tuple(map(int, grid.groups()))
    return _PROGRAMS[text]
