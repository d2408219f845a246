"""Kernels without a loop over the sequence (variant "sequence"), and the cache of angles.

A program has a tile of rows that are adjacent in memory. It loads cached angles, or computes its
own, which takes about 13 instructions an element.
"""

from jax.experimental import pallas as pl

from pallas_ops.core.backend import plgpu
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.lrpe_cosine.activation import activate, pull
from pallas_ops.ops.lrpe_cosine.config import Operands, Plan
from pallas_ops.ops.lrpe_cosine.tiles import Angles, Tile, load_softmax


def forward(refs: Operands, out_ref: Ref, *, plan: Plan) -> None:
    """`out_ref` is [B, rows, 2, D]."""
    tile = Tile.of_rows(plan)
    sin, cos = Angles(plan, refs).sincos(tile)
    a = activate(plan.p.act, tile.load_x(refs.x), load_softmax(refs, tile))
    tile.store(out_ref, a * cos, 0)
    tile.store(out_ref, a * sin, 1)


def backward(refs: Operands, dx_ref: Ref, *, plan: Plan) -> None:
    """`dx_ref` is [B, rows, D]."""
    tile = Tile.of_rows(plan)
    sin, cos = Angles(plan, refs).sincos(tile)
    x = None if refs.x is None else tile.load_x(refs.x)
    da = tile.load_da(refs.dout, sin, cos)
    tile.store(dx_ref, pull(plan.p.act, x, da, load_softmax(refs, tile)))


def angles(refs: Operands, angles_ref: Ref, *, plan: Plan) -> None:
    """Stores all angles, in turns, in `angles_ref` [(B,) N, H, D]."""
    block, block_d, head, b = map(pl.program_id, range(4))
    tile = Tile.of_tokens(plan, b, block, head, block_d)
    own = Angles(plan, refs)
    plgpu.store(angles_ref.at[own.cached_index(tile)], own.turns(tile), mask=tile.mask)
