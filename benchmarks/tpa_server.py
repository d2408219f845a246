"""Decoding steps of examples/tpa_server.py at T6's size: `python -m benchmarks.tpa_server`

12 layers of width 768, 34 heads of 64 features, ranks 6 and 2, pages of 64 tokens; all requests
have the same number of cached tokens. On a CPU a small model runs, and only the wall clock is read.
"""

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from benchmarks import suite, timing

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "examples"))

from tpa_decoder import Model
from tpa_server import read

_BATCHES = flags.DEFINE_list("batch", None, "requests at once; by default 1 to 128")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "cached tokens of a request")
_OUT = flags.DEFINE_string("out", None, "file for JSON")

PAGE, STEPS = 64, 20
SIZE = dict(vocabulary=50_304, width=768, layers=12, heads=34, dim=64)
SMALL = dict(vocabulary=64, width=32, layers=2)


def measure(model: Model, *, batch: int, tokens: int) -> dict[str, Any]:
    """Medians of a step that appends a token to each request and reads all that it has."""
    pages = -(-(tokens + 1) // PAGE)
    caches = model.empty_cache(batch * pages, PAGE, jnp.bfloat16)
    table = np.random.default_rng(0).permutation(batch * pages).reshape(batch, pages)
    given = jnp.full(batch, tokens, jnp.int32), jnp.asarray(table, jnp.int32)
    last = jnp.zeros((batch, 1), jnp.int32)

    def step() -> float:
        nonlocal caches
        start = time.perf_counter()
        after, _, caches = read(model, last, caches, *given)
        jax.block_until_ready((after, caches))
        return 1e3 * (time.perf_counter() - start)

    for _ in range(timing.WARM_UP):
        step()
    wall_ms = statistics.median(step() for _ in range(STEPS))
    row = dict(batch=batch, tokens=tokens, wall_ms=wall_ms, tokens_per_s=1e3 * batch / wall_ms)
    if timing.on_gpu():
        with timing.cupti() as kernels:
            for _ in range(STEPS):
                step()
        total = sum(ms for _, ms in kernels)
        ours = sum(ms for name, ms in kernels if name.startswith("pallas_ops"))
        row |= dict(kernel_ms=total / STEPS, share_of_tpa_decode=ours / total)
    return row


def main(_: Sequence[str]) -> None:
    size: Any = SIZE if timing.on_gpu() else SMALL
    model = Model(**size, rngs=nnx.Rngs(0))
    batches = _BATCHES.value or ((1, 8, 32, 128) if timing.on_gpu() else (2,))
    rows = []
    for batch in map(int, batches):
        rows.append(measure(model, batch=batch, tokens=_TOKENS.value))
        print(", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items()), flush=True)
    if _OUT.value:
        about = dict(card=suite.card(), jax=jax.__version__, date=time.strftime("%Y-%m-%d"))
        pathlib.Path(_OUT.value).write_text(json.dumps(about | dict(model=size, rows=rows)))


if __name__ == "__main__":
    app.run(main)
