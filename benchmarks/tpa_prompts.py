"""TPA of many queries: prompts, drafts and training. `python -m benchmarks.tpa_prompts --help`

The queries are the last n of m tokens, and attention is causal. Products take the time here, so
how near a time comes to a copy's says little, and `python -m benchmarks` leaves these tables out.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command, timing
from benchmarks.cases import Benchmark, Case, Function, Provider, implementation
from benchmarks.tpa_models import MODELS
from pallas_ops import reference, tpa_decode

MOST = 2**22  # queries times tokens, whose scores the reference must hold


def case(dtype: Any, *, model: str, m: int, n: int) -> Case:
    x = MODELS[model]
    ranks = () if x.ranks is None else (x.ranks,)
    struct: Any = jax.ShapeDtypeStruct
    heads, features = struct((1, m, *ranks, x.heads), dtype), struct((1, m, *ranks, x.dim), dtype)
    query = struct((1, n, x.heads, x.rank), dtype), struct((1, n, x.rank, x.dim), dtype)
    return Case(
        title=f"tpa_prompts-{{metric}}-{{mode}}-m{m}-{x.title}-{{dtype}}",
        inputs=(query[0], heads, heads, query[1], features, features),
        reference=reference.tpa_decode,
    )


def attend(aq: Any, ak: Any, av: Any, bq: Any, bk: Any, bv: Any) -> jax.Array:
    """jax.nn.dot_product_attention on q, k and v that are formed first; on a GPU cuDNN's."""
    form = "bmrh,bmrd->bmhd" if ak.ndim == 4 else "bmh,bmd->bmhd"
    ranks = ak.shape[2] if ak.ndim == 4 else 1
    q = jnp.einsum("bnhr,bnrd->bnhd", aq, bq) / bq.shape[2]
    k, v = (jnp.einsum(form, *pair) / ranks for pair in ((ak, bk), (av, bv)))
    n, m = q.shape[1], k.shape[1]
    mask = None if n == m else jnp.tri(n, m, m - n, dtype=bool)[None, None]
    options: dict[str, Any] = dict(mask=mask, is_causal=mask is None)
    if timing.on_gpu():
        options["implementation"] = "cudnn"
    else:  # XLA's form has a gradient of 16 bits only where dtypes may mix
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    out: jax.Array = jax.nn.dot_product_attention(q, k, v, **options)
    return out.astype(aq.dtype)


def provider(name: str, call: Function, note: str, **options: Any) -> Provider:
    return Provider(name=name, make=lambda **_: call, note=note, **options)


def kernel(name: str, precision: Any, note: str, **options: Any) -> Provider:
    def make(**_: Any) -> Function:
        return partial(tpa_decode, implementation=implementation(), precision=precision)

    return Provider(name=name, make=make, note=note, kernel=True, **options)


BENCHMARK = Benchmark(
    op="tpa_prompts",
    case=case,
    providers=(
        kernel("pallas", None, "the default: exact"),
        kernel("rounded", "default", 'less precise: precision="default"', tolerance=16),
        provider("jit", reference.tpa_decode, "the reference, jitted"),
        provider("sdpa", attend, "jax.nn.dot_product_attention; q, k, v rounded", tolerance=16),
    ),
    x="n",
    grid={"model": ("t6-34", "seed"), "m": (512, 8192, 65536), "n": (4, 16, 64, 512)},
    quick={"model": ("t6-34",), "m": (512, 8192), "n": (16, 512)},
    small={"model": ("t6-34",), "m": (32,), "n": (4, 32)},
    modes=("fwd", "bwd"),
    has=lambda *, m, n, **_: n <= m and n * m <= MOST,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
