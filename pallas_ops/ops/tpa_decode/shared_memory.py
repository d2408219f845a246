"""Upper bounds of the shared memory that Triton takes for a launch of tpa_decode."""

from pallas_ops.core.tiles import power_of_two
from pallas_ops.ops.tpa_decode.config import Sizes, TpaDecodeConfig, head_tiles


def forward_bytes(s: Sizes, c: TpaDecodeConfig, *, has_wgmma: bool = True) -> int:
    """The bound. `has_wgmma`: with what Triton keeps for wgmma, which sm_90 alone has."""
    heads = sum(head_tiles(c.block_h))
    rows, ranks = c.block_n * heads, c.block_n * s.tile_r * s.is_rank_first
    own, mixed = _operand_bytes(s)
    queries = own * (ranks or rows) * s.tile_d + (2 + mixed) * rows * ranks
    scores = (4 if mixed == 2 else 12) * rows * s.most_ranks
    products = max(own * s.tile_rk * s.tile_d, mixed * s.tile_rv * s.tile_e, scores)
    is_wide = has_wgmma and max(rows, ranks) >= 64  # rows that wgmma takes
    if s.is_quantised_bfloat16:  # widened in registers, for wgmma in shared memory
        products = scores
        if is_wide and (not s.is_rank_first or c.num_warps > 4):
            products = max(scores, 2 * (s.tile_rk * s.tile_d + s.tile_rv * s.tile_e))
    elif s.most_ranks > 2 and not s.is_rank_first:  # the largest difference that was seen
        products += own * s.tile_rk * s.tile_d + 4 * rows
    elif is_wide and mixed == 2 and not s.gathers(c.block_h):
        # Keys that wgmma reads stay until it is waited for, as values do.
        products += own * s.tile_rk * s.tile_d
    moved = 64 * rows if is_wide and c.num_warps > 4 else 0  # scores, from warp to warp
    # Weights move between threads where keys and values have different numbers of ranks.
    exchange = 0 if s.tile_rk == s.tile_rv else 8 * rows * s.most_ranks
    key = _buffer_bytes(s, c, heads) + 8 * s.tile_rk * ranks + products + exchange
    # Before the loop q is formed of aq and bq; after it the output is stored.
    forms_query = s.has_bq and not s.is_rank_first
    before = own * c.block_n * s.tile_r * (rows + s.tile_d) * forms_query
    return max(before, queries + moved + c.block_m * key, 4 * rows * s.tile_e)


def backward_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    tiles = head_tiles(c.block_h, backward=True)
    heads, rows_of_tile = sum(tiles), c.block_n * tiles[0]
    rows, ranks = c.block_n * heads, c.block_n * s.tile_r * s.has_bq
    own, mixed = _operand_bytes(s, backward=True)
    wide = (ranks or rows) * s.tile_d + rows * s.tile_e
    queries = (own + mixed) * wide + 2 * mixed * rows * ranks
    features = max(s.tile_d, s.tile_e)
    products = mixed * (rows_of_tile + max(rows_of_tile, features))
    products = max(products, 4 * (rows_of_tile + s.tile_d))
    products += 4 * rows_of_tile * min(2, s.most_ranks) + 8 * ranks
    products += mixed * s.most_ranks * max(0, ranks - rows_of_tile)
    if s.most_ranks > 2:  # seen: up to 3.6 times as much without bq, 1.9 in float16, 1.2 otherwise
        most = 2.0 if s.dtype == "float16" else 1.25 if features <= 64 else 1.0
        products = int(products * (most if s.has_bq else 4.0))
    elif s.most_ranks == 2 and c.block_m >= 32 and not s.has_few_features:
        # With 64 entries Triton may keep one buffer of features more, which no other term counts.
        copy = 2 * max(s.tile_rk * s.tile_d, s.tile_rv * s.tile_e)
        products += copy * (not s.has_bq or s.tile_d > s.tile_e)
    key = _buffer_bytes(s, c, heads, backward=True)
    # After the loop the gradient of q [D, rows] is an operand in pieces.
    after = max(4, mixed) * rows_of_tile * s.tile_d + (own + mixed) * ranks * s.tile_d
    after += 2 * mixed * rows * ranks
    return max(queries + c.block_m * (key + products), after)


def sm_100_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    """What sm_100 takes in addition: its tensor cores read no operand from registers.

    Two left operands of 16 bits are in shared memory. So are, for a moment, float32 scores: 64 rows
    of 64 entries, each row padded by 4 to spread over the banks, and 64 bytes for alignment.
    """
    if s.dtype == "float32":
        return 0
    entries = c.block_m * max(s.tile_rk, s.tile_rv)
    operands, scores = 2 * 2 * entries * max(s.tile_d, s.tile_e), 4 * 64 * (64 + 4)
    return operands + scores + 64


def _operand_bytes(s: Sizes, *, backward: bool = False) -> tuple[int, int]:
    """Bytes of a number in a product with its own dtype, and in one with float32.

    Products of TF32 take two float32, the number and its rest; the pieces of bfloat16 that float16
    is multiplied in (gradients, eight bits, float32 queries: see `matmul`) take no more.
    """
    own = 8 if s.dtype == "float32" or s.wide_queries else 2
    is_plain_float16 = s.dtype == "float16" and not (s.wide_queries or s.quantised)
    return own, 2 if s.is_plain_bfloat16 or (is_plain_float16 and not backward) else 8


def _buffer_bytes(s: Sizes, c: TpaDecodeConfig, heads: int, *, backward: bool = False) -> int:
    """Bytes of the buffers of one key and so many heads: each stage but the last has one.

    Head factors that are gathered are flat, and have one buffer more, which the gather reads.
    """
    width = 4 if s.dtype == "float32" else 2
    factors, gathered = heads * (s.tile_rk + s.tile_rv), 0
    if s.gathers(c.block_h, backward=backward):
        sizes = power_of_two(s.rk * s.h), power_of_two(s.rv * s.h)
        factors, gathered = sum(sizes), max(sizes)
    features = s.tile_rk * s.tile_d + s.tile_rv * s.tile_e
    buffers, table = max(c.num_stages - 1, 1), 8 * s.most_ranks if s.pages else 0
    copied = width * factors + (1 if s.quantised else width) * features + table
    return buffers * copied + width * gathered
