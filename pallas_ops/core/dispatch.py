"""Kernel or reference, decided per platform when code is lowered.

`Bound` is a call with everything but its arrays: what to run, how, and how it was vmapped. It is
the one parameter of the dispatch primitive. On a CPU the kernel is not even traced, so one traced
function serves, and exports for, every platform.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from pallas_ops.core import backend, card, launch, shards

Implementation = Literal["triton", "xla", "interpret"]
Arrays = Sequence[jax.Array]
Run = Callable[..., tuple[jax.Array, ...]]  # of arrays, absent ones None, and static keywords


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Op:
    """One function of arrays, as a kernel and as a reference, and how its axes may be split.

    `kernel` and `reference` take the operands (None for an absent one) and the static keywords,
    and return a tuple. `operands` and `results` name the axes of each array, one word an axis,
    as in an einsum: ("b m h", "b m d"). An operand whose first axis is `b` may be batched
    along it.

    `shards` is (axis, of_shard). Where that axis is sharded, `of_shard(run, mesh_axes, *operands,
    **static)` computes one shard's part of the results, and may exchange small arrays with others.
    `run(op, *operands, **static)` runs an op on this shard's arrays alone.

    `tiles` is (positions axis, tiles axis, positions of a tile), for arrays with one entry a tile.
    Where every shard begins at a tile, the tiles axis is sharded like the positions axis.

    `has_pairs`: operands or results are pairs (pivot, total). Kernel and reference may choose other
    pivots, and the reference's derivative holds for its own: a differentiated call runs it alone.
    """

    name: str
    kernel: Run
    reference: Run
    operands: tuple[str, ...]
    results: tuple[str, ...]
    unsharded: tuple[str, ...]  # axes that every device needs in full
    summed: tuple[str, ...] | None = None  # per result: axes whose shards hold partial sums
    added_once: tuple[tuple[int, str], ...] = ()  # (operand's index, axis): 0 but on shard 0
    shards: tuple[str, Run] | None = None
    tiles: tuple[str, str, int] | None = None
    has_pairs: bool = False


@dataclasses.dataclass(frozen=True)
class Bound:
    """An `Op` with its static arguments, present operands and vmapped levels.

    A level says which operands `jax.vmap` gave a new leading axis; the innermost comes first.
    """

    op: Op
    implementation: Implementation | None
    static: tuple[tuple[str, Hashable], ...]
    present: tuple[bool, ...]
    levels: tuple[tuple[bool, ...], ...] = ()

    def fill(self, xs: Arrays) -> list[jax.Array | None]:
        """The operands in their places, None where absent."""
        it = iter(xs)
        return [next(it) if here else None for here in self.present]

    def axes(self) -> tuple[list[str], list[str]]:
        """The axis names of the present operands and of the results, vmapped levels included."""
        ins, outs = list(itertools.compress(self.op.operands, self.present)), list(self.op.results)
        for i, batched in enumerate(self.levels):
            ins = [f"v{i} {a}" if b else a for a, b in zip(ins, batched, strict=True)]
            outs = [f"v{i} {a}" for a in outs]
        return ins, outs

    def called(self, function: Run) -> Run:
        """`function` of the present operands alone: None and static arguments are filled in."""
        return lambda *xs: function(*self.fill(xs), **dict(self.static))

    def mapped(self, function: Run) -> Run:
        """`called`, vmapped by JAX's own rules."""
        return functools.reduce(_vmap, self.levels, self.called(function))

    def reference(self, *xs: jax.Array) -> tuple[jax.Array, ...]:
        return self.mapped(self.op.reference)(*xs)

    def kernel(self, *xs: jax.Array) -> tuple[jax.Array, ...]:
        if not all(x.size for x in xs):  # a vmapped axis of size 0
            return self.reference(*xs)
        backend.require()
        call = self.called(self.op.kernel)
        has_b = [_has_b(a) for a in itertools.compress(self.op.operands, self.present)]
        foldable = all(map(_has_b, self.op.results))
        for batched in self.levels:
            # A vmap of exactly the operands that have `b` makes a longer batch: no new grid axis,
            # and the launch is chosen for the batch it really has.
            foldable = foldable and list(batched) == has_b
            call = (_fold if foldable else _vmap)(call, batched)
        # Kernels use no 64-bit numbers; in x64 mode their constants and indices would be 64-bit.
        with launch.interpreted(self.implementation == "interpret"), jax.enable_x64(False):
            card.require()
            return call(*xs)


def _has_b(axes: str) -> bool:
    return axes.split(maxsplit=1)[0] == "b"


def _fold(call: Run, batched: Sequence[bool]) -> Run:
    def folded(*xs: jax.Array) -> tuple[jax.Array, ...]:
        size = next(x.shape[0] for x, b in zip(xs, batched, strict=True) if b)
        flat = [x.reshape(-1, *x.shape[2:]) if b else x for x, b in zip(xs, batched, strict=True)]
        return tuple(o.reshape(size, -1, *o.shape[1:]) for o in call(*flat))

    return folded


def _vmap(call: Run, batched: Sequence[bool]) -> Run:
    return jax.vmap(call, in_axes=[0 if b else None for b in batched])


dispatch_p = Primitive("pallas_ops_dispatch")
dispatch_p.multiple_results = True


def _abstract(*avals: ShapedArray, bound: Bound) -> list[ShapedArray]:
    results = _result_shapes(bound, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    varying = shards.varying_axes(*avals)
    if not varying:
        return [ShapedArray(x.shape, x.dtype) for x in results]
    mesh, of_type = jax.sharding.get_abstract_mesh(), ManualAxisType(varying=varying)

    def aval(x: jax.ShapeDtypeStruct) -> ShapedArray:
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * x.ndim))
        return ShapedArray(x.shape, x.dtype, sharding=sharding, manual_axis_type=of_type)

    return list(map(aval, results))


dispatch_p.def_abstract_eval(_abstract)


@functools.lru_cache(maxsize=1024)
def _result_shapes(bound: Bound, *structs: jax.ShapeDtypeStruct) -> list[Any]:
    return list(jax.eval_shape(bound.reference, *structs))


_jitted = jax.jit(dispatch_p.bind, static_argnames="bound")


def _eager(*xs: jax.Array, bound: Bound) -> Any:
    # Else JAX, on finding a NaN, would run the jitted call again op by op, and so end here again.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        return _jitted(*xs, bound=bound)


dispatch_p.def_impl(_eager)


def _lower_for_cuda(*xs: jax.Array, bound: Bound) -> tuple[jax.Array, ...]:
    try:
        return bound.kernel(*xs)
    except backend.NoKernelError as error:
        backend.fall_back(bound.op.name, bound.implementation, error)
        return bound.reference(*xs)


def _lower_elsewhere(*xs: jax.Array, bound: Bound) -> tuple[jax.Array, ...]:
    if bound.implementation == "interpret":
        return bound.kernel(*xs)
    if bound.implementation == "triton":
        raise ValueError(
            f'{bound.op.name}: implementation="triton" needs an NVIDIA GPU, and this code is being '
            "lowered for another platform; pass implementation=None (the kernel on NVIDIA GPUs, "
            'jax.numpy elsewhere), "xla" (jax.numpy) or "interpret" (the kernel, interpreted)'
        )
    return bound.reference(*xs)


def _rule(
    run: Run, context: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[..., Any]:
    """Lowers `run` on arrays of plain types, in a context.

    What is lowered does not say what varies over which mesh axes (`jax.shard_map`): the interpreter
    of kernels mixes varying blocks with constants, which JAX would refuse.
    """
    lower = mlir.lower_fun(run, multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *xs: Any, bound: Bound) -> Any:
        avals: Sequence[Any] = ctx.avals_in
        plain = [ShapedArray(a.shape, a.dtype) for a in avals]
        with context():
            return lower(ctx.replace(avals_in=plain), *xs, bound=bound)

    return rule


mlir.register_lowering(dispatch_p, _rule(_lower_elsewhere))
mlir.register_lowering(dispatch_p, _rule(_lower_for_cuda, card.known), platform="cuda")
