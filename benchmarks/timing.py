"""How long a call takes: on the card's own clock (CUPTI) and on the wall.

Both are medians over many calls, one at a time, that find nothing in the card's cache: `Rotation`
deals out copies of the arguments which together exceed the cache several times over, and keeps as
many results alive. A copy kernel, timed the same way, says how fast the bytes could have moved.
"""

import collections
import contextlib
import dataclasses
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_ops.core import launch

COLD_BYTES = 256 * 2**20  # five times the L2 cache of an H100 or H200 (50 MiB)
MAX_COPIES = 2048
WARM_UP = 3
TIMED_MS = 500  # slow functions are called fewer times, yet not fewer than LEAST_CALLS
LEAST_CALLS = 5
COPY_BLOCK = 1024

Kernel = tuple[str, float]  # name, milliseconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Median milliseconds of one call; `kernels` were launched by it, unless that varied."""

    wall_ms: float
    calls: int
    spread: float | None = None
    kernel_ms: float | None = None
    kernels: int | None = None


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def measure(function: Callable[..., Any], arguments: tuple[Any, ...], *, calls: int) -> Times:
    """Times `function`, jitted or not; kernel time only where there is a GPU."""
    rotation = Rotation(arguments, cold_bytes=COLD_BYTES if on_gpu() else 0)
    warm_ms = [rotation.call(function) for _ in range(WARM_UP)][-1]
    calls = min(calls, max(LEAST_CALLS, int(TIMED_MS / warm_ms)))
    walls = [rotation.call(function) for _ in range(calls)]
    wall_ms = statistics.median(walls)
    if not on_gpu():
        return Times(wall_ms=wall_ms, calls=calls, spread=spread(walls))
    with cupti() as kernels:
        for _ in range(calls):
            rotation.call(function)
    times, each = per_call(kernels, calls=calls)
    return Times(
        wall_ms=wall_ms,
        calls=calls,
        spread=spread(times),
        kernel_ms=statistics.median(times),
        kernels=each,
    )


def spread(times: list[float]) -> float | None:
    """The interquartile range over the median."""
    if len(times) < 2:
        return None
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


class Rotation:
    """Copies of one call's arguments, each cold in the cache again when its turn comes."""

    def __init__(self, arguments: tuple[Any, ...], *, cold_bytes: int = COLD_BYTES) -> None:
        size = max(1, sum(leaf.nbytes for leaf in jax.tree.leaves(arguments)))
        copies = min(MAX_COPIES, max(1, -(-cold_bytes // size)))
        sets = [arguments, *(_copied(arguments) for _ in range(copies - 1))]
        self._turn = itertools.cycle(jax.block_until_ready(sets))
        self._results: collections.deque[Any] = collections.deque(maxlen=copies)

    def call(self, function: Callable[..., Any]) -> float:
        """Calls `function` on the next arguments and waits: the milliseconds that took."""
        arguments = next(self._turn)
        start = time.perf_counter()
        result = jax.block_until_ready(function(*arguments))
        elapsed = time.perf_counter() - start
        self._results.append(result)
        return 1e3 * elapsed


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def per_call(kernels: list[Kernel], *, calls: int) -> tuple[list[float], int | None]:
    """Each call's sum, and its kernels; if calls launched different ones, their mean, no number.

    Copies and memsets are not kernels.
    """
    if not kernels:
        raise RuntimeError("CUPTI saw no kernel: is another profiler attached to this process?")
    names = [name for name, _ in kernels]
    times = [milliseconds for _, milliseconds in kernels]
    each, rest = divmod(len(kernels), calls)
    if rest or names != names[:each] * calls:
        return [sum(times) / calls], None
    starts = range(0, len(times), each)
    return [sum(times[start : start + each]) for start in starts], each


@contextlib.contextmanager
def cupti() -> Iterator[list[Kernel]]:
    """Fills the list it yields, on leaving, with every kernel that ran inside."""
    start, stop = _cupti_functions()
    kernels: list[Kernel] = []
    start()
    try:
        yield kernels
    finally:
        kernels.extend(stop(True))  # True detaches: CUPTI takes one subscriber at a time


def _cupti_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What jax.experimental.mosaic.gpu.profiler stands on.

    Its own `measure` repeats a jitted call on the same arguments, which the cache then holds.
    """
    try:
        extension = importlib.import_module("jax._src.lib.mosaic_gpu")._mosaic_gpu_ext
        return extension._cupti_init, extension._cupti_get_timings
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"JAX {jax.__version__} offers no CUPTI here: kernel times need jax[cuda12] or "
            "jax[cuda13], 0.10.2 to 0.12"
        ) from error


def copy(x: jax.Array) -> jax.Array:
    """The floor: reads a flat array of whole COPY_BLOCKs once and writes it once."""
    return pallas_copy(x) if on_gpu() else jnp.copy(x)


@jax.jit
def pallas_copy(x: jax.Array) -> jax.Array:
    block = pl.BlockSpec((COPY_BLOCK,), lambda i: (i,))
    (out,) = launch.launch(
        _copy_kernel,
        x,
        name="copy",
        grid=(x.size // COPY_BLOCK,),
        in_specs=[block],
        out_specs=[block],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        num_warps=4,
    )
    return out


def _copy_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = x_ref[...]
