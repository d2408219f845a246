"""What stands around the dispatched call: a default derivative, vmap, and sharding.

From the outside in: `custom_vjp` (the reference's derivative, so that every kernel can be
differentiated any number of times; an op with a backward kernel puts its own rule around this
one), `custom_vmap` (records the batched operands), `custom_partitioning` (free axes stay sharded
under jit), and the dispatch primitive.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_ops.core import card, dispatch, shards
from pallas_ops.core.dispatch import Arrays, Bound, Implementation, Op, Run
from pallas_ops.core.layout import Axes, named, shardy_rule, spec, split_of

T = TypeVar("T", bound=jax.Array | None)


def call(
    op: Op,
    *operands: jax.Array | None,
    implementation: Implementation | None,
    alone: bool = False,
    **static: Hashable,
) -> tuple[jax.Array, ...]:
    """Runs `op`; the arrays have to vary over the same mesh axes (`shards.unify`).

    `alone`: the arrays are those of one device, and nothing here is differentiated. "xla" is the
    reference as it stands, which JAX differentiates.
    """
    present = tuple(x is not None for x in operands)
    bound = Bound(op, implementation, tuple(sorted(static.items())), present)
    xs = [x for x in operands if x is not None]
    if implementation == "xla":
        return _reference(bound, *xs)
    run = _vmapped(bound, alone=True) if alone else _differentiable(bound)
    return tuple(run(*xs))


@functools.lru_cache(maxsize=1024)
def _differentiable(bound: Bound) -> Run:
    @jax.custom_vjp
    def run(*xs: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(_vmapped(bound)(*xs))

    def forward(*xs: jax.Array) -> tuple[Any, Arrays]:
        # The reference's derivative of a total holds for the reference's pivot.
        return (_reference(bound, *xs) if bound.op.has_pairs else run(*xs)), xs

    def backward(xs: Arrays, cotangents: Arrays) -> tuple[Any, ...]:
        outs, pull = jax.vjp(partial(_reference, bound), *xs)
        return tuple(pull(tuple(map(reshard_like, cotangents, outs))))

    run.defvjp(forward, backward)
    return run


def _reference(bound: Bound, *xs: jax.Array) -> tuple[jax.Array, ...]:
    """The reference; where types say how arrays are split, all are split alike."""
    if not any(map(is_explicit, xs)):
        return bound.reference(*xs)
    mesh, split, ys = _split_alike(bound, xs)
    to = (NamedSharding(mesh, spec(split, axes)) for axes in bound.axes()[1])
    return tuple(map(jax.sharding.reshard, bound.reference(*ys), to))


def _split_alike(bound: Bound, xs: Arrays) -> tuple[Any, dict[str, Axes], list[jax.Array]]:
    """The mesh, how it splits each axis, and the operands resharded so.

    An axis is split in all operands as in the first one that splits it.
    """
    ins, shardings = bound.axes()[0], [_sharding(x) for x in xs]
    mesh, *others = {s.mesh for s in shardings if not s.mesh.empty}
    if others:
        raise ValueError(f"operands are sharded over the meshes {[mesh, *others]}; accepted: one")
    split = split_of(bound, [x.shape for x in xs], shardings, ins)
    to = (NamedSharding(mesh, spec(split, axes)) for axes in ins)
    return mesh, split, [*map(jax.sharding.reshard, xs, to)]


@functools.lru_cache(maxsize=1024)
def _vmapped(bound: Bound, *, alone: bool = False) -> Run:
    @custom_vmap
    def run(*xs: jax.Array) -> Any:
        if not alone and any(map(is_explicit, xs)):
            return _explicit(bound, xs)
        if alone or _is_partitioned_otherwise():
            return _bind(bound, *xs)
        return _partitioned(bound)(*xs)

    @run.def_vmap
    def _(_: int, batched: Sequence[bool], *xs: jax.Array) -> Any:
        lifted = dataclasses.replace(bound, levels=(*bound.levels, tuple(batched)))
        return _vmapped(lifted, alone=alone)(*xs), (True,) * len(bound.op.results)

    return run


@functools.lru_cache(maxsize=1024)
def _partitioned(bound: Bound) -> Run:
    ins, outs = bound.axes()

    def split_in(mesh: Mesh, operands: Any) -> dict[str, Axes]:
        shardings = [named(x.sharding, mesh, x.ndim) for x in operands]
        return split_of(bound, [x.shape for x in operands], shardings, ins)

    def shardings(mesh: Mesh, split: dict[str, Axes], arrays: Sequence[str]) -> Any:
        return tuple(NamedSharding(mesh, spec(split, axes)) for axes in arrays)

    def partition(mesh: Mesh, operands: Any, _: Any) -> Any:
        split = split_in(mesh, operands)
        results, arguments = (shardings(mesh, split, axes) for axes in (outs, ins))
        return mesh, _outside_of_meshes(_per_device(bound, split)), results, arguments

    def infer(mesh: Mesh, operands: Any, _: Any) -> Any:
        return shardings(mesh, split_in(mesh, operands), outs)

    wrapped = custom_partitioning(partial(_bind, bound))
    wrapped.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,  # asked by GSPMD alone, Shardy's predecessor
        decode_shardings=False,  # JAX cannot where a reshape has cut a mesh axis in two
        sharding_rule=partial(shardy_rule, bound),
    )
    return wrapped


def _outside_of_meshes(run: Run) -> Run:
    """`run` without the axes of the mesh that is set (explicit ones, within `auto_axes`).

    JAX would annotate one device's program with shardings over them, and XLA, which has partitioned
    already, cannot compile such annotations.
    """

    def lowered(*xs: jax.Array) -> tuple[jax.Array, ...]:
        with card.lowered_for(card.device_of_mesh()):
            return run(*xs)

    return lowered


def _explicit(bound: Bound, xs: Arrays) -> tuple[jax.Array, ...]:
    """The call on arrays whose types say how they are sharded (over explicit mesh axes)."""
    (ins, outs), (mesh, split, ys) = bound.axes(), _split_alike(bound, xs)
    mapped: Run = jax.shard_map(
        _per_device(bound, split),
        mesh=mesh,
        in_specs=tuple(spec(split, axes) for axes in ins),
        out_specs=tuple(spec(split, axes) for axes in outs),
        check_vma=False,  # as under jit: the op says what is summed
    )
    results = mapped(*ys)
    return shards.unify(*results, *xs)[: len(results)]


def _is_partitioned_otherwise() -> bool:
    """Whether `custom_partitioning` cannot be used here.

    Inside a `jax.shard_map` of some mesh axes that leaves others automatic, XLA partitions what is
    `jax.numpy`, and gathers for a kernel what is split over the automatic axes. Where all mesh axes
    are explicit, arrays whose types say nothing are on every device.
    """
    types = set(jax.sharding.get_abstract_mesh().axis_types)
    return is_partly_manual() or types == {AxisType.Explicit}


def is_partly_manual() -> bool:
    """Whether this is inside a `jax.shard_map` that leaves some mesh axes automatic."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.manual_axes) and AxisType.Auto in mesh.axis_types


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class TypeOf:
    """An operand's sharding: all that a backward rule needs of it, so the operand is not saved."""

    sharding: Any


def is_explicit(x: jax.Array | TypeOf) -> bool:
    """Whether the type says how the array is sharded."""
    return AxisType.Explicit in _sharding(x).mesh.axis_types


def _sharding(x: jax.Array | TypeOf) -> Any:
    return x.sharding if isinstance(x, TypeOf) else jax.typeof(x).sharding


def reshard_like(x: T, operand: jax.Array | TypeOf | None) -> T:
    """`x` with the sharding in the operand's type, as a gradient must have it."""
    if x is None or operand is None or not is_explicit(operand):
        return x
    return jax.sharding.reshard(x, _sharding(operand))


def gathered(x: jax.Array, axis: int) -> jax.Array:
    """`x`, resharded so that no explicit mesh axis splits `axis`."""
    sharding = _sharding(x)
    if not is_explicit(x) or sharding.spec[axis] is None:
        return x
    spec = [None if i == axis else entry for i, entry in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def _bind(bound: Bound, *xs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(dispatch.dispatch_p.bind(*xs, bound=bound))


def _per_device(bound: Bound, split: Mapping[str, Axes]) -> Run:
    """The call on a device's arrays; what shards exchange is mapped over by JAX's own rules."""
    on_shard: Run = partial(_bind, bound)
    if bound.op.shards is not None and bound.op.shards[0] in split:
        axis, of_shard = bound.op.shards
        run = partial(call, implementation=bound.implementation, alone=True)
        on_shard = bound.mapped(partial(of_shard, run, split[axis]))

    def per_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _sum_shards(bound, split, on_shard(*_add_once(bound, split, arrays)))

    return per_device


def _add_once(bound: Bound, split: Mapping[str, Axes], xs: Arrays) -> Arrays:
    """Zeroes the operands that enter a partial sum, on all shards but the first."""
    operands = bound.fill(xs)
    for position, axis in bound.op.added_once:
        x = operands[position]
        if x is not None and axis in split:
            first = jax.lax.axis_index(split[axis]) == 0
            operands[position] = jnp.where(first, x, jnp.zeros_like(x))
    return [x for x in operands if x is not None]


def _sum_shards(bound: Bound, split: Mapping[str, Axes], results: Arrays) -> tuple[jax.Array, ...]:
    """Adds up the results of which each shard holds a part."""
    summed = bound.op.summed or ("",) * len(results)
    axes = [tuple(m for a in names.split() for m in split.get(a, ())) for names in summed]
    return tuple(jax.lax.psum(r, a) if a else r for r, a in zip(results, axes, strict=True))
