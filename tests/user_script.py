"""A user's script: every op with every kind of argument it takes. Checked by mypy and pyright."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import pallas_ops

x = jnp.ones((2, 6, 2, 4))
counts = np.array([2, 3])

assert_type(pallas_ops.chunk_cumsum_decay(x), jax.Array)
assert_type(pallas_ops.chunk_cumsum_decay(np.ones((2, 6)), axis=np.int64(1)), jax.Array)
pallas_ops.chunk_cumsum_decay(x, chunk_size=np.int32(4), reverse=np.True_, shift="chunk")
pallas_ops.chunk_cumsum_decay(x, scale=0.5, cu_seqlens=[0, 2, 6], dtype="float32")
pallas_ops.chunk_cumsum_decay(x, scale=jnp.float32(2), cu_seqlens=counts, dtype=jnp.bfloat16)

assert_type(pallas_ops.logcumsumexp(x, axis=1), jax.Array)
out, state = pallas_ops.logcumsumexp_with_state(x, clip=np.float32(5), reverse=True)
assert_type(state, jax.Array)
pallas_ops.logcumsumexp(x, initial_state=state, implementation="xla")
pallas_ops.logcumsumexp(x, initial_state=0.0, clip=3)


def over_shards(x: jax.Array) -> jax.Array:
    sums = pallas_ops.chunk_cumsum_decay(x, axis_name="x")
    return pallas_ops.lrpe_cosine(sums, np.ones((2, 4)), axis_name=("x", "y"))


theta = np.ones((2, 4), np.float32)
assert_type(pallas_ops.lrpe_cosine(x, theta), jax.Array)
pallas_ops.lrpe_cosine(x, theta, offset=3, act="silu", layout="BNHD")
pallas_ops.lrpe_cosine(x, theta, offset=np.int64(3), act="softmax", axis=-1)
pallas_ops.lrpe_cosine(x, theta, offset=[1, 2])
pallas_ops.lrpe_cosine(x, theta, positions=[0, 1, 2, 3, 4, 5.5])
pallas_ops.md_lrpe_cosine(x, theta, shape=(2, 3), positions=None)
pallas_ops.md_lrpe_cosine(x, theta, shape=counts, num_prefix_tokens=np.int64(0))
pallas_ops.md_lrpe_cosine(x, theta, shape=None, positions=jnp.ones((6, 2)))

a, b = jnp.ones((2, 6, 2)), jnp.ones((2, 6, 4))
factors = (x[:, :1, :, :3], a, a, jnp.ones((2, 1, 3, 4)), b, b)
assert_type(pallas_ops.tpa_decode(*factors), jax.Array)
assert_type(pallas_ops.tpa_decode(*factors, lengths=[1, 2], scale=0.1), jax.Array)
pallas_ops.tpa_decode(*factors, lengths=counts, scale=jnp.float32(1), scale_q=np.float64(2))
attended, lse = pallas_ops.tpa_decode_with_lse(*factors, lengths=5)
assert_type(lse, jax.Array)
written = pallas_ops.tpa_append({"a": a, "b": b}, {"a": a[:, :1], "b": b[:, :1]}, [0, 5])
assert_type(written, dict[str, jax.Array])
table = np.array([[0, 1], [1, 0]])
assert_type(pallas_ops.tpa_append(a, a[:, :1], 3, page_table=table), jax.Array)
small_a, small_b = pallas_ops.quantize_tpa_factors(a, b, "int8")
assert_type(small_b, jax.Array)
queries = factors[0], small_a, small_a, factors[3], small_b, small_b
pallas_ops.tpa_decode(*queries, lengths=[9, 2], page_table=table)
config = pallas_ops.TpaDecodeConfig(block_h=2, num_splits=2)
pallas_ops.tpa_decode(*factors, implementation="interpret", config=config)

assert_type(pallas_ops.reference.logcumsumexp(x, axis=1), jax.Array)
assert_type(pallas_ops.reference.tpa_decode_naive(*factors, lengths=5), jax.Array)
policy = jax.checkpoint_policies.save_only_these_names(*pallas_ops.Residuals)
with pallas_ops.target_gpu("NVIDIA H100"):
    jax.export.export(jax.jit(pallas_ops.logcumsumexp), platforms=["cuda"])
