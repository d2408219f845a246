"""What tpa_decode means, one query and head at a time, and the arguments that its tests share."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import pallas_ops
from tests.support import random_array

Rng = np.random.Generator


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


def loop(
    xs: tuple[Any, ...], lengths: Any, window: int | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Output and log-sum-exp, one query and head at a time, in float64."""
    aq, ak, av, bq, bk, bv = cast(Any, (x if x is None else np.asarray(x, np.float64) for x in xs))
    ak, av, bk, bv = (x[:, :, None] if x.ndim == 3 else x for x in (ak, av, bk, bv))
    b, n, h, r = aq.shape
    out, lse = np.zeros((b, n, h, bv.shape[-1])), np.full((b, n, h), -np.inf)
    for i, j, k in np.ndindex(b, n, h):
        last = max(0, min(int(lengths[i]), bk.shape[1]) - (n - 1 - j))
        seen = slice(0 if window is None else max(0, last - window), last)
        q = aq[i, j, k] if bq is None else sum(aq[i, j, k, x] * bq[i, j, x] for x in range(r)) / r
        keys = np.einsum("mr,mrd->md", ak[i, seen, :, k], bk[i, seen]) / ak.shape[2]
        values = np.einsum("mr,mre->me", av[i, seen, :, k], bv[i, seen]) / av.shape[2]
        score = keys @ q * bk.shape[-1] ** -0.5
        if last:
            p = np.exp(score - score.max())
            out[i, j, k] = p @ values / p.sum()
            lse[i, j, k] = np.log(p.sum()) + score.max()
    return out, lse


def both(implementation: Any = None, **kwargs: Any) -> Callable[..., Any]:
    """Output and log-sum-exp, compiled."""
    return jax.jit(partial(pallas_ops.tpa_decode_with_lse, implementation=implementation, **kwargs))
