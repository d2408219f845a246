"""How the arrays of a call are split over the axes of a mesh."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_ops.core.dispatch import Bound

Axes = tuple[str, ...]


def named(sharding: Any, mesh: Mesh, ndim: int) -> NamedSharding | None:
    """The sharding in names of mesh axes; an axis split over part of a mesh axis has no entry.

    The mesh is empty for arrays of one device that were made before `jax.set_mesh`.
    """
    if sharding is None or mesh.empty:
        return None
    size = mesh.size  # a shape that any number of shards divides
    slices = sharding.devices_indices_map((size,) * ndim)
    at = np.array([[s.start or 0 for s in slices[d]] for d in mesh.devices.flat]).reshape(
        *mesh.devices.shape, ndim
    )
    return NamedSharding(mesh, PartitionSpec(*(_entry(at[..., i], mesh) for i in range(ndim))))


def _entry(starts: np.ndarray, mesh: Mesh) -> Axes | None:
    """The mesh axes that split an array axis, the major one first, from where shards start."""
    split, expected = [], np.zeros_like(starts)
    for i, (name, size) in enumerate(mesh.shape.items()):
        last = int(starts.take(-1, axis=i).flat[0])
        if last:
            step = last // (size - 1)
            split.append((step, name))
            expected += step * np.indices(starts.shape)[i]
    if not np.array_equal(starts, expected):
        return None
    return tuple(name for _, name in sorted(split, reverse=True))


def spec(split: Mapping[str, Axes], axes: str) -> PartitionSpec:
    return PartitionSpec(*(split.get(a) for a in axes.split()))


def split_of(
    bound: Bound, shapes: Sequence[Sequence[int]], shardings: Sequence[Any], ins: Sequence[str]
) -> dict[str, Axes]:
    """The mesh axes each array axis is split over; no mesh axis serves two of them."""
    split: dict[str, Axes] = {}
    used: set[str] = set()
    axis, tiles, block = bound.op.tiles or ("", "", 0)
    for shape, sharding, axes in zip(shapes, shardings, ins, strict=True):
        entries = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        for name, entry in zip(axes.split(), entries, strict=False):
            mesh_axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
            free = name not in split and name not in (*bound.op.unsharded, tiles)
            if mesh_axes and free and used.isdisjoint(mesh_axes):
                split[name] = mesh_axes
                used.update(mesh_axes)
                count = math.prod(sharding.mesh.shape[a] for a in mesh_axes)
                if name == axis and shape[axes.split().index(axis)] % (block * count) == 0:
                    split[tiles] = mesh_axes
    return split


def shardy_rule(
    bound: Bound, _: Mesh, types: Sequence[Any], __: Sequence[Any]
) -> tuple[str, dict[str, Any]]:
    """The axes of operands and results for XLA's partitioner, Shardy, given operands' MLIR types.

    An axis of whole tiles is "(tiles positions)": its shards may be shards of tiles.
    """
    (ins, outs), sizes = bound.axes(), dict[str, int]()
    rule, whole = f"{', '.join(ins)} -> {', '.join(outs)}", bound.op.unsharded
    if bound.op.tiles:
        axis, tiles, block = bound.op.tiles
        shapes = zip(types, ins, strict=True)
        n = next(x.shape[axes.split().index(axis)] for x, axes in shapes if axis in axes.split())
        # A symbolic size is negative here, and Shardy wants two factors larger than 1.
        if n > block > 1 and n % block == 0:
            rule, sizes = re.sub(rf"\b{axis}\b", f"({tiles} {axis})", rule), {axis: block}
        else:
            whole = (*whole, tiles)
    names = dict.fromkeys(re.findall(r"\w+", rule))
    return rule, {"need_replication_factors": tuple(a for a in names if a in whole), **sizes}
