"""Random calls of tpa_decode."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_ops import TpaDecodeConfig
from tests import tpa_decode
from tests.fuzz.calls import (
    MODEST,
    Call,
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
from tests.fuzz.refused import NOT_AXIS_NAMES, NOT_FLAGS, NOT_INTEGERS, NOT_SCALES, SCALES, each
from tests.support import TOLERANCES, to_float64

CACHE = ("ak", "av", "bk", "bv")
FACTORS = dict(aq="bnhr", ak="bmjh", av="bmkh", bq="bnrd", bk="bmjd", bv="bmke")


def _form(rng: Rng) -> Form:
    sizes = dict(b=pick(rng, 1, 2, 3), n=pick(rng, 1, 1, 2, 3), m=pick(rng, 1, 2, 15, 33, 64, 100))
    sizes |= dict(h=pick(rng, 1, 2, 5, 17), r=pick(rng, 1, 2, 3, 6), d=pick(rng, 1, 4, 16, 24))
    sizes |= dict(e=pick(rng, 1, 5, 16), j=pick(rng, 0, 0, 1, 2), k=pick(rng, 0, 0, 1, 3))
    without = {letter for letter in "jk" if not sizes[letter]}
    if rng.random() < 0.06:
        sizes[pick(rng, *"bnmhe")] = 0
    cache, narrow = random_dtype(rng), pick(rng, *[None] * 4, "int8", "float8_e4m3fn")
    if narrow is not None:  # kernels load two features at once
        sizes |= {letter: sizes[letter] + sizes[letter] % 2 for letter in "de"}
    pages = pick(rng, *[None] * 3, 1, 2, 5)
    if pages is not None:  # `m` tokens each, some for nobody
        sizes |= dict(p=pick(rng, 1, 3, 7), m=pick(rng, 1, 7, 16, 32))
    query = pick(rng, cache, cache, "float32") if cache.endswith("16") else cache
    arguments: dict[str, Any] = {}
    for name, letters in FACTORS.items():
        paged = pages is not None and name in CACHE
        axes = ("p" if paged and x == "b" else x for x in letters if x not in without)
        shape = tuple(sizes[x] for x in axes)
        dtype = narrow if narrow is not None and name in ("bk", "bv") else cache
        arguments[name] = Operand(shape, dtype if name in CACHE else query)
    if rng.random() < 0.25:
        shape = tuple(sizes[letter] for letter in "bnhd")
        arguments |= dict(aq=Operand(shape, query), bq=None)
    dtype = pick(rng, "int32", "int32", "int16", "uint32", "int64")
    lengths = Operand(pick(rng, (), (sizes["b"],)), dtype)
    length = int(rng.integers(-1, sizes["m"] * (pages or 1) + 2))
    arguments["lengths"] = pick(rng, None if pages is None else length, lengths, lengths, length)
    if pages is not None:
        dtype = pick(rng, "int32", "int16", "uint32", "int64")
        arguments["page_table"] = Operand((sizes["b"], pages), dtype)
    arguments["window"] = pick(rng, *[None] * 3, 1, 20, np.int64(70), 10**30)
    arguments["precision"] = pick(rng, None, None, "highest")
    arguments["batch_invariant"] = pick(rng, *[None] * 4, True, np.True_)
    for name in SCALES:
        array = Operand((), pick(rng, "float32", "bfloat16"))
        arguments[name] = pick(rng, *[None] * 6, 0, 0.3, -1, np.float32(0.5), array)
    return pick(rng, "tpa_decode", "tpa_decode_with_lse"), *split(arguments)


def _tokens(x: Any, table: Any) -> Any:
    """Pages [P, size, ..] as the rows have them: [B, M, ..]."""
    rows = x[np.clip(table.astype(object), 0, len(x) - 1).astype(int)]
    return rows.reshape(len(rows), math.prod(rows.shape[1:3]), *x.shape[2:])


def _truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
    values = values | {name: to_float64(values[name]) for name in ("bk", "bv")}
    given: Values = dict(s.static) | values
    aq, *cache = (to_float64(values[name]) for name in FACTORS if name != "bq")
    bq = to_float64(values["bq"]) if "bq" in values else None
    ak, av, bk, bv = (
        (_tokens(x, given["page_table"]) for x in cache) if "page_table" in given else cache
    )
    lengths: Any = given.get("lengths", ak.shape[1])
    lengths = np.broadcast_to(lengths, ak.shape[:1])
    for x in (ak, av, bk, bv):
        x[np.arange(ak.shape[1])[None] >= lengths[:, None]] = 0  # unread by the loop
    ranks = [1 if x.ndim == 3 else x.shape[2] for x in (bk, bv)]
    ranks = [1 if bq is None else bq.shape[2], *ranks]
    usual = dict(zip(SCALES, (bk.shape[-1] ** -0.5, *(1 / r for r in ranks)), strict=True))
    scale, scale_q, scale_k, scale_v = (float(given.get(k, v)) / v for k, v in usual.items())
    xs = (aq * scale * scale_q * scale_k, ak, av * scale_v, bq, bk, bv)
    loop: Any = tpa_decode.loop
    out, lse = loop(xs, lengths, given.get("window"))
    score, value = _largest_sums(*xs)
    size, dtypes = value * (1 + score), {k: x.dtype for k, x in s.operands}
    if dtypes["ak"] == "bfloat16" != dtypes["bk"]:  # weights and partial results are rounded to it
        tolerance = TOLERANCES[jnp.dtype(jnp.bfloat16)]
        size += value * tolerance.rounding / tolerance.relative
    outs = [Near(out, size), Near(lse, 1 + score)][: 1 + s.op.endswith("lse")]
    if not s.has_gradient:
        return outs, []
    do, dlse = [*(abs(w).max(initial=0) for w in weights), 0.0][:2]
    dscore, grads = 2 * do * out.shape[-1] * value + dlse, []
    for i, (want, repeated) in zip(s.differentiable, _gradients(s, values, weights), strict=True):
        x = abs(np.nan_to_num(to_float64(values[s.operands[i][0]]), posinf=0, neginf=0))
        summed = dscore * score + do * value * (s.operands[i][0] == "scale_v")
        size = abs(want).max(initial=0) + summed / x.max(initial=1e-9)
        grads.append(Near(want, size * (1 + score) + repeated))
    return outs, grads


def _gradients(
    s: Signature, values: Values, weights: tuple[Float64, ...]
) -> Iterator[tuple[Float64, Any]]:
    """Those of the reference, and what the roundings of each token's part are in units of scale.

    Where there are pages, each row's own cache has a gradient, which is added to the pool's.
    """
    if "page_table" not in values:
        yield from ((want, 0.0) for want in reference_gradients(s, values, weights))
        return
    table = values["page_table"]
    operands = tuple((k, x) for k, x in s.operands if k != "page_table")
    contiguous = {k: _tokens(values[k], table) if k in CACHE else values[k] for k, _ in operands}
    wants = reference_gradients(dataclasses.replace(s, operands=operands), contiguous, weights)
    for i, want in zip(s.differentiable, wants, strict=True):
        name, x = s.operands[i]
        if name not in CACHE:
            yield want, 0.0
            continue
        pages = _tokens(np.arange(x.shape[0]), table)  # [B, pages]
        parts = want.reshape(*pages.shape, *x.shape[1:])
        total, size = np.zeros(x.shape), np.zeros(x.shape)
        np.add.at(total, pages, parts)
        np.add.at(size, pages, abs(parts))
        tolerance = TOLERANCES[jnp.dtype(x.dtype)]
        yield total, size * tolerance.rounding / tolerance.relative


def _largest_sums(*xs: Float64 | None) -> tuple[float, float]:
    """The largest sums of magnitudes that make a score, and a number of v."""
    magnitudes: Any = (x if x is None else np.nan_to_num(abs(x)) for x in xs)
    aq, ak, av, bq, bk, bv = magnitudes
    ak, av, bk, bv = (x[:, :, None] if x.ndim == 3 else x for x in (ak, av, bk, bv))
    q = aq if bq is None else np.einsum("bnhr,bnrd->bnhd", aq, bq) / bq.shape[2]
    k = np.einsum("bmkh,bmkd->bmhd", ak, bk) / ak.shape[2]
    v = np.einsum("bmkh,bmke->bmhe", av, bv) / av.shape[2]
    score = np.einsum("bnhd,bmhd->bnhm", q, k) * bk.shape[-1] ** -0.5
    return float(score.max(initial=0)), float(v.max(initial=0))


def spoilt(rng: Rng, call: Call, values: Values) -> Values:
    """The cache with something where no key is that counts, or with a NaN anywhere."""
    operands, shared = dict(call.signature.operands), (*CACHE, "lengths", "page_table")
    cache = [name for name in CACHE if operands[name].is_floating]
    axes = [operands[name].axis for name in shared if name in operands]
    if call.signature.batch is None or None not in axes:
        for name in cache:
            values[name][~_counting(call, values)] = rng.choice(call.specials)
    rows = operands["bk"].shape[:2]
    if operands["aq"].shape[1] == 1 and not call.signature.has_gradient and 0 not in rows:
        values[pick(rng, *cache)][tuple(map(rng.integers, rows))] = np.nan
    return values


def _counting(call: Call, values: Values) -> Any:
    """[B, M], or [P, size] of pages: which keys are within the length of a row."""
    shape = dict(call.signature.operands)["bk"].shape[:2]
    table = values.get("page_table")
    places = np.arange(np.prod(shape)).reshape(shape)
    places = places if table is None or not places.size else _tokens(places, table)
    lengths = values.get("lengths", dict(call.signature.static).get("lengths", places.shape[1]))
    lengths = np.broadcast_to(lengths, len(places))[:, None]
    counting = places[np.arange(places.shape[1])[None] < lengths]
    return np.isin(np.arange(np.prod(shape)), counting).reshape(shape)


def _refused(form: Form) -> Iterator[dict[str, Any]]:
    _, operands, _ = form
    for name in filter(operands.__contains__, FACTORS):
        x = operands[name]
        other = "float16" if "bfloat16" in (x.dtype, operands["ak"].dtype) else "bfloat16"
        yield {name: x._replace(dtype=other if other != x.dtype else "float64")}
        shapes = [(*x.shape, 1), x.shape[1:], (*x.shape, 1, 1), ()]
        others = [i for i in range(len(x.shape)) if (name, i) != ("bv", len(x.shape) - 1)]
        if name == "aq" and "bq" not in operands:
            others.remove(1)  # of any number of queries
        shapes += [tuple(y + (i == j) for j, y in enumerate(x.shape)) for i in others]
        yield from each(**{name: tuple(x._replace(shape=shape) for shape in shapes)})
    b = operands["aq"].shape[0]
    lengths = (Operand((b + 1,), "int32"), Operand((b, 1), "int32"), 1.0, Operand((b,), "float32"))
    yield from each(lengths=(*lengths, "all", True, [0.5]), axis_name=NOT_AXIS_NAMES)
    if "page_table" in operands:
        _, pages = operands["page_table"].shape
        tables = (Operand(shape, "int32") for shape in ((b + 1, pages), (b,), (b, pages, 1), ()))
        yield from each(page_table=(*tables, 1.0, [[0.5]], True), lengths=(None,))
        yield dict(axis_name="x")
    windows = tuple(x for x in NOT_INTEGERS if x is not None)
    yield from each(window=(*windows, 0, -1), batch_invariant=NOT_FLAGS)
    yield from each(precision=("exact", "HIGHEST", 1, True))
    yield from each(**dict.fromkeys(SCALES, NOT_SCALES))


OP = FuzzedOp(
    form=_form,
    truth=_truth,
    terms=256,
    kinds=MODEST,
    refused=_refused,
    config=TpaDecodeConfig,
    launches=dict(block_h=(1, 2, 5), block_n=(1, 2), block_m=(16, 32), num_splits=(1, 3, 7)),
)
