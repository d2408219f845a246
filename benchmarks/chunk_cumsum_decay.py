"""Running sums that restart at every chunk. `python -m benchmarks.chunk_cumsum_decay --help`"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from benchmarks import command, peers, sweep
from benchmarks.cases import EAGER, Benchmark, Case, Function, Provider, Sizes, implementation
from pallas_ops import ChunkCumsumDecayConfig, chunk_cumsum_decay, reference

HEADS, SEQUENCES = 16, 61
FORWARD: dict[str, Any] = dict(reverse=False)
REVERSE: dict[str, Any] = dict(reverse=True, shift="sequence")  # which tables call reverse_True

# Batch, width and options. Packed sequences stand in one row as long as the batch.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    f"b{b}-d{d}-{name}": (b, d, options)
    for name, options in (("forward", FORWARD), ("reverse", REVERSE))
    for b in (4, 16)
    for d in (1, 128)
}
SEEDS = tuple(CASES)
CASES |= {
    "b16-d128-forward-f32": (16, 128, dict(**FORWARD, dtype="float32")),
    "b16-d128-reverse-f32": (16, 128, dict(**REVERSE, dtype="float32")),
    "b16-d128-chunk100": (16, 128, dict(chunk_size=100)),
    "b16-d128-packed": (16, 128, dict(packed=True)),
    "b1-d1-whole": (1, 1, dict(chunk_size=2**20)),  # one chunk, and few columns to fill a card
}


def case(dtype: Any, *, where: str, n: int) -> Case:
    b, d, options = CASES[where]
    bounds = (_bounds(b * n),) if "packed" in options else ()
    x = jax.ShapeDtypeStruct((1, b * n, HEADS, d) if bounds else (b, n, HEADS, d), dtype)
    what = "".join(f"-{key}_{value}" for key, value in options.items() if key != "shift")
    return Case(
        title=f"chunk_cumsum_decay-{{metric}}-{{mode}}-b{b}-h{HEADS}-d{d}{what}-{{dtype}}",
        inputs=(x,),
        reference=_of(reference.chunk_cumsum_decay, where),
        further=bounds,
        extra_bytes=-x.size * x.dtype.itemsize,  # the gradient does not read x
    )


def _bounds(n: int) -> np.ndarray[Any, Any]:
    """Of sequences of very different lengths, one of them empty."""
    inner = np.sort(np.random.default_rng(0).integers(0, n, SEQUENCES - 2))
    return np.asarray([0, *inner, inner[-1], n], np.int32)


def _of(call: Function, where: str) -> Function:
    """`call` of x, and of the bounds of packed sequences."""
    options = {key: value for key, value in CASES[where][2].items() if key != "packed"}
    run = partial(call, **options)
    return lambda x, bounds=None: run(x, cu_seqlens=bounds)


def provider(name: str, call: Function, note: str, **options: Any) -> Provider:
    return Provider(name=name, make=lambda *, where, **_: _of(call, where), note=note, **options)


def kernel(x: jax.Array, **options: Any) -> jax.Array:
    return chunk_cumsum_decay(x, implementation=implementation(), **options)


# PyTorch


def shifted(torch: Any, x: Any, *, shift: str | None = None, reverse: bool = False) -> Any:
    """The neighbour's x along the sequence, and zero at its end."""
    if shift is None:
        return x
    nothing = torch.zeros_like(x[:, :1])
    pair = (x[:, 1:], nothing) if reverse else (nothing, x[:, :-1])
    return torch.cat(pair, dim=1)


def torch_cumsum(
    torch: Any,
    x: Any,
    *,
    reverse: bool = False,
    shift: str | None = None,
    chunk_size: int = 128,
    dtype: str | None = None,
) -> Any:
    b, n, *rest = x.shape
    y = shifted(torch, x.float(), shift=shift, reverse=reverse)
    chunk_size = min(chunk_size, n)
    more = -n % chunk_size
    y = torch.cat([y, y.new_zeros(b, more, *rest)], dim=1) if more else y
    y = y.reshape(b, -1, chunk_size, *rest)
    y = y.flip(2).cumsum(2).flip(2) if reverse else y.cumsum(2)
    return y.reshape(b, -1, *rest)[:, :n].to(getattr(torch, dtype) if dtype else x.dtype)


def fla_cumsum(
    torch: Any,
    x: Any,
    bounds: Any = None,
    *,
    reverse: bool = False,
    shift: str | None = None,
    chunk_size: int = 128,
    dtype: str | None = None,
) -> Any:
    if chunk_size > 4096:
        raise NotImplementedError("its tiles hold whole chunks")
    call = importlib.import_module("fla.ops.utils").chunk_local_cumsum
    y = shifted(torch, x, shift=shift, reverse=reverse)
    out_dtype = getattr(torch, dtype) if dtype else x.dtype
    y = y.squeeze(-1) if x.shape[-1] == 1 else y
    out = call(y, chunk_size, reverse=reverse, cu_seqlens=bounds, output_dtype=out_dtype)
    return out.reshape(x.shape)


def with_options(call: Callable[..., Any]) -> Callable[..., Function]:
    def make(torch: Any, *, where: str, **_: Any) -> Function:
        options = dict(CASES[where][2])
        if options.pop("packed", False) and call is torch_cumsum:
            raise NotImplementedError("it knows no packed sequences")
        return partial(call, torch, **options)

    return make


def of_xopes(module: Any, *, where: str, **_: Any) -> Function:
    options = dict(CASES[where][2])
    if options.pop("shift", None) == "sequence" and not options["reverse"]:
        raise NotImplementedError("it shifts sums in reverse alone")
    if {"packed", "dtype"} & options.keys():
        raise NotImplementedError("neither packed sequences nor a dtype of results")
    return partial(module.chunk_cumsum_decay_triton, **options)


PEERS = (
    *peers.pair(with_options(torch_cumsum), "pad, float32, reshape, flip, cumsum"),
    peers.provider(
        "fla",
        with_options(fla_cumsum),
        "chunk_local_cumsum; a shift is made for it by torch.cat",
        "fla",
        sizes="largest",  # it tries its launches first
    ),
    peers.xopes("cumsum.chunk_cumsum_decay", of_xopes, "chunk_cumsum_decay_triton"),
)


def sizes(*, mode: str, where: str, **_: Any) -> Sizes:
    """Tables of the seeds whole; backward, which is the same kernel reversed, two of them."""
    if mode == "bwd":
        return "few" if where in ("b4-d1-forward", "b16-d128-forward") else "none"
    return "all" if where in SEEDS else "few"


def proposals(*, where: str, **_: Any) -> list[Provider]:
    """Tiles of a chunk, by columns and by what a lane adds up on its own."""
    narrow = CASES[where][1] == 1
    configs = sweep.configs(
        ChunkCumsumDecayConfig,
        block_n=(128,),
        block_c=(16,) if narrow else (16, 32, 64),
        num_chunks=(1, 2) if narrow else (1,),
        num_steps=(2, 4, 8, 16) if narrow else (8, 16, 32),
        num_warps=(1, 2, 4),
    )
    made = (partial(kernel, config=config) for config in (None, *configs))
    names = map(sweep.label, (None, *configs))
    return [provider(name, call, "", kernel=True) for name, call in zip(names, made, strict=True)]


BENCHMARK = Benchmark(
    op="chunk_cumsum_decay",
    case=case,
    providers=(
        provider("pallas", kernel, "the default: chosen by shape", kernel=True),
        provider("jnp", reference.chunk_cumsum_decay, "the reference, eager", **EAGER),
        provider("jit", reference.chunk_cumsum_decay, "the reference, jitted"),
        *PEERS,
    ),
    x="n",
    grid={"where": tuple(CASES), "n": [2**k for k in range(10, 16)]},
    quick={"where": ("b4-d1-forward", "b16-d128-forward", "b16-d128-reverse"), "n": (1024, 32768)},
    small={"where": ("b4-d1-forward", "b4-d1-reverse"), "n": (64, 200)},
    sizes=sizes,
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
