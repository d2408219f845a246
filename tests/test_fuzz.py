"""Random calls of every op: valid ones against its loop in float64, invalid ones refused.

By default some 40 calls an op, of few signatures (`tests/fuzz.py`). PALLAS_OPS_FUZZ sets another
number of calls, PALLAS_OPS_FUZZ_SEED takes other signatures. The long run, on a CPU or a GPU:

    PALLAS_OPS_FUZZ=2000 python -m pytest tests/test_fuzz.py -n 16
"""

import functools
import itertools
import math
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import (
    ChunkCumsumDecayConfig,
    LogcumsumexpConfig,
    LrpeCosineConfig,
    TpaDecodeConfig,
)
from tests import chunk_cumsum_decay, logcumsumexp, tpa_decode
from tests.fuzz import (
    Call,
    Operand,
    Rng,
    Signature,
    Values,
    integers,
    numbers,
    pick,
    random_dtype,
    random_shape,
    transformed,
)
from tests.fuzz_check import Float64, Near, Truth, check, reference_gradients
from tests.support import TOLERANCES, kernel_implementation, to_float64
from tests.test_lrpe_cosine import loop as lrpe_cosine_loop

CALLS = int(os.environ.get("PALLAS_OPS_FUZZ", "40"))
SEED = int(os.environ.get("PALLAS_OPS_FUZZ_SEED", "0"))
BLOCKS = 16 if CALLS >= 400 else 2  # of an op's calls, each with signatures of its own
SIGNATURES = max(4, CALLS // BLOCKS // 18)  # of a block
KERNEL = kernel_implementation()
INTERPRETED = None if jax.default_backend() == "gpu" else "interpret"
IMPLEMENTATIONS = (KERNEL, None, "xla", None, KERNEL, "xla", INTERPRETED, None)
PHASES = (hypothesis.Phase.generate, hypothesis.Phase.shrink)

Form = tuple[str, dict[str, Operand], dict[str, Any]]  # name, arrays, static arguments
Truths = tuple[list[Near], list[Near]]


class FuzzedOp(NamedTuple):
    """How calls of an op are made, and what they are compared with."""

    form: Callable[[Rng], Form]  # where None stands for an argument that is not given
    truth: Truth
    terms: int
    kinds: tuple[str, ...]
    refused: Callable[[Form], Iterator[dict[str, Any]]]  # changes that make a call invalid
    config: Any
    launches: dict[str, tuple[Any, ...]]  # of which a config is made


# Signatures


def random_config(rng: Rng, op: FuzzedOp, form: Form) -> Any:
    _, operands, static = form
    choice = {name: pick(rng, *options) for name, options in op.launches.items()}
    choice |= dict(num_warps=pick(rng, 1, 2), num_stages=pick(rng, 1, 2, 3))
    if op.config is LrpeCosineConfig and static["act"] != "softmax" and rng.random() < 0.5:
        choice |= dict(variant="sequence", num_parts=1, num_stages=1)
    if op.config is ChunkCumsumDecayConfig and "cu_seqlens" not in operands:
        whole = static["chunk_size"] >= operands["x"].shape[static["axis"]]
        choice["num_segments"] = pick(rng, 1, 3) if whole else 1
    return op.config(**choice)


def random_form(rng: Rng, op: FuzzedOp) -> Form:
    name, operands, static = op.form(rng)
    operands, static = (
        {k: v for k, v in x.items() if v is not None or k in ("shape", "bq")}
        for x in (operands, static)
    )
    return name, operands, static


def takes_kernel(form: Form) -> bool:
    _, operands, static = form
    dtypes = {static.get("dtype"), *(x.dtype for x in operands.values())}
    return "float64" not in dtypes and all(0 not in x.shape for x in operands.values())


def random_signature(rng: Rng, op: FuzzedOp, implementation: Any) -> Signature:
    name, operands, static = form = random_form(rng, op)
    if not takes_kernel(form):
        implementation = pick(rng, None, "xla")
    if implementation is not None:
        static["implementation"] = implementation
    has_choice = implementation in ("triton", "interpret") and "batch_invariant" not in static
    if has_choice and rng.random() < 0.5:
        static["config"] = random_config(rng, op, form)
    return transformed(rng, Signature(name, tuple(operands.items()), tuple(static.items())))


# Numbers


def draw(rng: Rng, call: Call) -> Values:
    """Operands, as their names have it."""
    s = call.signature
    operands, static = dict(s.operands), dict(s.static)
    narrow = s.x64 or rng.random() < 0.3
    values: Values = {}
    for name, x in operands.items():
        if name == "cu_seqlens":
            values[name] = integers(rng, x, 0, operands["x"].shape[static["axis"]])
            values[name] = np.sort(values[name]) if rng.random() < 0.8 else values[name]
        elif name == "lengths":
            info, m = np.iinfo(x.dtype), operands["bk"].shape[1]
            odd = rng.choice(np.asarray([info.min, info.max], x.dtype), x.shape)
            values[name] = np.where(rng.random(x.shape) < 0.1, odd, integers(rng, x, -2, m + 2))
        elif not x.is_floating:  # positions and offsets; near 2**24 only float32 phases are exact
            values[name] = integers(rng, x, -100, 100 if narrow else 2**23)
        elif name in ("theta", "positions") or name.startswith("scale"):
            values[name] = rng.uniform(-2, 2, x.shape).astype(jnp.dtype(x.dtype))
        else:
            values[name] = _draw_numbers(rng, x, call)
    return _spoilt(rng, call, values) if "bk" in values and call.specials else values


def _draw_numbers(rng: Rng, x: Operand, call: Call) -> Any:
    """Such that neither sums overflow, nor gradients have infinite terms of either sign."""
    s, static = call.signature, dict(call.signature.static)
    is_logarithm, kind = s.op.startswith("log"), call.kind
    most = min(float(jnp.finfo(y).max) for y in (x.dtype, static.get("dtype", x.dtype)))
    most /= 4096 if s.op.startswith("chunk") else 1
    if s.op.startswith("tpa"):
        call = call._replace(specials=())
    if s.has_gradient:
        # The loop's float64 has to tell equal numbers from the logarithm of their sum.
        most = min(most, 1e16 * TOLERANCES[jnp.dtype(x.dtype)].relative if is_logarithm else 1e20)
        if not is_logarithm:
            call = call._replace(specials=tuple(filter(math.isnan, call.specials)))
        if kind == "tiny" and (static.get("act") == "relu" or static.get("clip") == 0):
            call = call._replace(kind="small")  # a step at 0, for which subnormals may be taken
    return numbers(rng, x, call, most)


def _spoilt(rng: Rng, call: Call, values: Values) -> Values:
    """The cache of tpa_decode with something beyond each length, or with a NaN anywhere."""
    operands = dict(call.signature.operands)
    b, m = operands["bk"].shape[:2]
    lengths = values.get("lengths", dict(call.signature.static).get("lengths", m))
    gone = np.arange(m)[None] >= np.broadcast_to(lengths, (b,))[:, None]
    axes = [operands[name].axis for name in (*CACHE, "lengths") if name in operands]
    if call.signature.batch is None or None not in axes:
        for name in CACHE:
            values[name][gone] = rng.choice(call.specials)
    if operands["aq"].shape[1] == 1 and not call.signature.has_gradient and b * m:
        values[pick(rng, *CACHE)][rng.integers(b), rng.integers(m)] = np.nan
    return values


# chunk_cumsum_decay


def _chunk_form(rng: Rng) -> Form:
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


def _chunk_truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
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
        grads.append(Near(np.asarray((do * sums(x)).sum()), total))
    return [out], grads


# logcumsumexp


def _logcumsumexp_form(rng: Rng) -> Form:
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


def _logcumsumexp_truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
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
    out, final, dx, dstate = logcumsumexp.loop(*arrays, axis=axis, reverse=static["reverse"])
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


# lrpe_cosine, md_lrpe_cosine


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


def _lrpe_form(rng: Rng) -> Form:
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
    return "lrpe_cosine", *_split(arguments)


def _md_lrpe_form(rng: Rng) -> Form:
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
        arguments["num_prefix_tokens"] = prefix
    return "md_lrpe_cosine", *_split(arguments | _activation(rng, x, layout))


def _split(arguments: dict[str, Any]) -> tuple[dict[str, Operand], dict[str, Any]]:
    """The arrays and the others."""
    operands = {k: v for k, v in arguments.items() if isinstance(v, Operand)}
    return operands, {k: v for k, v in arguments.items() if k not in operands}


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


def _lrpe_truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
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
    a = lrpe_cosine_loop(x, np.zeros((1, 1)), still, layout=layout, act=act, axis=axis)[..., :d]
    k = places.shape[-1]
    width = d if k == 1 else theta.shape[1]
    turned = [
        lrpe_cosine_loop(a[..., i * width : (i + 1) * width], theta, places[..., i], layout=layout)
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


# tpa_decode

CACHE = ("ak", "av", "bk", "bv")
FACTORS = dict(aq="bnhr", ak="bmjh", av="bmkh", bq="bnrd", bk="bmjd", bv="bmke")
SCALES = ("scale", "scale_q", "scale_k", "scale_v")


def _tpa_form(rng: Rng) -> Form:
    sizes = dict(b=pick(rng, 1, 2, 3), n=pick(rng, 1, 1, 2, 3), m=pick(rng, 1, 2, 15, 33, 64, 100))
    sizes |= dict(h=pick(rng, 1, 2, 5, 17), r=pick(rng, 1, 2, 3, 6), d=pick(rng, 1, 4, 16, 24))
    sizes |= dict(e=pick(rng, 1, 5, 16), j=pick(rng, 0, 0, 1, 2), k=pick(rng, 0, 0, 1, 3))
    without = {letter for letter in "jk" if not sizes[letter]}
    if rng.random() < 0.06:
        sizes[pick(rng, *"bnmhe")] = 0
    cache = random_dtype(rng)
    query = pick(rng, cache, cache, "float32") if cache.endswith("16") else cache
    arguments: dict[str, Any] = {}
    for name, letters in FACTORS.items():
        shape = tuple(sizes[letter] for letter in letters if letter not in without)
        arguments[name] = Operand(shape, cache if name in CACHE else query)
    if rng.random() < 0.25:
        shape = tuple(sizes[letter] for letter in "bnhd")
        arguments |= dict(aq=Operand(shape, query), bq=None)
    dtype = pick(rng, "int32", "int32", "int16", "uint32", "int64")
    lengths = Operand(pick(rng, (), (sizes["b"],)), dtype)
    arguments["lengths"] = pick(rng, None, lengths, lengths, int(rng.integers(-1, sizes["m"] + 2)))
    arguments["window"] = pick(rng, *[None] * 3, 1, 20, np.int64(70), 10**30)
    arguments["batch_invariant"] = pick(rng, *[None] * 4, True, np.True_)
    for name in SCALES:
        array = Operand((), pick(rng, "float32", "bfloat16"))
        arguments[name] = pick(rng, *[None] * 6, 0, 0.3, -1, np.float32(0.5), array)
    return pick(rng, "tpa_decode", "tpa_decode_with_lse"), *_split(arguments)


def _tpa_truth(s: Signature, values: Values, weights: tuple[Float64, ...]) -> Truths:
    given: Values = dict(s.static) | values
    aq, ak, av, bk, bv = (to_float64(values[name]) for name in FACTORS if name != "bq")
    bq = to_float64(values["bq"]) if "bq" in values else None
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
    outs = [Near(out, value * (1 + score)), Near(lse, 1 + score)][: 1 + s.op.endswith("lse")]
    if not s.has_gradient:
        return outs, []
    do, dlse = [*(abs(w).max(initial=0) for w in weights), 0.0][:2]
    dscore, grads = 2 * do * out.shape[-1] * value + dlse, []
    wants = reference_gradients(s, values, weights)
    for i, want in zip(s.differentiable, wants, strict=True):
        x = abs(np.nan_to_num(to_float64(values[s.operands[i][0]]), posinf=0, neginf=0))
        summed = dscore * score + do * value * (s.operands[i][0] == "scale_v")
        size = abs(want).max(initial=0) + summed / x.max(initial=1e-9)
        grads.append(Near(want, size * (1 + score)))
    return outs, grads


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


# What is refused

TRACED = Operand((), "int32")
NOT_INTEGERS = (1.0, "1", None, True, 1j, [1], np.ones(2), object(), math.nan, TRACED)
NOT_FLAGS = (1, 0, None, "yes", 0.0, [True], np.ones(2), TRACED)
NOT_NAMES = ("", "X", 1, True, b"none", ["none"], np.ones(2), object(), 10**400, TRACED)
NOT_SCALES = ("1", math.inf, math.nan, 10**400, 1j, True, [1.0], np.ones(2), np.array(3), object())
NOT_ARRAYS: Any = (object(), {}, "x", [[1.0], [1.0, 2.0]], len, 10**400, np.array(["a"]), {1.0})
NOT_DTYPES: Any = ("int8", "float99", int, 3, "complex64", "float8_e4m3fn", object(), [], {}, "f,f")
NOT_AXIS_NAMES = (0, "nowhere", True, ["x"])
OPTIONAL = ("bq", "initial_state", "cu_seqlens", "positions", "lengths", *SCALES)


def _each(**values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for name, options in values.items():
        yield from ({name: value} for value in options)


def _refused(op: FuzzedOp, form: Form) -> Iterator[dict[str, Any]]:
    """What all ops refuse, and what this one does."""
    _, operands, _ = form
    for name, x in operands.items():
        other = "int32" if x.is_floating else "float32"
        dtypes = ("bool", "complex64") if name == "positions" else (other, "bool", "complex64")
        arrays = (x._replace(dtype=dtype) for dtype in dtypes)
        wrong = NOT_SCALES if name in SCALES else (*NOT_ARRAYS, *arrays)
        yield from _each(**{name: wrong if name in OPTIONAL else (*wrong, None)})
    yield from _each(implementation=NOT_NAMES, config=(3, "fast", {}, [1]))
    configs = LrpeCosineConfig(), TpaDecodeConfig(block_h=1), ChunkCumsumDecayConfig(block_n=8)
    yield from ({"config": config} for config in configs if not isinstance(config, op.config))
    config = op.config(**{name: options[0] for name, options in op.launches.items()})
    yield dict(config=config, implementation="xla")
    if not takes_kernel(form):
        yield from _each(implementation=("triton", "interpret"))
    yield from op.refused(form)


def _axes(form: Form) -> tuple[Any, ...]:
    rank = len(form[1]["x"].shape)
    return (*NOT_INTEGERS, rank, -rank - 1, 10**30)


def _chunk_refused(form: Form) -> Iterator[dict[str, Any]]:
    yield from _each(axis=_axes(form), chunk_size=(*NOT_INTEGERS, 0, -1), reverse=NOT_FLAGS)
    yield from _each(shift=(*NOT_NAMES, "Chunk"), scale=NOT_SCALES, dtype=NOT_DTYPES)
    bounds = (Operand(shape, "int32") for shape in ((), (2, 2), (0,)))
    yield from _each(cu_seqlens=(*bounds, [0.0, 2.0], True, "x", Operand((2,), "bool")))
    yield from _each(x=(Operand((), "float32"), 1.0))


def _logcumsumexp_refused(form: Form) -> Iterator[dict[str, Any]]:
    x, axis = form[1]["x"], form[2]["axis"]
    clips = (-1, math.nan, -math.inf, "1", True, [1.0], 1j, np.ones(2), 10**400, TRACED)
    yield from _each(axis=_axes(form), reverse=NOT_FLAGS, clip=clips)
    state = [1 if i == axis % len(x.shape) else size for i, size in enumerate(x.shape)]
    wrong = [tuple(y + 2 * (i == j) for j, y in enumerate(state)) for i in range(len(state))]
    yield from _each(initial_state=tuple(Operand(y, "float32") for y in (*wrong, (1, *state))))
    yield from _each(x=(Operand((), "float32"), 1.0))


def _lrpe_refused(form: Form) -> Iterator[dict[str, Any]]:
    name, operands, static = form
    x, theta = operands["x"], operands["theta"]
    letters = static["layout"] if len(x.shape) == 4 else "BND"
    b, n, h, d = (dict(zip(letters, x.shape, strict=True)).get(letter, 1) for letter in "BNHD")
    yield from _each(act=(*NOT_NAMES, None, "ReLU"), layout=(*NOT_NAMES, None, "NBHD"))
    heads = {4: (static["layout"].index("H"),)}.get(len(x.shape), ())
    for axis in (None, True, 1.5, "1", 9, -9, 0, *heads):
        yield dict(act="softmax", axis=axis)
    yield dict(act="relu", axis=1)
    yield from _each(x=(x._replace(shape=(2, 3)), x._replace(shape=(*x.shape, 1, 1))))
    shapes = (h + 7, 1), (1,), (1, 1, 1), (1, 0)
    yield from _each(theta=tuple(theta._replace(shape=shape) for shape in shapes))
    if name == "lrpe_cosine":
        yield dict(theta=theta._replace(shape=(1, max(1, d) + 1)))
        offsets = [Operand(shape, "int32") for shape in ((b + 2,), (b, 1), (1, b))]
        yield from _each(offset=(1.0, "1", None, True, 1j, math.nan, 2**40, -(10**400), *offsets))
        yield dict(offset=1, positions=Operand((n,), "int32"))
        places: list[tuple[int, ...]] = [(n + 1,), (b + 1, n), (), (b, n, 1)]
    else:
        k = len(static["shape"] or ()) or operands["positions"].shape[-1]
        grids = ((), 5, "23", [1.5], (-1,), (True,), object(), {2, 3}, 10**400)
        yield from _each(shape=grids, num_prefix_tokens=(*NOT_INTEGERS, -1))
        if static["shape"] and n:
            yield from _each(shape=((*static["shape"], 2), None), num_prefix_tokens=(n + 1,))
        if -(-d // k) > 1 < k:
            yield dict(theta=theta._replace(shape=(1, -(-d // k) - 1)))
        places = [(n, k, 1, 1), (n + 1, k), (b + 1, n, k), (n,), ()]
    given = dict(offset=0) if name == "lrpe_cosine" else {}
    for shape in places:
        yield dict(positions=Operand(shape, "float32"), **given)


def _tpa_refused(form: Form) -> Iterator[dict[str, Any]]:
    _, operands, _ = form
    for name in filter(operands.__contains__, FACTORS):
        x = operands[name]
        other = "float16" if "bfloat16" in (x.dtype, operands["bk"].dtype) else "bfloat16"
        yield {name: x._replace(dtype=other if other != x.dtype else "float64")}
        shapes = [(*x.shape, 1), x.shape[1:], (*x.shape, 1, 1), ()]
        others = [i for i in range(len(x.shape)) if (name, i) != ("bv", len(x.shape) - 1)]
        if name == "aq" and "bq" not in operands:
            others.remove(1)  # of any number of queries
        shapes += [tuple(y + (i == j) for j, y in enumerate(x.shape)) for i in others]
        yield from _each(**{name: tuple(x._replace(shape=shape) for shape in shapes)})
    b = operands["bk"].shape[0]
    lengths = (Operand((b + 1,), "int32"), Operand((b, 1), "int32"), 1.0, Operand((b,), "float32"))
    yield from _each(lengths=(*lengths, "all", True, [0.5]), axis_name=NOT_AXIS_NAMES)
    windows = tuple(x for x in NOT_INTEGERS if x is not None)
    yield from _each(window=(*windows, 0, -1), batch_invariant=NOT_FLAGS)
    yield from _each(**dict.fromkeys(SCALES, NOT_SCALES))


FLOATS = ("normal", "zeros", "tiny", "wide")
EVERYTHING = (*FLOATS, "extreme", "rising", "falling", "stairs")
MODEST = ("normal", "zeros", "small", "large")
LRPE = dict(variant=("block",), block_n=(1, 2, 8), block_d=(32,), cache_angles=(False, True))
LRPE |= dict(num_parts=(1, 2, 3))
OPS = {
    "chunk_cumsum_decay": FuzzedOp(
        form=_chunk_form,
        truth=_chunk_truth,
        terms=64,
        kinds=FLOATS,
        refused=_chunk_refused,
        config=ChunkCumsumDecayConfig,
        launches=dict(block_n=(2, 8, 32), block_c=(1, 8), num_chunks=(1, 4), num_steps=(1, 2)),
    ),
    "logcumsumexp": FuzzedOp(
        form=_logcumsumexp_form,
        truth=_logcumsumexp_truth,
        terms=100,
        kinds=EVERYTHING,
        refused=_logcumsumexp_refused,
        config=LogcumsumexpConfig,
        launches=dict(block_n=(1, 2, 4, 16, 64), block_c=(1, 2, 8), block_exact=(1, 4, 16))
        | dict(variant=("parallel", "parallel", "recurrence"), num_segments=(1, 2, 5)),
    ),
    "lrpe_cosine": FuzzedOp(
        form=_lrpe_form,
        truth=_lrpe_truth,
        terms=144,
        kinds=EVERYTHING,
        refused=_lrpe_refused,
        config=LrpeCosineConfig,
        launches=LRPE,
    ),
    "md_lrpe_cosine": FuzzedOp(
        form=_md_lrpe_form,
        truth=_lrpe_truth,
        terms=144,
        kinds=FLOATS,
        refused=_lrpe_refused,
        config=LrpeCosineConfig,
        launches=LRPE,
    ),
    "tpa_decode": FuzzedOp(
        form=_tpa_form,
        truth=_tpa_truth,
        terms=256,
        kinds=MODEST,
        refused=_tpa_refused,
        config=TpaDecodeConfig,
        launches=dict(block_h=(1, 2, 5), block_n=(1, 2), block_m=(16, 32), num_splits=(1, 3, 7)),
    ),
}
every_op = pytest.mark.parametrize("name", OPS)


def run(test: Callable[..., None], calls: int, *ids: Any) -> None:
    """A hypothesis test of so many calls, other ones for each of the ids."""
    settings = hypothesis.settings(max_examples=calls, phases=PHASES)
    settings(hypothesis.seed(zlib.crc32(repr((SEED, ids)).encode()))(test))()


@every_op
@pytest.mark.parametrize("block", range(BLOCKS))
def test_valid_calls_are_the_loop(name: str, block: int) -> None:
    op = OPS[name]
    rng = np.random.default_rng([SEED, block, zlib.crc32(name.encode())])
    implementations = itertools.islice(itertools.cycle(IMPLEMENTATIONS), block, block + SIGNATURES)
    pool = [random_signature(rng, op, implementation) for implementation in implementations]
    specials = st.lists(st.sampled_from([math.inf, -math.inf, math.nan]), max_size=2).map(tuple)
    calls = st.builds(
        Call,
        signature=st.sampled_from(pool),
        kind=st.sampled_from(op.kinds),
        specials=st.just(()) | specials,
        seed=st.integers(0, 2**32 - 1),
    )

    @hypothesis.given(call=calls)
    def test(call: Call) -> None:
        check(call, draw, op.truth, op.terms)

    run(test, CALLS // BLOCKS, name, block)


@every_op
def test_invalid_calls_are_refused(name: str) -> None:
    @hypothesis.given(seed=st.integers(0, 2**32 - 1), which=st.integers(0, 2**32 - 1))
    def test(seed: int, which: int) -> None:
        form = random_form(np.random.default_rng(seed), OPS[name])
        changes = list(_refused(OPS[name], form))
        assert_refused(form, changes[which % len(changes)])

    run(test, CALLS, name)


def assert_refused(form: Form, change: dict[str, Any]) -> None:
    """While tracing, in our own words."""
    name, operands, static = form
    arrays, others = _split(operands | static | change)
    with jax.enable_x64(any("64" in x.dtype for x in arrays.values())):
        structs = {k: jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for k, x in arrays.items()}
        fn = functools.partial(getattr(pallas_ops, name), **others)
        hypothesis.note(f"{form} with {change}")
        with pytest.raises((TypeError, ValueError), match="accepted"):
            jax.eval_shape(lambda arrays: fn(**arrays), structs)
