"""The online softmax of one tile of rows: its state, a step, and what is stored in the end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_ops.core.backend import plgpu
from pallas_ops.core.fastmath import LOG2E, exp2
from pallas_ops.core.tiles import HUGE, Ref
from pallas_ops.ops.tpa_decode import heads, tiles
from pallas_ops.ops.tpa_decode.keys import Keys
from pallas_ops.ops.tpa_decode.tiles import Plan, Rows
from pallas_ops.ops.tpa_decode.words import interleave

LEAST_WEIGHT = 2.0**-100  # float16 weights are divided by their largest, or by this


class State(NamedTuple):
    """What a tile of rows has of earlier keys."""

    maximum: jax.Array  # [rows]: of the scores, base 2
    total: jax.Array  # [rows] or [rows, parts]: sums of exponentials (`_sums_of_threads`)
    accs: list[jax.Array]  # [rows, E], of eight bits two tiles: weighted sums of values
    largest: jax.Array | None  # [rows]: of |p av|, where weights are float16 (see `weights`)


class Weights(NamedTuple):
    """What a block of keys adds to a state."""

    maximum: jax.Array  # [rows]: with these keys, as `largest`
    largest: jax.Array | None
    rescale: jax.Array  # [rows]: what the total so far is multiplied by
    rescale_accs: jax.Array  # [rows]: what the accs so far are multiplied by
    p: jax.Array  # [rows, keys]: exponentials
    of_values: jax.Array  # [rows, entries]: p av


def empty(plan: Plan, rows: Rows) -> State:
    count = len(rows.index)
    total = jax.eval_shape(lambda: _sums_of_threads(plan, jnp.zeros((count, plan.c.block_m))))
    acc = jnp.zeros((count, plan.s.tile_e // plan.s.features_per_word), jnp.float32)
    return State(
        jnp.full(count, -HUGE, jnp.float32),
        jnp.zeros(total.shape, jnp.float32),
        [acc] * plan.s.features_per_word,
        jnp.full(count, LEAST_WEIGHT, jnp.float32) if plan.s.has_float16_weights else None,
    )


def weights(keys: Keys, rows: Rows, score: jax.Array, state: State, av: Any) -> Weights:
    """One step of the online softmax: the new maximum, and the exponentials times av.

    float16 weights are multiplied by 2**15 over the largest so far. So they do not overflow, and
    lose no bits where all are small. `store` divides the sums by the same factor.
    """
    plan, s = keys.plan, keys.plan.s
    maximum = jnp.maximum(state.maximum, score.max(axis=1))
    p = exp2(score - maximum[:, None])
    rescale = exp2(state.maximum - maximum)
    weight, av = heads.each_rank(p, s.rv), heads.load(keys, rows, av, s.rv)
    if plan.output_pieces == 1 and s.dtype == "bfloat16":
        weight, av = weight.astype(jnp.bfloat16), av.astype(jnp.bfloat16)
    weight *= av
    if state.largest is None:
        return Weights(maximum, None, rescale, rescale, p, weight)
    # The largest |p av|, not |av|: in a gathered av the numbers of a row are in many threads, which
    # would exchange their maxima in each step. Weights have the layout of scores.
    earlier = state.largest * rescale
    largest = jnp.maximum(jnp.maximum(earlier, jnp.abs(weight).max(axis=1)), LEAST_WEIGHT)
    weight *= (2.0**15 / largest)[:, None]
    return Weights(maximum, largest, rescale, earlier / largest, p, weight)


def add_values(plan: Plan, state: State, step: Weights, bv: list[jax.Array]) -> State:
    """The state of earlier keys, and these keys' values."""
    accs = [acc * step.rescale_accs[:, None] for acc in state.accs]
    pairs = zip(bv, accs, strict=True)
    accs = [plan.dot_of_weights(step.of_values, x, acc) for x, acc in pairs]
    if len(plan.tiles) > 1:
        # Needed: the first tile's wgmma may still read bv in the next step, whose copy overwrites
        # it, as the other tile (mma) read it too. A use of acc makes Triton wait for the product.
        accs = [acc + 0.0 for acc in accs]
    rescale = step.rescale[:, None] if state.total.ndim == 2 else step.rescale
    total = state.total * rescale
    return State(step.maximum, total + _sums_of_threads(plan, step.p), accs, step.largest)


def _sums_of_threads(plan: Plan, p: jax.Array) -> jax.Array:
    """p [rows, keys] summed over the keys of each thread, or [rows] over all keys.

    With fewer than 64 rows the keys of a row usually are in several warps, which exchange sums
    through shared memory: `store` does that, once. In the tensor cores' layout each of four warps
    has eight entries in turn, so every 32nd entry of a row belongs to the same thread.
    """
    width = 32 // plan.s.tile_rk
    if len(p) >= 64:
        return p.sum(axis=1)
    return p.reshape(len(p), -1, width).sum(axis=1) if 0 < width < p.shape[1] else p


def store(plan: Plan, rows: Rows, state: State, out_ref: Ref, lse_ref: Ref) -> None:
    total = state.total.sum(axis=1) if state.total.ndim == 2 else state.total
    nonzero = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, (state.maximum + jnp.log2(nonzero)) / LOG2E)
    scale = plan.p.value_scale / nonzero
    if state.largest is not None:
        scale *= state.largest * 2.0**-15
    out = interleave(state.accs) * scale[:, None]
    tiles.store(out_ref, out, *rows.tile_indices(plan.s.e))
    plgpu.store(lse_ref.at[rows.index], lse, mask=rows.inside)
