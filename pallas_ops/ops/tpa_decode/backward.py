"""How the gradient of tpa_decode runs: one pass over the keys, several, or with k and v formed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_ops.core import card
from pallas_ops.ops.tpa_decode import formed, prompt, prompt_backward, reference
from pallas_ops.ops.tpa_decode.choose import queries_of_pass
from pallas_ops.ops.tpa_decode.config import Operands, Params, Sizes
from pallas_ops.ops.tpa_decode.kernel_backward import one_pass

# At most so many numbers in the float32 gradients of the keys of one launch's passes: 256 MiB.
NUMBERS_AT_ONCE = 2**26


def backward(*operands: jax.Array | None, p: Params) -> tuple[jax.Array, ...]:
    """Gradients of the factors. Each pass over the keys has as many queries as fit one program."""
    o = _without_blind_queries(Operands(*operands))
    s = Sizes.of(o, p)
    rounds_query = p.precision == "default" and (s.has_bq or s.wide_queries)
    # float32 queries have float32 cotangents, which float16 may not hold.
    is_exact = s.dtype == "float16" and s.wide_queries
    if not (rounds_query and is_exact) and (formed.takes(s) or prompt_backward.has_gradient(o, p)):
        return formed.backward(o, p)
    if rounds_query:
        return _of_rounded_query(o, p, is_exact)
    block_n = queries_of_pass(s, card.current())
    return one_pass(o, p) if s.n <= block_n else _in_blocks(o, p, block_n)


def _without_blind_queries(o: Operands) -> Operands:
    """The operands, with cotangent 0 for queries that see no key: a NaN would reach all keys."""
    if o.lengths is None and o.aq.shape[1] <= o.m:
        return o
    dlse = None if o.dlse is None else jnp.where(o.lse == -jnp.inf, 0, o.dlse)
    return o._replace(dout=reference.without_blind_queries(o.dout, o.lse), dlse=dlse)


def _in_blocks(o: Operands, p: Params, block_n: int) -> tuple[jax.Array, ...]:
    """A pass for each block of `block_n` queries, several passes in one launch (`NUMBERS_AT_ONCE`).

    `lengths` of a block end at its last query. The first block is filled up with queries of the
    second, and the first step with copies of the first block. There the log-sum-exp is set to inf,
    so their probabilities are 0 and add nothing.
    """
    b, n = o.aq.shape[:2]
    factors = o.ak, o.av, o.bk, o.bv
    blocks = pl.cdiv(n, block_n)
    steps = pl.cdiv(blocks, max(1, NUMBERS_AT_ONCE // sum(x.size for x in factors)))
    passes = pl.cdiv(blocks, steps)
    copies, first = 1 + steps * passes - blocks, n - (blocks - 1) * block_n

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.concatenate([x[:, :block_n]] * copies + [x[:, first:]], axis=1)
        return jnp.moveaxis(x.reshape(b, steps, passes, block_n, *x.shape[2:]), 0, 2)

    def join(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 2, 0).reshape(b, -1, *x.shape[4:])
        return jnp.concatenate([x[:, :first], x[:, copies * block_n :]], axis=1)

    def of_block(block: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        return one_pass(o._replace(**block), p, at_once=passes)

    def step(sums: list[jax.Array], of_passes: dict[str, jax.Array]) -> tuple[Any, Any]:
        daq, dak, dav, *dbq, dbk, dbv = jax.vmap(of_block)(of_passes)
        of_keys = zip(sums, (dak, dav, dbk, dbv), strict=True)
        return [x + y.astype(jnp.float32).sum(axis=0) for x, y in of_keys], (daq, *dbq)

    names = "aq", "bq", "out", "lse", "dout", "dlse"
    of_queries = {name: cut(x) for name in names if (x := getattr(o, name)) is not None}
    place = jnp.arange(steps * passes * block_n).reshape(steps, passes, 1, block_n, 1)
    is_copy = (place >= first) & (place < copies * block_n)
    of_queries["lse"] = jnp.where(is_copy, jnp.inf, of_queries["lse"])
    ends = jnp.array([block_n] * copies + [*range(first + block_n, n + 1, block_n)], jnp.int32)
    lengths = jnp.full(b, o.m, jnp.int32) if o.lengths is None else o.lengths
    of_queries["lengths"] = lengths[None, None] - (n - ends.reshape(steps, passes, 1))
    zeros = [jnp.zeros(x.shape, jnp.float32) for x in factors]
    sums, of_blocks = lax.scan(step, zeros, of_queries)
    dak, dav, dbk, dbv = (x.astype(y.dtype) for x, y in zip(sums, factors, strict=True))
    daq, *dbq = map(join, of_blocks)
    return daq, dak, dav, *dbq, dbk, dbv


def _of_rounded_query(o: Operands, p: Params, is_exact: bool) -> tuple[jax.Array, ...]:
    """The gradient at default precision: q is formed, scaled and rounded as in the forward pass.

    All that follows is rounded as well, unless `is_exact`.
    """

    def query(aq: jax.Array, *bq: jax.Array) -> tuple[jax.Array, float]:
        return prompt.scaled_query(aq, bq[0] if bq else None, p)[:2]

    factors = [x for x in (o.aq, o.bq) if x is not None]
    q, pull, scale = jax.vjp(query, *factors, has_aux=True)
    p, q = dataclasses.replace(p, score_scale=scale), q.astype(o.ak.dtype)
    if is_exact:
        p, q = dataclasses.replace(p, precision="highest"), q.astype(jnp.float32)
    dq, dak, dav, dbk, dbv = backward(*o._replace(aq=q, bq=None), p=p)
    daq, *dbq = pull(dq.astype(jnp.float32))
    return daq, dak, dav, *dbq, dbk, dbv
