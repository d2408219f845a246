"""Programs of random calls (`tests/fuzz/calls.py`), and their results compared with the truth."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ops
from tests.fuzz.calls import Call, Float64, Near, Rng, Signature, Truth, Values
from tests.support import (
    EPS32,
    TOLERANCES,
    assert_close,
    in_float64,
    on_device,
    random_cotangents,
    to_float64,
)


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
        return jit(jax.vmap(one, (s.axes, 0), (0, axes)))
    if s.has_gradient:
        return jit(pulled(mapped(s), s.differentiable))
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


def check(call: Call, draw: Callable[[Rng, Call], Values], truth: Truth, terms: int) -> None:
    """Compares a call's results and gradients with the truth of each batch element."""
    s, rng = call.signature, np.random.default_rng(call.seed)
    each = [draw(rng, call) for _ in range(s.batch or 1)]
    each = [{k: (y if x.axis is not None else each[0])[k] for k, x in s.operands} for y in each]
    with jax.enable_x64(s.x64):
        xs = tuple(on_device(_joined([y[k] for y in each], x.axis)) for k, x in s.operands)
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
