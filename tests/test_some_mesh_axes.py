"""Meshes of which some axes are automatic, explicit or manual: `axis_name=`, and `auto_axes`."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests.ops import cpu_mesh
from tests.support import assert_close, on_host, random_array

Rng = np.random.Generator
OPS: dict[str, Callable[..., jax.Array]] = dict(
    logcumsumexp=partial(pallas_ops.logcumsumexp, axis=1),
    short_chunks=partial(pallas_ops.chunk_cumsum_decay, chunk_size=5),
    long_chunks=partial(pallas_ops.chunk_cumsum_decay, chunk_size=16, reverse=True),
    packed=partial(pallas_ops.chunk_cumsum_decay, chunk_size=5, cu_seqlens=np.array([1, 3, 12])),
    softmax=lambda x, **kw: pallas_ops.lrpe_cosine(
        x, jnp.ones((1, 2)), act="softmax", axis=1, **kw
    ),
)


def both(fn: Callable[..., jax.Array], x: Any) -> Any:
    out, pull = jax.vjp(fn, x)
    return out, *pull(jnp.sin(out))


@functools.cache
def one_device(name: str) -> Any:
    return jax.jit(partial(both, partial(OPS[name], implementation="xla")))


SPLIT = [(AxisType.Auto, P("y", "x")), (AxisType.Explicit, P("y", "x"))]
SPLIT += [(AxisType.Explicit, P(None, "x", "y"))]


@pytest.mark.parametrize(("kind", "spec"), SPLIT, ids=["auto", "explicit batch", "columns"])
@pytest.mark.parametrize("name", OPS)
def test_sequences_over_one_mesh_axis(rng: Rng, name: str, kind: AxisType, spec: P) -> None:
    """With gradients; the other axis splits the batch, or columns."""
    op, x, mesh = OPS[name], on_host(random_array(rng, (4, 16, 2))), cpu_mesh(kind)

    want = one_device(name)(x)
    mapped = jax.shard_map(
        partial(op, axis_name="x"),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
        axis_names={"x"},
    )
    with jax.set_mesh(mesh):
        got = jax.jit(partial(both, mapped))(jax.device_put(x, NamedSharding(mesh, spec)))
    assert_close(got, want, terms=16)


def test_positions_of_all_shards_are_counted_in_32_bits() -> None:
    sums: Any = partial(pallas_ops.chunk_cumsum_decay, axis_name="x")

    def decode(x: jax.Array) -> jax.Array:
        aq = x[:, :1, :, None]
        return pallas_ops.tpa_decode(aq, x, x, None, x, x, window=9, axis_name="x")

    def rotate(x: jax.Array) -> jax.Array:
        return pallas_ops.lrpe_cosine(x, jnp.ones((1, 1)), axis_name="x")

    for fn, shape in (sums, (1, 2**31)), (decode, (1, 2**31, 1)), (rotate, (1, 2**31, 1, 1)):
        mapped = jax.shard_map(fn, mesh=cpu_mesh(), in_specs=P(None, "x"), out_specs=P(None, "x"))
        with pytest.raises(ValueError, match="all shards have 2147483648 positions; accepted: at"):
            jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, "float32"))


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_all_axes_made_automatic(rng: Rng, implementation: Any) -> None:
    """By `auto_axes`, the way out of explicit axes."""
    fn: Any = partial(pallas_ops.logcumsumexp, axis=1, implementation=implementation)
    loss: Any = lambda fn, x: jnp.square(fn(x)).sum()  # noqa: E731
    mesh, x = cpu_mesh(AxisType.Explicit), random_array(rng, (4, 8, 4))
    want = jax.jit(jax.value_and_grad(partial(loss, fn)))(x)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("x", "y")))
        automatic = jax.sharding.auto_axes(fn, out_sharding=P("x", "y"))
        got = jax.jit(jax.value_and_grad(partial(loss, automatic)))(x)
    assert_close(got, want)
