"""Kernels on a CPU as a card would run them: compiled for the H200, and their PTX run in NumPy.

`install` makes `implementation="triton"` mean this in the process, where it is refused otherwise.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from pallas_ops.core import dispatch
from tests import h200, ptx

KERNELS = "PALLAS_OPS_KERNELS"  # "interpret": no emulation

# XLA's own threads take denormal numbers for 0, and with them what is called back from there.
_HOST = concurrent.futures.ThreadPoolExecutor(max_workers=1)
_HOST.submit(int).result()  # started here: a thread begins with the mode of the one that starts it
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
        operands, results = ([_struct(x) for x in y] for y in (ctx.avals_in, ctx.avals_out))
        kernel = functools.partial(pallas_call.pallas_call_p.bind, **params)
        run = _emulated(kernel, operands, results)
        return mlir.lower_fun(run, multiple_results=True)(ctx, *xs)

    def lower_dispatch(*xs: jax.Array, bound: dispatch.Bound) -> Any:
        if bound.implementation == "triton":
            with h200.on_h200():  # whose launches these are
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
        counts = collections.Counter[str]() if _traffic else None
        operands = [np.asarray(x) for x in arrays]
        out = _HOST.submit(ptx.run, program, grid, operands, results, counts).result()
        for each in _traffic:
            each[program.name] += counts or {}
        return out

    return functools.partial(jax.pure_callback, on_host, results)


def _compiled(kernel: Callable[..., Any], operands: Any) -> tuple[ptx.Program, tuple[int, ...]]:
    with jax.enable_x64(False):
        lowered = h200.lower_for_h200(kernel, *operands)
        text = lowered.as_text()
        if text not in _PROGRAMS:
            kernel_text, grid = _kept(text, lambda: _text_and_grid(h200.compile_lowered(lowered)))
            _PROGRAMS[text] = ptx.parse(kernel_text), tuple(grid)
    return _PROGRAMS[text]


def _kept(text: str, compiled: Callable[[], Any]) -> Any:
    """What `compiled` returns, kept for the next run beside the programs that JAX keeps."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        return compiled()
    key = hashlib.sha256(f"{jax.__version__} {text}".encode()).hexdigest()
    path = pathlib.Path(folder, f"{key}.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")  # workers may write at the same time
        own.write_text(json.dumps(compiled()))
        own.replace(path)
    return json.loads(path.read_text())


def _text_and_grid(compiled: h200.Program) -> tuple[str, tuple[int, ...]]:
    """The one kernel of Pallas, and its grid."""
    (text,) = (x for x in compiled.ptx if re.search(r"\.entry pallas_ops", x))
    grid = re.search(r"grid_x = (\d+) .*?grid_y = (\d+) .*?grid_z = (\d+) ", compiled.hlo)
    assert grid is not None
    return text, tuple(map(int, grid.groups()))
