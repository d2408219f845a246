"""The gradient for many queries: of q, k and v first, then of their factors.

The kernel reads the whole cache once for every few queries. With many queries the matrix products
take most of the time, and those of XLA or cuDNN (`by_cudnn`) are faster. So q, k and v are formed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import launch
from pallas_ops.ops.tpa_decode import prompt, prompt_backward, reference
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes

# Queries times the square of the ranks: with fewer the kernel's passes take less time.
LEAST_QUERIES = 256
# Numbers in keys and values of a sequence: 4 GiB in float32, and as much for their gradients. With
# more of them, fewer than 512 queries take the kernel's passes, which need next to no memory.
MOST_FORMED = 2**30
# Bytes of keys and values, or of 64 queries' scores, of as many sequences as run at once.
BYTES_AT_ONCE = 2**30
# A chunk has 64 queries, or more if their scores still fit in 300 MB (float32).
CHUNK = 64
SCORES = 75_000_000


def takes(s: Sizes) -> bool:
    """Whether this is faster than the kernel's passes; k and v of few queries may be too large."""
    fits = s.n >= 512 or s.m * s.h * (s.d + s.e) <= MOST_FORMED
    return fits and s.n * s.most_ranks**2 >= LEAST_QUERIES


def backward(o: Operands, p: Params) -> tuple[jax.Array, ...]:
    """Gradients of the factors that are present."""
    s, by_cudnn = Sizes.of(o, p), prompt_backward.has_gradient(o, p)
    run = partial(_in_groups, p=p, by_cudnn=by_cudnn)
    if by_cudnn and (s.n % 2 or s.m % 2):
        return prompt_backward.with_even_sizes(run, o)
    return run(o)


def _in_groups(o: Operands, *, p: Params, by_cudnn: bool) -> tuple[jax.Array, ...]:
    """The gradients, of as many sequences at once as `BYTES_AT_ONCE` allows."""
    s, run = Sizes.of(o, p), partial(_at_once, p=p, by_cudnn=by_cudnn)
    size = s.b * s.m * s.h * max(s.d + s.e, CHUNK) * _dtype(s).itemsize
    divisors = (i for i in range(1, s.b + 1) if s.b % i == 0)
    groups = next((i for i in divisors if size <= i * BYTES_AT_ONCE), s.b)
    if groups == 1:
        return run(o)
    grads = lax.map(run, jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), o))
    return tuple(x.reshape(s.b, *x.shape[2:]) for x in grads)


def _at_once(o: Operands, *, p: Params, by_cudnn: bool) -> tuple[jax.Array, ...]:
    o = reference.of_seen_keys(p, o)[0]
    s = Sizes.of(o, p)
    product = _product(s, min(s.rk, s.rv, s.r) > 1)
    q, scale, query_scale = o.aq, p.score_scale, 1.0
    if s.precision == "default":
        q, scale, query_scale = prompt.scaled_query(o.aq, o.bq, p)
    elif o.bq is not None:
        q = product("bnhr,bnrd->bnhd", o.aq, o.bq)
    if by_cudnn:
        dq, of_parts = prompt_backward.backward(q, scale, o, p.value_scale)
    else:
        k = product("bmkh,bmkd->bmhd", o.ak, o.bk)
        v = p.value_scale * product("bmkh,bmkd->bmhd", o.av, o.bv)
        q, k, v = (x.astype(_dtype(s)) for x in (q, k, v))
        dq, dk, dv = _in_chunks(q, k, v, scale, o, p)
        of_parts = [(slice(s.m), dk, dv)]

    def of_factors(form: str, g: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> Any:
        """The gradients of a and b, from the gradient g of scale * a b."""
        of_a, of_b = form.split(",")
        da = scale * product(f"bmhd,{of_b}->{of_a}", g, b)
        db = scale * product(f"bmhd,{of_a}->{of_b}", g, a)
        return da.astype(a.dtype), db.astype(b.dtype)

    def of_part(keys: slice, dk: jax.Array, dv: jax.Array) -> Any:
        ak, av, bk, bv = (x[:, keys] for x in (o.ak, o.av, o.bk, o.bv))
        of_k = of_factors("bmkh,bmkd", dk, ak, bk, 1.0)
        return *of_k, *of_factors("bmkh,bmkd", dv, av, bv, p.value_scale)

    grads = zip(*(of_part(*part) for part in reversed(of_parts)), strict=True)
    dak, dbk, dav, dbv = (jnp.concatenate(x, axis=1) for x in grads)
    if o.bq is None:
        return dq.astype(o.aq.dtype), dak, dav, dbk, dbv
    daq, dbq = of_factors("bmhr,bmrd", dq, o.aq, o.bq, query_scale)
    return daq, dak, dav, dbq, dbk, dbv


def _in_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, o: Operands, p: Params
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v [B, N or M, H, D], a chunk of queries at a time."""
    s = Sizes.of(o, p)
    count = max(1, min(pl.cdiv(s.n, CHUNK), pl.cdiv(s.b * s.h * s.n * s.m, SCORES)))
    size = pl.cdiv(s.n, count)
    product = _product(s, min(size, s.m, s.d, s.e) >= 16)

    def cut(x: jax.Array) -> jax.Array:
        """[B, N, H, ...] as [chunks, B, H, size, ...], padded with queries that see no key."""
        x = jnp.pad(x, [(0, 0), (0, count * size - s.n), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(s.b, count, size, *x.shape[2:]), (1, 3), (0, 2))

    def step(sums: tuple[jax.Array, jax.Array], chunk: list[jax.Array]) -> tuple[Any, jax.Array]:
        q, dout, lse, delta, stop = chunk
        score = scale * product("bhnd,bhmd->bhnm", q, k) - lse[..., None]
        weight = jnp.where(reference.are_seen(s.m, stop, p.window), jnp.exp(score), 0.0)
        ds = scale * weight * (product("bhnd,bhmd->bhnm", dout, v) - delta[..., None])
        dk = sums[0] + product("bhnm,bhnd->bhmd", ds, q)
        dv = sums[1] + product("bhnm,bhnd->bhmd", weight, dout)
        return (dk, dv), product("bhnm,bhmd->bhnd", ds, k)

    delta = (o.out.astype(jnp.float32) * o.dout.astype(jnp.float32)).sum(axis=-1)
    if o.dlse is not None:
        delta -= o.dlse
    stop = jnp.broadcast_to(reference.stops(o), (s.b, s.n))[..., None]  # the same for all heads
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    (dk, dv), dq = lax.scan(step, zeros, [*map(cut, (q, o.dout, o.lse, delta, stop))])
    dq = jnp.moveaxis(dq, (0, 2), (1, 3)).reshape(s.b, count * size, s.h, s.d)[:, : s.n]
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2)


def _dtype(s: Sizes) -> Any:
    """The dtype in which operands are multiplied."""
    return jnp.dtype(s.dtype if s.precision == "default" else jnp.float32)


def _product(s: Sizes, are_matrices: bool) -> Callable[..., jax.Array]:
    """An einsum that sums in float32. With `precision="highest"` it is as exact as the kernel.

    With bfloat16 factors, XLA then multiplies three pairs of bfloat16 pieces on the tensor cores.
    It does so correctly for two matrices only: of a vector it rounds each elementwise product to
    bfloat16. So there, and for fewer than 16 rows or columns, float32 products are used.
    """
    precision: Any = s.precision
    in_pieces = s.is_plain_bfloat16 and are_matrices
    if precision == "highest" and in_pieces and not launch.is_interpreted():
        precision = lax.DotAlgorithmPreset.BF16_BF16_F32_X3

    def product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
        x, y = x.astype(_dtype(s)), y.astype(_dtype(s))
        return jnp.einsum(form, x, y, precision=precision, preferred_element_type=jnp.float32)

    return product
