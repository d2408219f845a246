"""The ops, as the tests that hold for all of them see them: a new op is a new row of `OPS`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops.ops.tpa_decode.vjp import RESIDUALS as TPA_DECODE_RESIDUALS
from tests.support import random_array

Arrays = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TestedOp:
    """A public function of arrays, floating ones first, and facts that tests need.

    Axes are named as in an einsum, one letter-word an axis: "b m h".
    """

    __test__ = False

    name: str  # of the op; its kernel is `pallas_ops_<name>`
    fn: Callable[..., Arrays]  # fn(*operands, implementation)
    operands: tuple[str, ...]
    results: tuple[str, ...]
    sizes: Mapping[str, int]  # tiny ones, to run
    large: Mapping[str, int]  # as in earnest, to compile
    integers: Mapping[int, tuple[int, int]]  # the operands that are integers, and their range
    residuals: str  # what `jax.checkpoint` can keep
    split: tuple[str, ...]  # axes that stay sharded
    whole: tuple[str, ...]  # axes that are gathered

    @property
    def num_floating(self) -> int:
        return len(self.operands) - len(self.integers)

    @property
    def argnums(self) -> tuple[int, ...]:
        """The operands that have gradients."""
        return tuple(range(self.num_floating))

    def argument(
        self, rng: np.random.Generator, i: int, dtype: Any = jnp.float32, **sizes: int
    ) -> jax.Array:
        """The random i-th operand, of other sizes where given."""
        shape = tuple((dict(self.sizes) | sizes)[axis] for axis in self.operands[i].split())
        if i in self.integers:
            return jnp.asarray(rng.integers(*self.integers[i], shape, endpoint=True), jnp.int32)
        return random_array(rng, shape, dtype)

    def arguments(
        self, rng: np.random.Generator, dtype: Any = jnp.float32, **sizes: int
    ) -> tuple[jax.Array, ...]:
        """All operands."""
        return tuple(self.argument(rng, i, dtype, **sizes) for i in range(len(self.operands)))

    def structs(self, dtype: Any, **sizes: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The large operands, of other sizes where given, to compile for."""
        sizes = {**self.large, **sizes}
        return tuple(
            jax.ShapeDtypeStruct(
                [sizes[axis] for axis in axes.split()], jnp.int32 if i in self.integers else dtype
            )
            for i, axes in enumerate(self.operands)
        )


@functools.cache
def compiled(op: TestedOp, implementation: str | None) -> Any:
    """The op of its operands, jitted; one function, so that its compilations are shared."""
    return jax.jit(functools.partial(op.fn, implementation=implementation))


def weighted(fn: Callable[..., Arrays], weights: Arrays) -> Callable[..., jax.Array]:
    """A scalar function whose gradient is the pullback of `weights`."""

    def loss(*xs: Any) -> jax.Array:
        return functools.reduce(jnp.add, map(jnp.vdot, fn(*xs), weights))

    return loss


def spec(axes: str, split: Mapping[str, Any]) -> P:
    """How an array of these axes is sharded, where `split` maps axes to mesh axes."""
    return P(*(split.get(axis) for axis in axes.split()))


def _tpa_decode(*operands: jax.Array, implementation: Any = None) -> Arrays:
    *factors, lengths = operands
    return pallas_ops.tpa_decode_with_lse(*factors, lengths=lengths, implementation=implementation)


OPS = [
    TestedOp(
        name="tpa_decode",
        fn=_tpa_decode,
        operands=("b n h r", "b m h", "b m h", "b n r d", "b m d", "b m e", "b"),
        results=("b n h e", "b n h"),
        sizes=dict(b=2, n=2, m=33, h=3, r=2, d=4, e=5),
        large=dict(b=8, n=1, m=32768, h=32, r=16, d=128, e=128),
        integers={6: (2, 33)},  # every query sees a key
        residuals=TPA_DECODE_RESIDUALS,
        split=("b", "h", "e"),
        whole=("n", "m", "r", "d"),
    ),
]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
