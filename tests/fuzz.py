"""Random calls of the ops: signatures, which are compiled, and the numbers of a call.

A signature is all that a program is compiled for: shapes, dtypes, static arguments, transforms.
Signatures are random, but there are few, for compiling takes longest; each call has new numbers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import pallas_ops
from tests.support import EPS32, TOLERANCES, assert_close, in_float64, random_cotangents, to_float64

Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]
Values = dict[str, Any]

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 127, 129, 257)
TRANSFORMS = (  # the outermost first
    ("jit",),
    (),
    ("jit", "grad"),
    ("jit", "vmap"),
    ("jit", "grad", "vmap"),
    ("grad",),
    ("jit", "scan"),
    ("jit", "vmap", "grad"),
    ("jit", "grad", "remat"),
    ("vmap",),
    ("jit", "grad", "scan"),
)
MULTIPLIERS = dict(zeros=0.0, small=1e-3, large=2.0)


class Operand(NamedTuple):
    """An array argument, and where it has a batch axis under vmap or scan; None: it has none."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None

    @property
    def is_floating(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.floating))


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a call is compiled for."""

    op: str
    operands: tuple[tuple[str, Operand], ...]
    static: tuple[tuple[str, Any], ...]
    transform: tuple[str, ...] = ()
    batch: int | None = None  # the size of vmap's axis
    x64: bool = False

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, (_, x) in enumerate(self.operands) if x.is_floating)

    @property
    def axes(self) -> tuple[int | None, ...]:
        return tuple(x.axis for _, x in self.operands)

    @property
    def has_gradient(self) -> bool:
        return "grad" in self.transform


class Call(NamedTuple):
    """A signature, and the numbers: of a kind, with some special ones among them."""

    signature: Signature
    kind: str
    specials: tuple[float, ...]
    seed: int


class Near(NamedTuple):
    """What a result should be, and the size of the numbers that it is a sum of."""

    want: Float64
    scale: Any


# Results and gradients of one signature without a transform, for some operands and cotangents.
Truth = Callable[[Signature, Values, tuple[Float64, ...]], tuple[list[Near], list[Near]]]


def pick(rng: Rng, *options: Any) -> Any:
    """One of the options, as it is."""
    return options[rng.integers(len(options))]


def random_shape(rng: Rng, most: int = 3000) -> tuple[int, ...]:
    """Of any rank but 0; now and then with an empty axis."""
    shape = [pick(rng, *SIZES) for _ in range(rng.integers(1, 5))]
    while math.prod(shape) > most:
        shape[rng.integers(len(shape))] = pick(rng, *SIZES[:7])
    if rng.random() < 0.05:
        shape[rng.integers(len(shape))] = 0
    return tuple(shape)


def random_dtype(rng: Rng) -> str:
    return str(pick(rng, *["float32", "bfloat16", "float16"] * 4, "float64"))


def transformed(rng: Rng, s: Signature) -> Signature:
    """`s` under random transforms."""
    transform = pick(rng, *TRANSFORMS)
    wide = any(x.dtype.endswith("64") for _, x in s.operands)
    s = dataclasses.replace(s, transform=transform, x64=wide or rng.random() < 0.1)
    if not {"vmap", "scan"} & set(transform):
        return s
    every = transform[-2:] == ("vmap", "grad")  # else gradients would have another batch axis
    batched = [every or rng.random() < 0.6 for _ in s.operands]
    batched[rng.integers(len(batched))] = True
    operands = (
        (name, x._replace(axis=int(rng.integers(len(x.shape) + 1)) if here else None))
        for (name, x), here in zip(s.operands, batched, strict=True)
    )
    return dataclasses.replace(s, operands=tuple(operands), batch=pick(rng, 1, 2, 3))


def numbers(rng: Rng, x: Operand, call: Call, most: float = math.inf) -> Any:
    """An array of the call's kind; at most `most` in magnitude, but for the special numbers."""
    info = jnp.finfo(x.dtype)
    most, tiny = min(most, float(info.max)), float(info.tiny)
    y: Any = MULTIPLIERS.get(call.kind, 1.0) * rng.standard_normal(x.shape)
    if call.kind == "wide":
        y *= 10.0 ** rng.uniform(-30, np.log10(most) - 1, x.shape)
    elif call.kind == "extreme":
        y = rng.choice([most, -most, tiny, -0.0, 1.0], x.shape)
    elif call.kind == "tiny":
        y *= 4 * tiny
    elif call.kind == "rising":
        y = np.sort(100 * y, axis=None).reshape(x.shape)
    elif call.kind == "falling":
        y = -np.sort(100 * y, axis=None).reshape(x.shape)
    elif call.kind == "stairs":
        y += 300.0 * (np.arange(y.size).reshape(x.shape) // 8)
    y = np.clip(y, -most, most)
    if call.specials:
        y = np.where(rng.random(x.shape) < 0.03, rng.choice(call.specials, x.shape), y)
    return y.astype(jnp.dtype(x.dtype))


def integers(rng: Rng, x: Operand, low: int, high: int) -> Any:
    """From low to high, as far as the dtype goes."""
    info = np.iinfo(x.dtype)
    low, high = max(low, info.min), min(high, info.max)
    return rng.integers(low, high, x.shape, endpoint=True).astype(x.dtype)


# Programs


def forward(s: Signature, static: Mapping[str, Any]) -> Callable[..., tuple[jax.Array, ...]]:
    """The op of its operands; always a tuple of results."""
    op, names = getattr(pallas_ops, s.op), [name for name, _ in s.operands]

    def run(*xs: Any) -> tuple[jax.Array, ...]:
        out = op(**dict(zip(names, xs, strict=True)), **static)
        return out if isinstance(out, tuple) else (out,)

    return run


def pulled(fn: Callable[..., Any], argnums: Sequence[int]) -> Callable[..., Any]:
    """From operands and cotangents to results and gradients."""

    def run(xs: tuple[Any, ...], weights: tuple[Any, ...]) -> Any:
        def of_floating(*ys: Any) -> Any:
            given = iter(ys)
            return fn(*(next(given) if i in argnums else x for i, x in enumerate(xs)))

        out, pull = jax.vjp(of_floating, *(xs[i] for i in argnums))
        return out, pull(weights)

    return run


def scanned(fn: Callable[..., Any], axes: Sequence[int | None]) -> Callable[..., Any]:
    """`jax.vmap(fn, axes)`, one after the other."""

    def run(*xs: Any) -> Any:
        rows = [None if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(xs, axes, strict=True)]

        def step(_: None, row: Any) -> Any:
            return None, fn(*(x if y is None else y for x, y in zip(xs, row, strict=True)))

        return jax.lax.scan(step, None, rows)[1]

    return run


def mapped(s: Signature) -> Callable[..., Any]:
    """The op under all of its transforms but jit and grad."""
    fn = forward(s, dict(s.static))
    if "remat" in s.transform:
        return jax.checkpoint(fn)
    if "scan" in s.transform:
        return scanned(fn, s.axes)
    return jax.vmap(fn, s.axes) if "vmap" in s.transform else fn


@functools.lru_cache(maxsize=256)
def compiled(s: Signature) -> Callable[..., Any]:
    """From operands and cotangents to results and gradients, if there are any."""
    jit: Callable[..., Any] = jax.jit if "jit" in s.transform else lambda fn: fn
    if s.transform[-2:] == ("vmap", "grad"):
        axes = tuple(s.axes[i] for i in s.differentiable)
        one = pulled(forward(s, dict(s.static)), s.differentiable)
        return jit(jax.vmap(one, (s.axes, 0), (0, axes)))  # type: ignore[no-any-return]
    if s.has_gradient:
        return jit(pulled(mapped(s), s.differentiable))  # type: ignore[no-any-return]
    fn = jit(mapped(s))
    return lambda xs, _: (fn(*xs), ())


@functools.lru_cache(maxsize=256)
def results(s: Signature, *operands: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(mapped(s), *operands)


@functools.lru_cache(maxsize=256)
def _reference(s: Signature) -> Callable[..., Any]:
    static = {k: v for k, v in s.static if k != "config"} | {"implementation": "xla"}
    return pulled(forward(s, static), s.differentiable)


def reference_gradients(
    s: Signature, values: Values, weights: tuple[Float64, ...]
) -> list[Float64]:
    """Those of the reference in float64, for ops whose loops have none."""
    return list(in_float64(_reference(s), tuple(values.values()), weights)[1])


# Comparison


def check(call: Call, draw: Callable[[Rng, Call], Values], truth: Truth, terms: int) -> None:
    """Compares a call's results and gradients with the truth of each batch element."""
    s, rng = call.signature, np.random.default_rng(call.seed)
    each = [draw(rng, call) for _ in range(s.batch or 1)]
    each = [{k: (y if x.axis is not None else each[0])[k] for k, x in s.operands} for y in each]
    with jax.enable_x64(s.x64):
        xs = tuple(jnp.asarray(_joined([y[k] for y in each], x.axis)) for k, x in s.operands)
        structs = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)
        weights = random_cotangents(rng, results(s, *structs))
        outs, grads = compiled(s)(xs, weights)
    rows = [[w[i] for w in weights] for i in range(s.batch)] if s.batch else [weights]
    with np.errstate(all="ignore"):
        truths = [
            truth(s, y, tuple(map(to_float64, row))) for y, row in zip(each, rows, strict=True)
        ]
        for i, out in enumerate(outs):
            near = [y[0][i] for y in truths]
            _assert_near(f"result {i}", out, near, 0 if s.batch else None, terms)
        for i, grad in enumerate(grads):
            name, x = s.operands[s.differentiable[i]]
            _assert_near(f"gradient of {name}", grad, [y[1][i] for y in truths], x.axis, terms)


def _joined(xs: Sequence[Any], axis: int | None) -> Any:
    return xs[0] if axis is None else np.stack(xs, axis)


def _assert_near(name: str, got: Any, near: Sequence[Near], axis: int | None, terms: int) -> None:
    """Batch elements stacked along `axis`; or summed, each rounded to the dtype of `got`."""
    tolerance, info = TOLERANCES[got.dtype], jnp.finfo(got.dtype)
    wants = [x.want for x in near]
    scales = [np.broadcast_to(x.scale, x.want.shape) for x in near]
    want, scale = _joined(wants, axis), _joined(scales, axis)
    if axis is None and len(near) > 1:
        want, size = np.sum(wants, axis=0), np.sum(np.abs(wants), axis=0)
        scale = np.sum(scales, axis=0) + size * tolerance.rounding / tolerance.relative
    rounded = to_float64(want.astype(got.dtype))
    want = np.where(np.isinf(rounded), rounded, want)
    # Subnormal numbers may be taken for 0.
    tiny = max(float(info.smallest_subnormal), float(np.finfo(np.float32).tiny))
    assert_close({name: got}, {name: want}, scale=scale + tiny / EPS32, terms=terms)
