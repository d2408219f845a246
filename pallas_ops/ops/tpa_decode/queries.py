"""The queries of a program of tpa_decode, and their side of the scores."""

import jax

from pallas_ops.core.fastmath import LOG2E
from pallas_ops.core.tiles import Ref
from pallas_ops.ops.tpa_decode.matmul import sum_of_products
from pallas_ops.ops.tpa_decode.tiles import Rows
from pallas_ops.ops.tpa_decode.words import split


class Queries:
    """aq of each tile of rows, and bq, which all of them share; in parts, as features are."""

    def __init__(self, tiles: list[Rows], aq_ref: Ref, bq_ref: Ref | None) -> None:
        self.plan = tiles[0].plan
        s = self.plan.s
        self.scale = self.plan.score_scale * LOG2E
        aqs, bq = [rows.load_aq(aq_ref) for rows in tiles], tiles[0].load_bq(bq_ref)
        self.aqs = [split(aq, s.parts if bq is None else 1) for aq in aqs]
        self.bqs = None if bq is None else split(bq, s.parts)

    def inner(self, bk: list[jax.Array]) -> list[jax.Array]:
        """bq bk^T [queries x ranks, entries], scaled; without bq the parts of bk^T, not scaled."""
        bk = [x.T for x in bk]
        if self.bqs is None:
            return bk
        return [self.scale * sum_of_products(self.bqs, bk, 3)]

    def times(self, tile: int, inner: list[jax.Array]) -> jax.Array:
        """aq bq bk^T, or q bk^T: [rows, entries]"""
        return sum_of_products(self.aqs[tile], inner, self.plan.score_pieces)
