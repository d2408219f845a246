"""A small language model with tensor-product attention, which caches factors and not k and v.

`python examples/tpa_decoder.py` reads a prompt in one call, writes tokens one at a time (one
compiled program for all lengths, which updates the cache in place), and checks that reading it all
at once comes to the same.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import pallas_ops


class Cache(NamedTuple):
    """One layer's factors of the keys and values so far: [B, M, rank, H] and [B, M, rank, D].

    With a page table, pools that the sequences share: [pages, page_size, rank, H or D].
    """

    ak: jax.Array
    av: jax.Array
    bk: jax.Array
    bv: jax.Array


class Attention(nnx.Module):
    """softmax(q k^T) v with q, k and v sums of `q_rank` and `kv_rank` outer products.

    Feature factors of q and k are rotated by position (RoPE).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dim: int,
        q_rank: int,
        kv_rank: int,
        *,
        batch_invariant: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.heads, self.dim, self.q_rank, self.kv_rank = heads, dim, q_rank, kv_rank
        self.batch_invariant = batch_invariant
        self.query = nnx.Linear(width, q_rank * (heads + dim), rngs=rngs)
        self.key = nnx.Linear(width, kv_rank * (heads + dim), rngs=rngs)
        self.value = nnx.Linear(width, kv_rank * (heads + dim), rngs=rngs)
        self.out = nnx.Linear(heads * dim, width, rngs=rngs)

    def empty_cache(self, batch: int, length: int, dtype: DTypeLike) -> Cache:
        widths = (self.heads, self.heads, self.dim, self.dim)
        return Cache(*(jnp.zeros((batch, length, self.kv_rank, width), dtype) for width in widths))

    def __call__(
        self, x: jax.Array, cache: Cache, lengths: jax.Array, table: jax.Array | None
    ) -> tuple[jax.Array, Cache]:
        """x [B, N, width] stands at `lengths` ([] or [B]) and after it."""
        batch, n, _ = x.shape
        positions = jnp.atleast_1d(lengths)[:, None] + jnp.arange(n)[None]
        aq, bq = self._factors(self.query(x), self.q_rank)
        ak, bk = self._factors(self.key(x), self.kv_rank)
        av, bv = self._factors(self.value(x), self.kv_rank)
        new = Cache(ak, av, rotated(bk, positions), bv)
        new = Cache(*(y.astype(old.dtype) for y, old in zip(new, cache, strict=True)))
        cache = pallas_ops.tpa_append(cache, new, lengths, page_table=table)
        out = pallas_ops.tpa_decode(
            jnp.swapaxes(aq, 2, 3),
            cache.ak,
            cache.av,
            rotated(bq, positions),
            cache.bk,
            cache.bv,
            lengths=lengths + n,
            page_table=table,
            batch_invariant=self.batch_invariant,
        )
        return self.out(out.reshape(batch, n, -1)), cache

    def _factors(self, x: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
        """a [B, N, rank, H] and b [B, N, rank, D]"""
        x = x.reshape(*x.shape[:2], rank, self.heads + self.dim)
        return x[..., : self.heads], x[..., self.heads :]


def rotated(b: jax.Array, positions: jax.Array) -> jax.Array:
    """Feature factors b [B, N, rank, D], whose halves are turned by positions [B or 1, N]."""
    first, second = jnp.split(b, 2, axis=-1)
    rate = 10_000.0 ** -(jnp.arange(first.shape[-1]) / first.shape[-1])
    angle = positions[..., None, None].astype(rate.dtype) * rate[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Model(nnx.Module):
    """Embedding, layers of attention and feed-forward, and logits.

    `batch_invariant`: attention to one sequence does not depend on the others of the batch.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int = 4,
        dim: int = 16,
        batch_invariant: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        shape = dict(heads=heads, dim=dim, q_rank=6, kv_rank=2)
        self.attention = nnx.List(
            Attention(width, **shape, batch_invariant=batch_invariant, rngs=rngs)
            for _ in range(layers)
        )
        self.hidden = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def empty_cache(self, batch: int, length: int, dtype: DTypeLike = jnp.float32) -> list[Cache]:
        return [layer.empty_cache(batch, length, dtype) for layer in self.attention]

    def __call__(
        self,
        tokens: jax.Array,
        caches: list[Cache],
        lengths: jax.Array,
        table: jax.Array | None = None,
    ) -> tuple[jax.Array, list[Cache]]:
        """Logits of the token after each of tokens [B, N], which stand at `lengths` and after."""
        x, new = self.embed(tokens), []
        for attention, hidden, old in zip(self.attention, self.hidden, caches, strict=True):
            mixed, cache = attention(self.norm(x), old, lengths, table)
            x = x + mixed
            x = x + jax.nn.silu(hidden(self.norm(x)))
            new.append(cache)
        return self.embed.attend(self.norm(x)), new


@nnx.jit(donate_argnames="caches")
def read(
    model: Model, tokens: jax.Array, caches: list[Cache], length: jax.Array
) -> tuple[jax.Array, list[Cache]]:
    return model(tokens, caches, length)


def main(*, batch: int = 2, prompt: int = 5, steps: int = 12) -> jax.Array:
    """Tokens [batch, prompt + steps]."""
    with jax.default_matmul_precision("float32"):  # not TF32, a GPU's default: for the check
        model = Model(vocabulary=64, width=32, layers=2, rngs=nnx.Rngs(0))
        tokens = jax.random.randint(jax.random.key(1), (batch, prompt), 0, 64)
        logits, caches = read(model, tokens, model.empty_cache(batch, prompt + steps), jnp.int32(0))
        for length in range(prompt, prompt + steps):
            last = jnp.argmax(logits[:, -1:], axis=-1)
            tokens = jnp.concatenate([tokens, last], axis=1)
            logits, caches = read(model, last, caches, jnp.int32(length))
        again, _ = read(model, tokens, model.empty_cache(batch, prompt + steps), jnp.int32(0))
        if not jnp.allclose(again[:, -1], logits[:, -1], atol=1e-4):
            raise AssertionError("reading one token at a time and all at once differ")
        return tokens


if __name__ == "__main__":
    print(main())
