"""A layer of linear attention with decay, whose relative positions are learned angles.

`python examples/linear_attention.py` runs it over a sequence in chunks, then token by token with a
state of fixed size, and checks that both come to the same. Then it runs with the sequence sharded
over all devices, which exchange one state each.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

import pallas_ops

States = tuple[jax.Array, jax.Array]  # factors of the state before, what is added to it


class LinearAttention(nnx.Module):
    """o_i = sum_{j<=i} exp(a_{j+1} + .. + a_i) (q_i k_j) v_j, with q and k turned by position."""

    def __init__(
        self, width: int, heads: int, dim: int, *, chunk_size: int = 8, rngs: nnx.Rngs
    ) -> None:
        self.heads, self.dim, self.chunk_size = heads, dim, chunk_size
        self.project = nnx.Linear(width, 3 * heads * dim, rngs=rngs)
        self.decay = nnx.Linear(width, heads, rngs=rngs)
        self.out = nnx.Linear(heads * dim, width, rngs=rngs)
        rate = 10_000.0 ** -(jnp.arange(dim) / dim)
        self.theta = nnx.Param(jnp.tile(rate, (heads, 1)))

    def inputs(
        self, x: jax.Array, offset: jax.Array, axis_name: str | None = None
    ) -> tuple[jax.Array, ...]:
        """q, k [B, N, H, 2D], v [B, N, H, D] and log-decays a [B, N, H] of x [B, N, width]."""
        shape = (*x.shape[:2], self.heads, self.dim)
        q, k, v = (y.reshape(shape) for y in jnp.split(self.project(x), 3, axis=-1))
        turn = partial(pallas_ops.lrpe_cosine, offset=offset, act="silu", axis_name=axis_name)
        q, k = (turn(y, self.theta[...]) for y in (q, k))
        return q, k, v, jax.nn.log_sigmoid(self.decay(x)) / 4

    def __call__(self, x: jax.Array, *, axis_name: str | None = None) -> jax.Array:
        """All of a sequence, or a shard of it; its length is a multiple of the chunk size."""
        q, k, v, a = self.inputs(x, jnp.int32(0), axis_name)
        decay = partial(pallas_ops.chunk_cumsum_decay, chunk_size=self.chunk_size)
        since = decay(a)  # from the chunk's begin, inclusive
        until = decay(a, reverse=True, shift="chunk")
        chunked = x.shape[0], -1, self.chunk_size
        q, k, v, since, until = (y.reshape(*chunked, *y.shape[2:]) for y in (q, k, v, since, until))
        near = jnp.exp(since[:, :, :, None] - since[:, :, None])  # [B, chunks, i, j, H]
        causal = jnp.tri(self.chunk_size, dtype=bool)[None, None, :, :, None]
        near = jnp.where(causal, near, 0)
        out = jnp.einsum("bcihd,bcjhd,bcijh,bcjhe->bcihe", q, k, near, v)
        new = jnp.einsum("bcjhd,bcjh,bcjhe->cbhde", k, jnp.exp(until), v)
        fade = jnp.moveaxis(jnp.exp(since[:, :, -1]), 1, 0)[..., None, None]
        before = states_before(fade, new, axis_name)
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


def states_before(fade: jax.Array, new: jax.Array, axis_name: str | None) -> jax.Array:
    """The state before each chunk, of states s_c = fade_c s_{c-1} + new_c.

    A shard starts from the state after the shards before it: one exchange of their totals.
    """

    def then(first: States, second: States) -> States:
        return first[0] * second[0], second[0] * first[1] + second[1]

    def exclusive(xs: States) -> tuple[jax.Array, ...]:
        none = jnp.ones_like(xs[0][:1]), jnp.zeros_like(xs[1][:1])
        sums: States = jax.lax.associative_scan(then, xs)
        return tuple(jnp.concatenate([x, y[:-1]]) for x, y in zip(none, sums, strict=True))

    fades, before = exclusive((fade, new))
    if axis_name is None:
        return before
    last = then((fades[-1], before[-1]), (fade[-1], new[-1]))
    _, starts = exclusive(jax.lax.all_gather(last, axis_name))
    return before + fades * starts[jax.lax.axis_index(axis_name)][None]


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


def main_sharded(*, batch: int = 2, tokens: int = 64) -> jax.Array:
    """The layer's output, the sequence sharded over all devices; checked against that of one."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("sequence",), axis_types=auto)
    layer = LinearAttention(width=32, heads=4, dim=8, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (batch, tokens, 32))
    over = jax.shard_map(
        partial(layer, axis_name="sequence"),
        mesh=mesh,
        in_specs=P(None, "sequence"),
        out_specs=P(None, "sequence"),
    )
    with jax.default_matmul_precision("float32"):
        out: jax.Array = jax.jit(over)(x)
        whole = jax.jit(layer)(x)
    if not jnp.allclose(out, whole, atol=1e-5):
        raise AssertionError("with the sequence sharded it differs")
    return out


if __name__ == "__main__":
    print(main().shape)
    print(main_sharded(tokens=64 * jax.device_count()).shape)
