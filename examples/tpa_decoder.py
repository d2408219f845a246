"""A small language model with tensor-product attention, which caches factors and not k and v.

`python examples/tpa_decoder.py` reads a prompt in one call, writes tokens one at a time (one
compiled program for all lengths, which updates the cache in place), and checks that reading it all
at once comes to the same.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_ops


class Cache(NamedTuple):
    """One layer's factors of the keys and values so far: [B, M, rank, H] and [B, M, rank, D]."""

    ak: jax.Array
    av: jax.Array
    bk: jax.Array
    bv: jax.Array


class Attention(nnx.Module):
    """softmax(q k^T) v with q, k and v sums of `q_rank` and `kv_rank` outer products."""

    def __init__(
        self, width: int, heads: int, dim: int, q_rank: int, kv_rank: int, *, rngs: nnx.Rngs
    ) -> None:
        self.heads, self.dim, self.q_rank, self.kv_rank = heads, dim, q_rank, kv_rank
        self.query = nnx.Linear(width, q_rank * (heads + dim), rngs=rngs)
        self.key = nnx.Linear(width, kv_rank * (heads + dim), rngs=rngs)
        self.value = nnx.Linear(width, kv_rank * (heads + dim), rngs=rngs)
        self.out = nnx.Linear(heads * dim, width, rngs=rngs)

    def empty_cache(self, batch: int, length: int) -> Cache:
        widths = (self.heads, self.heads, self.dim, self.dim)
        return Cache(*(jnp.zeros((batch, length, self.kv_rank, width)) for width in widths))

    def __call__(self, x: jax.Array, cache: Cache, length: jax.Array) -> tuple[jax.Array, Cache]:
        """x [B, N, width] stands at `length` and after it."""
        aq, bq = self._factors(self.query(x), self.q_rank)
        ak, bk = self._factors(self.key(x), self.kv_rank)
        av, bv = self._factors(self.value(x), self.kv_rank)
        cache = pallas_ops.tpa_append(cache, Cache(ak, av, bk, bv), length)
        batch, n, _ = x.shape
        out = pallas_ops.tpa_decode(
            jnp.swapaxes(aq, 2, 3),
            cache.ak,
            cache.av,
            bq,
            cache.bk,
            cache.bv,
            lengths=length + n,
        )
        return self.out(out.reshape(batch, n, -1)), cache

    def _factors(self, x: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
        """a [B, N, rank, H] and b [B, N, rank, D]"""
        x = x.reshape(*x.shape[:2], rank, self.heads + self.dim)
        return x[..., : self.heads], x[..., self.heads :]


class Model(nnx.Module):
    """Embedding, layers of attention and feed-forward, and logits."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.attention = nnx.List(
            Attention(width, heads=4, dim=16, q_rank=6, kv_rank=2, rngs=rngs) for _ in range(layers)
        )
        self.hidden = nnx.List(nnx.Linear(width, width, rngs=rngs) for _ in range(layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def empty_cache(self, batch: int, length: int) -> list[Cache]:
        return [layer.empty_cache(batch, length) for layer in self.attention]

    def __call__(
        self, tokens: jax.Array, caches: list[Cache], length: jax.Array
    ) -> tuple[jax.Array, list[Cache]]:
        """Logits of the token after each of tokens [B, N], which stand at `length` and after it."""
        x, new = self.embed(tokens), []
        for attention, hidden, old in zip(self.attention, self.hidden, caches, strict=True):
            mixed, cache = attention(self.norm(x), old, length)
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
