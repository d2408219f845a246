"""A minimal gated recurrent unit (https://arxiv.org/abs/2410.01201), in parallel over a sequence.

`python examples/min_gru.py` runs it over a sequence in two pieces, the second starting from the
state of the first, and checks that stepping through comes to the same. Then it is trained with its
sequence sharded over all devices, which exchange one state each in a pass.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import pallas_ops


class MinGru(nnx.Module):
    """h_t = (1 - z_t) h_{t-1} + z_t c_t with z = sigmoid(gate(x)) and c = exp(candidate(x)) > 0."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.gate = nnx.Linear(width, width, rngs=rngs)
        self.candidate = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log h [B, N, width], and its last position [B, 1, width] as the state.

        With A the running sum of log(1 - z): log h_t = A_t + log(h_0 + sum exp(log(z c) - A)).
        """
        gate = self.gate(x)
        kept = pallas_ops.chunk_cumsum_decay(-jax.nn.softplus(gate), chunk_size=x.shape[1])
        new = -jax.nn.softplus(-gate) + self.candidate(x) - kept
        log_h = kept + pallas_ops.logcumsumexp(new, axis=1, initial_state=state)
        return log_h, log_h[:, -1:]

    def step(self, x: jax.Array, h: jax.Array) -> jax.Array:
        """The definition: h [B, width] after x [B, width]."""
        z = jax.nn.sigmoid(self.gate(x))
        return (1 - z) * h + z * jnp.exp(self.candidate(x))


def main(*, batch: int = 2, tokens: int = 50) -> jax.Array:
    """h [batch, tokens, width]."""
    with jax.default_matmul_precision("float32"):  # not TF32, a GPU's default: for the check
        layer = MinGru(16, rngs=nnx.Rngs(0))
        run = nnx.jit(lambda layer, x, state: layer(x, state))
        x = jax.random.normal(jax.random.key(1), (batch, tokens, 16))
        first, state = run(layer, x[:, :30], jnp.full((batch, 1, 16), -jnp.inf))
        second, _ = run(layer, x[:, 30:], state)
        out = jnp.exp(jnp.concatenate([first, second], axis=1))
        h = jnp.zeros((batch, 16))
        for t in range(tokens):
            h = layer.step(x[:, t], h)
            if not jnp.allclose(h, out[:, t], rtol=1e-4):
                raise AssertionError("in parallel and step by step differ")
        return out


def train(
    *, num_devices: int = 1, steps: int = 10, batch: int = 2, tokens: int = 64
) -> list[float]:
    """The losses of learning a running mean, the sequence sharded over so many devices."""
    mesh = jax.make_mesh((num_devices,), ("sequence",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    x = jax.random.normal(jax.random.key(1), (batch, tokens, 16))
    target = jnp.cumsum(jnp.exp(x), axis=1) / jnp.arange(1.0, tokens + 1)[None, :, None]
    x, target = (jax.device_put(y, sharded) for y in (x, target))
    graph, weights = nnx.split(MinGru(16, rngs=nnx.Rngs(0)))

    @jax.jit
    def step(weights: Any, x: jax.Array, target: jax.Array) -> tuple[Any, jax.Array]:
        def loss(weights: Any) -> jax.Array:
            log_h, _ = nnx.merge(graph, weights)(x, jnp.full((batch, 1, 16), -jnp.inf))
            return jnp.mean((jnp.exp(log_h) - target) ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value

    losses = []
    for _ in range(steps):
        weights, value = step(weights, x, target)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    print(main().shape)
    print(train(num_devices=jax.device_count()))
