"""How big tpa_decode's blocks are."""

import dataclasses
from collections.abc import Callable

from pallas_ops.core import checks
from pallas_ops.core.backend import NoKernelError
from pallas_ops.core.card import Card
from pallas_ops.core.tiles import MOST_PARTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpaDecodeConfig:
    """Launch choices of the forward kernel.

    A program takes `block_n` queries of `block_h` heads and one of `num_splits` parts of the keys,
    `block_m` keys at a time. One split and all heads is "parallel over b" (xopes' trb),
    one split and one head "over b and h" (trbh), several splits "over b and n" (trbn): their
    partial results are merged by a second kernel.
    """

    block_h: int
    block_n: int = 1
    block_m: int = 128
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self) -> None:
        powers = "block_n", "block_m", "num_warps"
        checks.launch_choices(self, powers_of_two=powers, least={"block_m": 16})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The axes of one call (per device), and the padded ones of a program's tiles."""

    b: int
    n: int
    m: int
    h: int
    r: int
    d: int
    e: int
    rk: int
    rv: int
    dtype: str  # of the cache
    wide_queries: bool = False  # whether aq and bq are float32 beside a cache of 16 bits
    has_bq: bool = True  # else aq is q itself, and r is D

    @property
    def tile_r(self) -> int:
        return tile(self.r)

    @property
    def tile_d(self) -> int:
        return tile(self.d)

    @property
    def tile_e(self) -> int:
        return tile(self.e)

    @property
    def operand_bytes(self) -> tuple[int, int]:
        """Bytes of a number in a product with its own dtype, and in one with float32.

        Products of TF32 take two float32, the number and its rest (see `matmul`).
        """
        own = 8 if self.dtype == "float32" or self.wide_queries else 2
        return own, 2 if self.dtype == "bfloat16" and not self.wide_queries else 8

    def buffer_bytes(self, c: TpaDecodeConfig) -> int:
        """Bytes of the buffers of one key: each stage but the last has one."""
        heads = (self.rk + self.rv) * tile(c.block_h)
        numbers = heads + self.rk * self.tile_d + self.rv * self.tile_e
        return max(c.num_stages - 1, 1) * numbers * (4 if self.dtype == "float32" else 2)


def tile(size: int) -> int:
    """The power of two, at least 16 (the tensor cores' least), that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def forward_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    """At most what Triton takes of shared memory for the forward kernel."""
    rows, ranks = c.block_n * tile(c.block_h), c.block_n * s.tile_r * s.has_bq
    own, mixed = s.operand_bytes
    queries = own * (ranks or rows) * s.tile_d + (2 + mixed) * rows * ranks
    products = own * s.rk * s.tile_d, mixed * s.rv * s.tile_e, 4 * s.rv * rows
    key = s.buffer_bytes(c) + 8 * s.rk * ranks + max(products)
    return max(queries + c.block_m * key, 4 * rows * s.tile_e)  # the latter stores the output


def backward_bytes(s: Sizes, c: TpaDecodeConfig) -> int:
    """At most what Triton takes of shared memory for the backward kernel."""
    rows, ranks = c.block_n * tile(c.block_h), c.block_n * s.tile_r * s.has_bq
    own, mixed = s.operand_bytes
    wide = (ranks or rows) * s.tile_d + rows * s.tile_e
    queries = (own + mixed) * wide + 2 * mixed * rows * ranks
    scores = 8 * (rows + s.rk * ranks) + 2 * max(s.tile_d, s.tile_e)
    products = scores, mixed * ((ranks or rows) + s.tile_d), mixed * s.tile_e
    return queries + c.block_m * (s.buffer_bytes(c) + max(products))


def choose(s: Sizes, card: Card, *, batch_invariant: bool = False) -> TpaDecodeConfig:
    """The forward launch: every SM one stream of keys, as many bytes in flight as fit.

    Raises:
      NoKernelError: where not even one block of 16 keys fits.
    """
    block_h = min(s.h, 64)
    lanes = max(tile(block_h), s.tile_r * s.has_bq)
    block_n = 1
    while block_n < s.n and 2 * block_n * lanes <= 64:
        block_n *= 2
    rows = (block_h, block_n), (block_h, 1), (min(s.h, 16), 1)
    configs = (_choose_keys(s, *r, card, batch_invariant) for r in rows)
    for c in configs:
        if c is not None:
            return c
    raise NoKernelError(
        f"tpa_decode has no kernel for {s.dtype} of R={s.r}, Rk={s.rk}, Rv={s.rv}, D={s.d}, "
        f"E={s.e} on {card}; accepted: implementation=None or 'xla', which run jax.numpy"
    )


def _choose_keys(
    s: Sizes, block_h: int, block_n: int, card: Card, batch_invariant: bool
) -> TpaDecodeConfig | None:
    programs = s.b * -(-s.h // block_h) * -(-s.n // block_n)
    num_splits = max(1, min(card.num_sms // programs, -(-s.m // 32)))
    keys = -(-s.m // num_splits)
    if batch_invariant:
        keys = split_size(s.m)
        num_splits = -(-s.m // keys)
    block_m = 128 if keys >= 2048 else 64 if keys > 32 else 32
    rows = block_n * tile(block_h)
    c = TpaDecodeConfig(
        block_h=block_h,
        block_n=block_n,
        block_m=block_m,
        num_splits=num_splits,
        num_warps=4 if rows * s.tile_e <= 64 * 128 else 8,
        num_stages=4 if block_m == 64 and keys >= 1024 else 3,
    )
    return fit(s, c, forward_bytes, card)


def split_size(m: int) -> int:
    """The keys of a split that knows nothing of the batch: a power of two."""
    size = 512
    while -(-m // size) > MOST_PARTS:
        size *= 2
    return size


def choose_backward(s: Sizes, card: Card) -> TpaDecodeConfig | None:
    """The backward launch; None where all rows of a batch element do not fit in one program."""
    block_n = 1 << (s.n - 1).bit_length()
    rows = block_n * tile(s.h)
    if rows > 256:
        return None
    c = TpaDecodeConfig(
        block_h=s.h,
        block_n=block_n,
        block_m=32 if s.has_bq or rows <= 32 else 16,  # 32 keys spill (with bq, too)
        num_warps=4 if rows <= 64 else 8,
        num_stages=2 if s.dtype == "float32" else 3,
    )
    fitting = fit(s, c, backward_bytes, card)
    if fitting is None:
        return None
    num_splits = max(1, min(2 * card.num_sms // s.b, -(-s.m // fitting.block_m)))
    return dataclasses.replace(fitting, num_splits=num_splits)


def fit(
    s: Sizes,
    c: TpaDecodeConfig,
    bytes_of: Callable[[Sizes, TpaDecodeConfig], int],
    card: Card,
) -> TpaDecodeConfig | None:
    """`c` with the largest block of keys, then the most stages, that fit in shared memory."""
    while bytes_of(s, c) > card.shared_memory:
        if c.block_m > 16:
            c = dataclasses.replace(c, block_m=c.block_m // 2)
        elif c.num_stages > 1:
            c = dataclasses.replace(c, num_stages=c.num_stages - 1)
        else:
            return None
    return c
