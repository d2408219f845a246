"""The ops, as the tests that hold for all of them see them: a new op is a new row of `OPS`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops.ops.logcumsumexp.vjp import RESIDUALS as LOGCUMSUMEXP_RESIDUALS
from pallas_ops.ops.lrpe_cosine.vjp import RESIDUALS as LRPE_COSINE_RESIDUALS
from pallas_ops.ops.tpa_decode.vjp import RESIDUALS as TPA_DECODE_RESIDUALS
from tests.support import on_device, on_host, random_array, random_cotangents

Arrays = tuple[Any, ...]
Layout = Mapping[str, Any]  # from array axes to the mesh axes they are split over
TERMS = 64  # more numbers than are added up anywhere in the tiny operands' results


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TestedOp:
    """A public function of arrays, floating ones first, and facts that tests need.

    Axes are named as in an einsum, one letter-word an axis: "b m h".
    """

    __test__ = False

    name: str
    fn: Callable[..., Arrays]  # fn(*operands, implementation)
    operands: tuple[str, ...]
    results: tuple[str, ...]
    sizes: Mapping[str, int]  # tiny ones, to run
    large: Mapping[str, int]  # as in earnest, to compile
    integers: Mapping[int, tuple[int, int]]  # the operands that are integers, and their range
    kernels: tuple[str, ...]  # of the forward pass, without `pallas_ops_`
    gradient_kernels: tuple[str, ...]  # and of the backward pass
    residuals: str | None  # what `jax.checkpoint` can keep, if anything is saved
    split: tuple[str, ...]  # axes that stay sharded
    unsharded: tuple[str, ...]  # axes that are gathered
    merged: tuple[str, ...] = ()  # axes whose shards exchange what they have in common
    exchanges: int = 1  # of a gradient over such an axis, sums of gradients aside

    @property
    def num_floating(self) -> int:
        return len(self.operands) - len(self.integers)

    @property
    def argnums(self) -> tuple[int, ...]:
        """The operands that have gradients."""
        return tuple(range(self.num_floating))

    def sums_gradients(self, layout: Layout) -> bool:
        """Whether some operand has not all of the split axes: its gradient is summed over them."""
        return any(axis not in self.operands[i].split() for axis in layout for i in self.argnums)

    def argument(
        self, rng: np.random.Generator, i: int, dtype: Any = jnp.float32, **sizes: int
    ) -> jax.Array:
        """The random i-th operand, of other sizes where given."""
        shape = tuple((dict(self.sizes) | sizes)[axis] for axis in self.operands[i].split())
        if i in self.integers:
            return on_device(rng.integers(*self.integers[i], shape, endpoint=True), np.int32)
        return random_array(rng, shape, dtype)

    def arguments(
        self, rng: np.random.Generator, dtype: Any = jnp.float32, **sizes: int
    ) -> tuple[jax.Array, ...]:
        """All operands."""
        return tuple(self.argument(rng, i, dtype, **sizes) for i in range(len(self.operands)))

    def even_arguments(self, rng: np.random.Generator) -> Arrays:
        """All operands, NumPy's, of sizes that can be split over eight devices."""
        even = dict.fromkeys(self.split + self.merged + self.unsharded, 8)
        return tuple(on_host(self.arguments(rng, **even)))

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


def random_weights(rng: np.random.Generator, op: TestedOp, xs: Arrays) -> Any:
    """Cotangents of the op's results, NumPy's."""
    return on_host(random_cotangents(rng, jax.eval_shape(compiled(op, "xla"), *xs)))


def weighted(fn: Callable[..., Arrays], weights: Arrays) -> Callable[..., jax.Array]:
    """A scalar function whose gradient is the pullback of `weights`."""

    def loss(*xs: Any) -> jax.Array:
        return functools.reduce(jnp.add, map(jnp.vdot, fn(*xs), weights))

    return loss


def with_pullback(op: TestedOp, fn: Callable[..., Arrays]) -> Callable[..., Any]:
    """From weights of the results and the operands to the results, and gradients of `weighted`."""
    n = op.num_floating

    def run(weights: Any, xs: Any) -> Any:
        out, pull = jax.vjp(lambda *ys: fn(*ys, *xs[n:]), *xs[:n])
        return out, pull(weights)

    return run


def pullback(op: TestedOp, fn: Callable[..., Arrays]) -> Callable[..., Any]:
    """The gradients alone."""
    return lambda weights, xs: with_pullback(op, fn)(weights, xs)[1]


def cpu_mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """The eight CPUs that tests have."""
    return Mesh(np.reshape(jax.devices("cpu"), (4, 2)), ("x", "y"), axis_types=(kind, kind))


def specs(axes: Sequence[str], layout: Layout) -> tuple[P, ...]:
    """How arrays of these axes are sharded."""
    return tuple(P(*(layout.get(axis) for axis in x.split())) for x in axes)


def words(x: Any) -> str:
    """An id of an op, of a layout, or of an implementation."""
    if x is None or isinstance(x, str):
        return str(x)
    return getattr(x, "name", None) or "-".join(f"{a}_{''.join(names)}" for a, names in x.items())


def _tpa_decode(*operands: jax.Array, implementation: Any = None) -> Arrays:
    *factors, lengths = operands
    return pallas_ops.tpa_decode_with_lse(*factors, lengths=lengths, implementation=implementation)


def _logcumsumexp(x: jax.Array, state: jax.Array, *, implementation: Any = None) -> Arrays:
    return pallas_ops.logcumsumexp_with_state(
        x, axis=1, initial_state=state[:, None], implementation=implementation
    )


def _lrpe_cosine(
    x: jax.Array, theta: jax.Array, offset: jax.Array, *, implementation: Any = None
) -> Arrays:
    options: Any = dict(act="softmax", axis=1, implementation=implementation)
    return (pallas_ops.lrpe_cosine(x, theta, offset=offset, **options),)


def _chunk_cumsum_decay(x: jax.Array, bounds: jax.Array, implementation: Any = None) -> Arrays:
    out = pallas_ops.chunk_cumsum_decay(
        x,
        chunk_size=8,
        reverse=True,
        shift="sequence",
        cu_seqlens=bounds,
        implementation=implementation,
    )
    return (out,)


OPS = [
    TestedOp(
        name="tpa_decode",
        fn=_tpa_decode,
        operands=("b n h r", "b m h", "b m h", "b n r d", "b m d", "b m e", "b"),
        results=("b n h e", "b n h"),
        sizes=dict(b=2, n=2, m=33, h=3, r=2, d=4, e=5),
        large=dict(b=8, n=1, m=32768, h=32, r=16, d=128, e=128),
        integers={6: (2, 33)},  # every query sees a key
        kernels=("tpa_decode", "tpa_decode_merge"),
        gradient_kernels=("tpa_decode_backward", "tpa_decode_sum"),
        residuals=TPA_DECODE_RESIDUALS,
        split=("b", "h", "e"),
        unsharded=("n", "r", "d"),
        merged=("m",),
    ),
    TestedOp(
        name="logcumsumexp",
        fn=_logcumsumexp,
        operands=("b n c", "b c"),
        results=("b n c", "b one c"),
        sizes=dict(b=2, n=17, c=3, one=1),
        large=dict(b=12, n=8192, c=2048, one=1),
        integers={},
        kernels=("logcumsumexp",),
        gradient_kernels=("logcumsumexp_backward",),
        residuals=LOGCUMSUMEXP_RESIDUALS,
        split=("b", "c"),
        unsharded=(),
        merged=("n",),
        exchanges=4,  # three where shards begin at tiles
    ),
    TestedOp(
        name="lrpe_cosine",
        fn=_lrpe_cosine,
        operands=("b n h d", "h d", "b"),
        results=("b n h e",),
        sizes=dict(b=2, n=5, h=3, d=4, e=8),
        large=dict(b=12, n=8192, h=12, d=128, e=256),
        integers={2: (0, 100)},
        kernels=("lrpe_cosine_softmax", "lrpe_cosine"),
        gradient_kernels=("lrpe_cosine_mean", "lrpe_cosine_gradients"),
        residuals=LRPE_COSINE_RESIDUALS,
        split=("b", "h"),
        unsharded=(),
        merged=("n",),
    ),
    TestedOp(
        name="chunk_cumsum_decay",
        fn=_chunk_cumsum_decay,
        operands=("b n c", "s"),
        results=("b n c",),
        sizes=dict(b=2, n=21, c=3, s=4),
        large=dict(b=8, n=32768, c=2048, s=65),
        integers={1: (0, 21)},  # which the op takes for ascending
        kernels=("chunk_cumsum_decay",),
        gradient_kernels=("chunk_cumsum_decay_backward",),
        residuals=None,
        split=("b", "c"),
        unsharded=(),
        merged=("n",),
    ),
]
TPA_DECODE = OPS[0]
every_op = pytest.mark.parametrize("op", OPS, ids=words)
