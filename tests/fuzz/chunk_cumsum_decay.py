"""Random calls of chunk_cumsum_decay."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_ops import ChunkCumsumDecayConfig
from tests import chunk_cumsum_decay
from tests.fuzz.calls import (
    FLOATS,
    Float64,
    Form,
    FuzzedOp,
    Near,
    Operand,
    Rng,
    Signature,
    Truths,
    Values,
    pick,
    random_dtype,
    random_shape,
)
from tests.fuzz.refused import (
    NOT_DTYPES,
    NOT_FLAGS,
    NOT_INTEGERS,
    NOT_NAMES,
    NOT_SCALES,
    each,
    not_axes,
)
from tests.support import EPS32, to_float64


def _form(rng: Rng) -> Form:
    x = Operand(random_shape(rng), random_dtype(rng))
    axis = int(rng.integers(-len(x.shape), len(x.shape)))
    n = x.shape[axis]
    scale = pick(rng, None, None, Operand((), "float32"), Operand((), "bfloat16"))
    bounds = Operand((pick(rng, 1, 2, 4, 6),), pick(rng, "int32", "uint16"))
    operands = dict(x=x, scale=scale, cu_seqlens=pick(rng, None, None, bounds))
    static = dict(
        axis=axis,
        chunk_size=pick(rng, 1, 2, 3, 7, np.int32(16), 100, 128, max(1, n), n + 5, 10**9),
        reverse=pick(rng, False, True, np.True_),
        shift=pick(rng, None, "chunk", "sequence"),
        dtype=pick(rng, None, None, None, None, "bfloat16", "float16", "float32"),
        scale=None if scale else pick(rng, None, None, 0, -0.5, 3, np.float16(0.7)),
    )
    return "chunk_cumsum_decay", operands, static


def _truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
    static = dict(s.static)
    options: Any = {k: static.get(k) for k in ("axis", "chunk_size", "reverse", "shift")}
    x, factor = to_float64(values["x"]), to_float64(values.get("scale", static.get("scale", 1)))
    if "cu_seqlens" in values:
        options["bounds"] = list(itertools.accumulate(map(int, values["cu_seqlens"]), max))

    def sums(y: Float64, **transposed: Any) -> Float64:
        return chunk_cumsum_decay.sums(y, **options, **transposed) if y.size else y

    out = Near(sums(factor * x), sums(abs(factor * x)))
    if not s.has_gradient:
        return [out], []
    (do,) = weights
    dx, size = sums(do, transposed=True), sums(abs(do), transposed=True)
    grads = [Near(factor * dx, abs(factor) * size)]
    if "scale" in values:
        total = np.asarray((abs(do) * sums(abs(x))).sum())
        total += do.size * float(np.finfo(np.float32).tiny) / EPS32  # each product may become 0
        grads.append(Near(np.asarray((do * sums(x)).sum()), total))
    return [out], grads


def _refused(form: Form) -> Iterator[dict[str, Any]]:
    yield from each(axis=not_axes(form), chunk_size=(*NOT_INTEGERS, 0, -1), reverse=NOT_FLAGS)
    yield from each(shift=(*NOT_NAMES, "Chunk"), scale=NOT_SCALES, dtype=NOT_DTYPES)
    bounds = (Operand(shape, "int32") for shape in ((), (2, 2), (0,)))
    yield from each(cu_seqlens=(*bounds, [0.0, 2.0], True, "x", Operand((2,), "bool")))
    yield from each(x=(Operand((), "float32"), 1.0))


OP = FuzzedOp(
    form=_form,
    truth=_truth,
    terms=64,
    kinds=FLOATS,
    refused=_refused,
    config=ChunkCumsumDecayConfig,
    launches=dict(block_n=(2, 8, 32), block_c=(1, 8), num_chunks=(1, 4), num_steps=(1, 2)),
)
