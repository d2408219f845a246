"""What tpa_decode means, one query and head at a time, and the arguments that its tests share."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import pallas_ops
from tests.support import random_array

Rng = np.random.Generator
Float64 = npt.NDArray[np.float64]
DTYPES8 = [jnp.int8, jnp.float8_e4m3fn]


def factors(
    rng: Rng,
    dtype: Any = jnp.float32,
    *,
    b: int = 2,
    n: int = 1,
    m: int = 40,
    h: int = 3,
    r: int = 4,
    d: int = 16,
    e: int = 8,
    rk: int | None = None,
    rv: int | None = None,
    scale: float = 1.0,
    full: bool = False,
) -> tuple[Any, ...]:
    """aq, ak, av, bq, bk, bv; full queries have no bq."""
    key, value = () if rk is None else (rk,), () if rv is None else (rv,)
    shapes = [(b, n, h, r), (b, m, *key, h), (b, m, *value, h)]
    shapes += [(b, n, r, d), (b, m, *key, d), (b, m, *value, e)]
    aq, *cache, bq, bk, bv = (random_array(rng, shape, dtype, scale) for shape in shapes)
    if full:
        return random_array(rng, (b, n, h, d), dtype, scale), *cache, None, bk, bv
    return aq, *cache, bq, bk, bv


class Head(NamedTuple):
    """One query of one head, and the keys that it sees, if any, in float64."""

    at: tuple[int, int, int]
    seen: slice
    q: Float64
    keys: Float64
    values: Float64
    scores: Float64


def _in_float64(xs: tuple[Any, ...]) -> list[Any]:
    """In float64, all with an axis of ranks."""
    arrays: list[Any] = [None if x is None else np.asarray(x, np.float64) for x in xs]
    for i in (1, 2, 4, 5):
        arrays[i] = arrays[i][:, :, None] if arrays[i].ndim == 3 else arrays[i]
    return arrays


def heads(xs: Any, lengths: Any, window: int | None) -> Iterator[Head]:
    aq, ak, av, bq, bk, bv = xs
    (b, n, h, r), lengths = aq.shape, np.asarray(lengths)
    for i, j, k in np.ndindex(b, n, h):
        last = max(0, min(int(lengths[i]), bk.shape[1]) - (n - 1 - j))
        seen = slice(0 if window is None else max(0, last - window), last)
        q = aq[i, j, k] if bq is None else sum(aq[i, j, k, x] * bq[i, j, x] for x in range(r)) / r
        keys = np.einsum("mr,mrd->md", ak[i, seen, :, k], bk[i, seen]) / ak.shape[2]
        values = np.einsum("mr,mre->me", av[i, seen, :, k], bv[i, seen]) / av.shape[2]
        if last:
            yield Head((i, j, k), seen, q, keys, values, keys @ q * bk.shape[-1] ** -0.5)


def loop(xs: tuple[Any, ...], lengths: Any, window: int | None = None) -> tuple[Float64, Float64]:
    """Output and log-sum-exp, one query and head at a time, in float64."""
    wide = _in_float64(xs)
    shape = wide[0].shape[:3]
    out, lse = np.zeros((*shape, wide[5].shape[-1])), np.full(shape, -np.inf)
    for head in heads(wide, lengths, window):
        p = np.exp(head.scores - head.scores.max())
        out[head.at] = p @ head.values / p.sum()
        lse[head.at] = np.log(p.sum()) + head.scores.max()
    return out, lse


def loop_gradients(
    xs: tuple[Any, ...], lengths: Any, cotangents: Any, window: int | None = None
) -> tuple[Any, ...]:
    """Of the factors, in float64, for cotangents of output and log-sum-exp; None for no bq."""
    aq, ak, av, bq, bk, bv = wide = _in_float64(xs)
    grads = [None if x is None else np.zeros(x.shape) for x in wide]
    daq, dak, dav, dbq, dbk, dbv = cast(Any, grads)
    douts, dlses = (np.asarray(x, np.float64) for x in cotangents)
    for (i, j, k), seen, q, keys, values, scores in heads(wide, lengths, window):
        do, dlse = douts[i, j, k], dlses[i, j, k]
        p = np.exp(scores - scores.max())
        p /= p.sum()
        dscores = p * (values @ do - p @ values @ do + dlse) * bk.shape[-1] ** -0.5
        dkeys = np.outer(dscores, q) / ak.shape[2]
        dvalues = np.outer(p, do) / av.shape[2]
        dak[i, seen, :, k] += np.einsum("md,mrd->mr", dkeys, bk[i, seen])
        dbk[i, seen] += np.einsum("md,mr->mrd", dkeys, ak[i, seen, :, k])
        dav[i, seen, :, k] += np.einsum("me,mre->mr", dvalues, bv[i, seen])
        dbv[i, seen] += np.einsum("me,mr->mre", dvalues, av[i, seen, :, k])
        dq = dscores @ keys
        daq[i, j, k] += dq if bq is None else bq[i, j] @ dq / len(bq[i, j])
        if bq is not None:
            dbq[i, j] += np.outer(aq[i, j, k], dq) / len(bq[i, j])
    return tuple(g if g is None else g.reshape(x.shape) for g, x in zip(grads, xs, strict=True))


def poisoned_with(bad: float, x: jax.Array, gone: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """A factor with a number in place of the keys, [batch, keys], that are gone."""
    poisoned = np.array(x)
    poisoned[gone] = bad
    return poisoned


def both(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Output and log-sum-exp, compiled; of the same options one function."""
    given = dict(kwargs, implementation=implementation)
    of_arrays = {k: x for k, x in given.items() if isinstance(x, np.ndarray | jax.Array)}
    if of_arrays:
        return jax.jit(partial(pallas_ops.tpa_decode_with_lse, **given))
    return _both(tuple(given.items()))


@functools.cache
def _both(given: Any) -> Callable[..., Any]:
    return jax.jit(partial(pallas_ops.tpa_decode_with_lse, **dict(given)))


@functools.cache
def pulled(implementation: Any, window: int | None = None) -> Callable[..., Any]:
    """Of factors, lengths and cotangents: the results, and the gradients of the factors."""

    def run(xs: tuple[jax.Array, ...], lengths: Any, cotangents: Any) -> Any:
        options: Any = dict(lengths=lengths, implementation=implementation, window=window)
        out, pull = jax.vjp(partial(pallas_ops.tpa_decode_with_lse, **options), *xs)
        return out, pull(cotangents)

    return jax.jit(run)


_quantised = jax.jit(pallas_ops.quantize_tpa_factors, static_argnums=2)


def quantised(xs: Any, dtype8: Any) -> tuple[Any, ...]:
    """Factors, keys' and values' features in eight bits."""
    aq, ak, av, bq, bk, bv = xs
    (ak, bk), (av, bv) = (_quantised(a, b, dtype8) for a, b in ((ak, bk), (av, bv)))
    return aq, ak, av, bq, bk, bv


def widened(xs: Any) -> tuple[Any, ...]:
    """The same numbers in the dtype of the others."""
    return (*xs[:4], *(np.asarray(x).astype(xs[1].dtype) for x in xs[4:]))
