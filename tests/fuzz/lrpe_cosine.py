"""Random calls of lrpe_cosine and md_lrpe_cosine."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pallas_ops import LrpeCosineConfig
from tests.fuzz.calls import (
    EVERYTHING,
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
    split,
)
from tests.fuzz.check import reference_gradients
from tests.fuzz.refused import NOT_INTEGERS, NOT_NAMES, each
from tests.support import to_float64
from tests.test_lrpe_cosine import loop


def _x_and_layout(rng: Rng, n: int) -> tuple[Operand, str, dict[str, int]]:
    layout = pick(rng, "BNHD", "BHND")
    sizes = dict(B=pick(rng, 1, 2, 3), N=n, H=pick(rng, 1, 2, 3), D=pick(rng, 1, 2, 3, 8, 17))
    if rng.random() < 0.05:
        sizes[pick(rng, *"BNHD")] = 0
    return Operand(tuple(sizes[y] for y in layout), random_dtype(rng)), layout, sizes


def _activation(rng: Rng, x: Operand, layout: str) -> dict[str, Any]:
    act = pick(rng, "none", "relu", "sigmoid", "silu", "softmax", "softmax")
    rank, sequence = len(x.shape), layout.index("N")
    axis = pick(rng, rank - 1, -1, sequence, sequence - rank)
    return dict(layout=layout, act=act, axis=axis if act == "softmax" else None)


def _form(rng: Rng) -> Form:
    x, layout, sizes = _x_and_layout(rng, pick(rng, 1, 2, 5, 16, 33, 64))
    b, n, h, d = sizes.values()
    if layout == "BNHD" and rng.random() < 0.2:
        x, h = x._replace(shape=(b, n, d)), 1
    width = pick(rng, 1, max(1, d), (d + 1) // 2 or 1)
    theta = Operand((pick(rng, 1, h), width), pick(rng, "float32", "bfloat16"))
    places = [
        dict(),
        dict(offset=pick(rng, 0, -3, np.int64(1000), 2**23)),
        dict(offset=Operand(pick(rng, (), (b,)), pick(rng, "int32", "int8", "uint16"))),
        dict(positions=Operand(pick(rng, (n,), (b, n)), pick(rng, "int32", "int16", "float32"))),
    ]
    arguments = dict(x=x, theta=theta) | pick(rng, *places) | _activation(rng, x, layout)
    return "lrpe_cosine", *split(arguments)


def _md_form(rng: Rng) -> Form:
    shape = tuple(pick(rng, 1, 2, 3, 5) for _ in range(rng.integers(1, 4)))
    prefix, k = pick(rng, 0, 0, 1, 3), len(shape)
    x, layout, sizes = _x_and_layout(rng, prefix + math.prod(shape))
    b, n, h, d = sizes.values()
    width = pick(rng, 1, max(1, d)) if k == 1 else max(1, -(-d // k)) + pick(rng, 0, 0, 2)
    theta = Operand((pick(rng, 1, h), width), pick(rng, "float32", "bfloat16"))
    positions = Operand(pick(rng, (n, k), (b, n, k)), pick(rng, "int32", "float32"))
    if n and rng.random() < 0.7:
        arguments = dict(x=x, theta=theta, shape=shape, num_prefix_tokens=prefix)
    else:
        arguments = dict(x=x, theta=theta, positions=positions, shape=None)
        arguments["num_prefix_tokens"] = min(prefix, n)
    return "md_lrpe_cosine", *split(arguments | _activation(rng, x, layout))


def _places(s: Signature, values: Values, b: int, n: int) -> Float64:
    """Positions [B, N, K]."""
    static = dict(s.static)
    places: Any
    if "positions" in values:
        places = to_float64(values["positions"])
        places = places if s.op.startswith("md") else places[..., None]
    elif "shape" in static:
        indices = np.unravel_index(np.arange(math.prod(static["shape"])), static["shape"])
        places = np.pad(np.stack(indices, 1), ((static["num_prefix_tokens"], 0), (0, 0)))
    else:
        offset = np.reshape(values.get("offset", static.get("offset", 0)), (-1, 1)).astype(int)
        places = (offset + np.arange(n))[..., None]
    prefix = np.arange(n) < static.get("num_prefix_tokens", 0)
    return np.broadcast_to(np.where(prefix[:, None], 0.0, places), (b, n, places.shape[-1]))


def _truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
    static = dict(s.static)
    x, theta = to_float64(values["x"]), to_float64(values["theta"])
    shape = (*x.shape[:-1], 2 * x.shape[-1])
    if not x.size:
        zeros = [Near(np.zeros(y.shape), 1.0) for y in values.values()]
        return [Near(np.zeros(shape), 1.0)], [zeros[i] for i in s.differentiable]
    layout, act, axis = static["layout"], static["act"], static.get("axis")
    axis = None if axis is None else -1 if axis in (-1, x.ndim - 1) else layout.index("N")
    x = x if x.ndim == 4 else x[:, :, None]
    d, n = x.shape[-1], x.shape[layout.index("N")]
    places = _places(s, values, len(x), n)
    still = np.zeros((len(x), n))
    a = loop(x, np.zeros((1, 1)), still, layout=layout, act=act, axis=axis)[..., :d]
    k = places.shape[-1]
    width = d if k == 1 else theta.shape[1]
    turned = [
        loop(a[..., i * width : (i + 1) * width], theta, places[..., i], layout=layout)
        for i in range(k)
    ]
    halves = [half for y in turned for half in np.split(y, 2, axis=-1)]
    out = np.concatenate(halves[::2] + halves[1::2], axis=-1)
    # In float64, a phase has the error of a product.
    turns = 1 + abs(places).max() / 1024 if values["x"].dtype == np.float64 else 1
    size = turns * np.concatenate([abs(a), abs(a)], axis=-1)
    outs = [Near(out.reshape(shape), size.reshape(shape))]
    if not s.has_gradient:
        return outs, []
    (do,) = weights
    wants = reference_gradients(s, values, weights)
    most = turns * abs(do).max()
    total = most * abs(a).sum() + most
    scales = {"x": 2 * most, "theta": abs(places).max() * total, "positions": 4 * total}
    names = [s.operands[i][0] for i in s.differentiable]
    return outs, [Near(want, scales[name]) for name, want in zip(names, wants, strict=True)]


def _refused(form: Form) -> Iterator[dict[str, Any]]:
    name, operands, static = form
    x, theta = operands["x"], operands["theta"]
    letters = static["layout"] if len(x.shape) == 4 else "BND"
    b, n, h, d = (dict(zip(letters, x.shape, strict=True)).get(letter, 1) for letter in "BNHD")
    yield from each(act=(*NOT_NAMES, None, "ReLU"), layout=(*NOT_NAMES, None, "NBHD"))
    heads = {4: (static["layout"].index("H"),)}.get(len(x.shape), ())
    for axis in (None, True, 1.5, "1", 9, -9, 0, *heads):
        yield dict(act="softmax", axis=axis)
    yield dict(act="relu", axis=1)
    yield from each(x=(x._replace(shape=(2, 3)), x._replace(shape=(*x.shape, 1, 1))))
    shapes = (h + 7, 1), (1,), (1, 1, 1), (1, 0)
    yield from each(theta=tuple(theta._replace(shape=shape) for shape in shapes))
    if name == "lrpe_cosine":
        yield dict(theta=theta._replace(shape=(1, max(1, d) + 1)))
        offsets = [Operand(shape, "int32") for shape in ((b + 2,), (b, 1), (1, b))]
        yield from each(offset=(1.0, "1", None, True, 1j, math.nan, 2**40, -(10**400), *offsets))
        yield dict(offset=1, positions=Operand((n,), "int32"))
        places: list[tuple[int, ...]] = [(n + 1,), (b + 1, n), (), (b, n, 1)]
    else:
        k = len(static["shape"] or ()) or operands["positions"].shape[-1]
        grids = ((), 5, "23", [1.5], (-1,), (True,), object(), {2, 3}, 10**400)
        yield from each(shape=grids, num_prefix_tokens=(*NOT_INTEGERS, -1))
        if static["shape"] and n:
            yield from each(shape=((*static["shape"], 2), None), num_prefix_tokens=(n + 1,))
        if -(-d // k) > 1 < k:
            yield dict(theta=theta._replace(shape=(1, -(-d // k) - 1)))
        places = [(n, k, 1, 1), (n + 1, k), (b + 1, n, k), (n,), ()]
    given = dict(offset=0) if name == "lrpe_cosine" else {}
    for shape in places:
        yield dict(positions=Operand(shape, "float32"), **given)


LAUNCHES = dict(variant=("block",), block_n=(1, 2, 8), block_d=(32,), cache_angles=(False, True))
LAUNCHES |= dict(num_parts=(1, 2, 3))
OP = FuzzedOp(
    form=_form,
    truth=_truth,
    terms=144,
    kinds=EVERYTHING,
    refused=_refused,
    config=LrpeCosineConfig,
    launches=LAUNCHES,
)
MD_OP = OP._replace(form=_md_form, kinds=FLOATS)
