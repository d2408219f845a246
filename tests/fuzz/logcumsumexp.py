"""Random calls of logcumsumexp."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_ops import LogcumsumexpConfig
from tests.fuzz.calls import (
    EVERYTHING,
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
    NOT_FLAGS,
    TRACED,
    each,
    not_axes,
)
from tests.logcumsumexp import loop
from tests.support import to_float64


def _form(rng: Rng) -> Form:
    x = Operand(random_shape(rng), random_dtype(rng))
    axis = int(rng.integers(-len(x.shape), len(x.shape)))
    state = [1 if rng.random() < 0.2 else size for size in x.shape]
    state[axis] = 1
    dtype = pick(rng, "float32", "bfloat16", "float16", x.dtype)
    initial = Operand(tuple(state[pick(rng, 0, 0, len(state), -1) :]), dtype)
    operands = dict(x=x, initial_state=pick(rng, None, initial))
    clip = pick(rng, None, None, None, None, 0, 0.5, np.float64(2), 1e30, math.inf)
    static = dict(axis=axis, reverse=pick(rng, False, True), clip=clip)
    return pick(rng, "logcumsumexp", "logcumsumexp_with_state"), operands, static


def _truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
    static = dict(s.static)
    axis, clip = static["axis"], static.get("clip", math.inf)
    x = to_float64(values["x"])
    shape = tuple(1 if i == axis % x.ndim else size for i, size in enumerate(x.shape))
    given = to_float64(values.get("initial_state", -np.inf))
    state = np.broadcast_to(given, shape)
    clipped = np.clip(x, -clip, clip), state
    if "initial_state" in values:
        clipped = clipped[0], np.clip(state, -clip, clip)
    do, dfinal = (*weights, np.zeros(shape))[:2] if weights else (x * 0, state * 0)
    arrays = (*clipped, do, dfinal)
    out, final, dx, dstate = loop(*arrays, axis=axis, reverse=static["reverse"])
    outs = [Near(out, 1.0), Near(final, 1.0)][: 1 + s.op.endswith("state")]
    if not s.has_gradient:
        return outs, []
    size = abs(do).sum(axis=axis, keepdims=True) + abs(dfinal)
    grads = [Near(np.where(abs(x) > clip, 0, dx), size)]
    if "initial_state" in values:
        if not x.shape[axis]:
            dstate = np.where(final == -np.inf, 0, dfinal * np.exp(clipped[1] - final))
        padded = np.reshape(given, (1,) * (x.ndim - given.ndim) + given.shape)
        axes = tuple(i for i in range(x.ndim) if padded.shape[i] == 1)
        dstate = np.where(abs(state) > clip, 0, dstate)
        want, total = (y.sum(axis=axes).reshape(given.shape) for y in (dstate, size + 0 * dstate))
        grads.append(Near(want, total))
    return outs, grads


def _refused(form: Form) -> Iterator[dict[str, Any]]:
    x, axis = form[1]["x"], form[2]["axis"]
    clips = (-1, math.nan, -math.inf, "1", True, [1.0], 1j, np.ones(2), 10**400, TRACED)
    yield from each(axis=not_axes(form), reverse=NOT_FLAGS, clip=clips)
    state = [1 if i == axis % len(x.shape) else size for i, size in enumerate(x.shape)]
    wrong = [tuple(y + 2 * (i == j) for j, y in enumerate(state)) for i in range(len(state))]
    yield from each(initial_state=tuple(Operand(y, "float32") for y in (*wrong, (1, *state))))
    yield from each(x=(Operand((), "float32"), 1.0))


OP = FuzzedOp(
    form=_form,
    truth=_truth,
    terms=100,
    kinds=EVERYTHING,
    refused=_refused,
    config=LogcumsumexpConfig,
    launches=dict(block_n=(1, 2, 4, 16, 64), block_c=(1, 2, 8), block_exact=(1, 4, 16))
    | dict(variant=("parallel", "parallel", "recurrence"), num_segments=(1, 2, 5)),
)
