"""A layer of linear attention with decay, whose relative positions are learned angles.

`python examples/linear_attention.py` runs it over a sequence in chunks, then token by token with a
state of fixed size, and checks that both come to the same.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_ops

CHUNK = 8


class LinearAttention(nnx.Module):
    """o_i = sum_{j<=i} exp(a_{j+1} + .. + a_i) (q_i k_j) v_j, with q and k turned by position."""

    def __init__(self, width: int, heads: int, dim: int, *, rngs: nnx.Rngs) -> None:
        self.heads, self.dim = heads, dim
        self.project = nnx.Linear(width, 3 * heads * dim, rngs=rngs)
        self.decay = nnx.Linear(width, heads, rngs=rngs)
        self.out = nnx.Linear(heads * dim, width, rngs=rngs)
        rate = 10_000.0 ** -(jnp.arange(dim) / dim)
        self.theta = nnx.Param(jnp.tile(rate, (heads, 1)))

    def inputs(self, x: jax.Array, offset: jax.Array) -> tuple[jax.Array, ...]:
        """q, k [B, N, H, 2D], v [B, N, H, D] and log-decays a [B, N, H] of x [B, N, width]."""
        shape = (*x.shape[:2], self.heads, self.dim)
        q, k, v = (y.reshape(shape) for y in jnp.split(self.project(x), 3, axis=-1))
        q, k = (
            pallas_ops.lrpe_cosine(y, self.theta[...], offset=offset, act="silu") for y in (q, k)
        )
        return q, k, v, jax.nn.log_sigmoid(self.decay(x)) / 4

    def __call__(self, x: jax.Array) -> jax.Array:
        """All of a sequence whose length is a multiple of CHUNK."""
        q, k, v, a = self.inputs(x, jnp.int32(0))
        since = pallas_ops.chunk_cumsum_decay(a, chunk_size=CHUNK)  # the chunk's begin, inclusive
        until = pallas_ops.chunk_cumsum_decay(a, chunk_size=CHUNK, reverse=True, shift="chunk")
        q, k, v, since, until = (
            y.reshape(x.shape[0], -1, CHUNK, *y.shape[2:]) for y in (q, k, v, since, until)
        )
        near = jnp.exp(since[:, :, :, None] - since[:, :, None])  # [B, chunks, i, j, H]
        near = jnp.where(jnp.tri(CHUNK, dtype=bool)[None, None, :, :, None], near, 0)
        out = jnp.einsum("bcihd,bcjhd,bcijh,bcjhe->bcihe", q, k, near, v)
        new = jnp.einsum("bcjhd,bcjh,bcjhe->cbhde", k, jnp.exp(until), v)
        fade = jnp.moveaxis(jnp.exp(since[:, :, -1]), 1, 0)

        def step(
            state: jax.Array, chunk: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            fade, new = chunk
            return fade[..., None, None] * state + new, state

        before = jax.lax.scan(step, jnp.zeros_like(new[0]), (fade, new))[1]
        out += jnp.einsum("bcihd,bcih,cbhde->bcihe", q, jnp.exp(since), before)
        return self.out(out.reshape(*x.shape[:2], -1))

    def step(
        self, x: jax.Array, state: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """One token x [B, 1, width] and the state [B, H, 2D, D]."""
        q, k, v, a = (y[:, 0] for y in self.inputs(x, position))
        state = jnp.exp(a)[..., None, None] * state + k[..., None] * v[..., None, :]
        out = jnp.einsum("bhd,bhde->bhe", q, state)
        return self.out(out.reshape(x.shape[0], 1, -1)), state


@nnx.jit
def one_step(
    layer: LinearAttention, x: jax.Array, state: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return layer.step(x, state, position)


def main(*, batch: int = 2, tokens: int = 24) -> jax.Array:
    """The layer's output [batch, tokens, width]."""
    with jax.default_matmul_precision("float32"):  # not TF32, a GPU's default: for the check
        layer = LinearAttention(width=32, heads=4, dim=8, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (batch, tokens, 32))
        out: jax.Array = nnx.jit(lambda layer, x: layer(x))(layer, x)
        state = jnp.zeros((batch, 4, 16, 8))
        for n in range(tokens):
            one, state = one_step(layer, x[:, n : n + 1], state, jnp.int32(n))
            if not jnp.allclose(one, out[:, n : n + 1], atol=1e-5):
                raise AssertionError("in chunks and token by token differ")
        return out


if __name__ == "__main__":
    print(main().shape)
