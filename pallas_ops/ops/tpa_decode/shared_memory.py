"""What Triton takes of shared memory for a launch of tpa_decode, at most."""

from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, head_tiles, narrow_tiles


def forward_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    """At most what Triton takes of shared memory for the forward kernel."""
    heads = sum(head_tiles(c.block_h))
    rows, ranks = c.block_n * heads, c.block_n * s.tile_r * s.is_rank_first
    own, mixed = s.operand_bytes
    queries = own * (ranks or rows) * s.tile_d + (2 + mixed) * rows * ranks
    scores = (4 if mixed == 2 else 12) * rows * s.most_ranks
    products = max(own * s.tile_rk * s.tile_d, mixed * s.tile_rv * s.tile_e, scores)
    if s.is_coarse:  # widened in registers
        products = scores
    copied = heads * 3 // 2 if s.has_pairs(c.block_h) else heads
    key = s.buffer_bytes(c, copied) + 8 * s.tile_rk * ranks + products + s.exchange_bytes(rows)
    return max(queries + c.block_m * key, 4 * rows * s.tile_e)  # the latter stores the output


def backward_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    """At most what Triton takes of shared memory for the backward kernel."""
    tiles = narrow_tiles(c.block_h)
    heads, rows_of_tile = sum(tiles), c.block_n * tiles[0]
    rows, ranks = c.block_n * heads, c.block_n * s.tile_r * s.has_bq
    own, mixed = s.operand_bytes
    wide = (ranks or rows) * s.tile_d + rows * s.tile_e
    queries = (own + mixed) * wide + 2 * mixed * rows * ranks
    features = max(s.tile_d, s.tile_e)
    products = mixed * (rows_of_tile + max(rows_of_tile, features))
    products = max(products, 4 * (rows_of_tile + s.tile_d))
    products += 4 * rows_of_tile * min(2, s.most_ranks) + 8 * ranks
    copied = heads * 3 // 2 if s.has_two_ranks_in_pairs else heads
    return queries + c.block_m * (s.buffer_bytes(c, copied) + products)
