"""How big tpa_decode's blocks are."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpaDecodeConfig:
    """Launch choices of the forward kernel.

    A program takes `block_n` queries of `block_h` heads and one of `num_splits` parts of the keys,
    `block_m` keys at a time. One split and all heads is "parallel over b" (the seeds' trb),
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
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"TpaDecodeConfig.{field.name} is {value!r}; accepted: an int >= 1"
                )
        for name, least in (("block_m", 16), ("block_n", 1), ("num_warps", 1)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(
                    f"TpaDecodeConfig.{name} is {value}; accepted: a power of two >= {least}"
                )


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
    itemsize: int

    @property
    def tile_r(self) -> int:
        return tile(self.r)

    @property
    def tile_d(self) -> int:
        return tile(self.d)

    @property
    def tile_e(self) -> int:
        return tile(self.e)

    def key_bytes(self, block_h: int) -> int:
        """Bytes of one key's tiles in shared memory."""
        key = self.rk * (tile(block_h) + self.tile_d)
        return self.itemsize * (key + self.rv * (tile(block_h) + self.tile_e))


def tile(size: int) -> int:
    """The power of two, at least 16 (the tensor cores' least), that holds `size`."""
    return max(16, 1 << (size - 1).bit_length())


def choose(s: Sizes, *, num_sms: int = 132) -> TpaDecodeConfig:
    """The forward launch: every SM one stream of keys, as many bytes in flight as fit."""
    block_h = min(s.h, 64)
    block_n = 1
    while block_n < s.n and 2 * block_n * tile(block_h) <= 64:
        block_n *= 2
    programs = s.b * -(-s.h // block_h) * -(-s.n // block_n)
    num_splits = max(1, min(num_sms // programs, -(-s.m // 32)))
    keys = -(-s.m // num_splits)
    block_m = 128 if keys >= 2048 else 64 if keys > 32 else 32
    most_stages = 4 if block_m == 64 and keys >= 1024 else 3
    block_m, num_stages = fit(block_m, most_stages, s.key_bytes(block_h), s.itemsize)
    rows = block_n * tile(block_h)
    return TpaDecodeConfig(
        block_h=block_h,
        block_n=block_n,
        block_m=block_m,
        num_splits=num_splits,
        num_warps=4 if rows * s.tile_e <= 64 * 128 else 8,
        num_stages=num_stages,
    )


def choose_backward(s: Sizes, *, num_sms: int = 132) -> TpaDecodeConfig | None:
    """The backward launch; None where all rows of a batch element do not fit in one program."""
    block_n = 1 << (s.n - 1).bit_length()
    rows = block_n * tile(s.h)
    if rows > 256:
        return None
    block_m = 64 if rows <= 64 and s.itemsize == 2 else 32
    block_m, num_stages = fit(block_m, 2, s.key_bytes(s.h), 4)
    num_splits = max(1, min(2 * num_sms // s.b, -(-s.m // block_m)))
    return TpaDecodeConfig(
        block_h=s.h,
        block_n=block_n,
        block_m=block_m,
        num_splits=num_splits,
        num_warps=4 if rows <= 64 else 8,
        num_stages=num_stages,
    )


def fit(block_m: int, num_stages: int, key_bytes: int, itemsize: int) -> tuple[int, int]:
    """The largest block of keys, then the most stages, whose buffers fit in shared memory.

    Each stage but the last has a buffer. The rest of Hopper's 227 KiB is Triton's scratch, of
    which float32 products take more.
    """
    budget = 184_000 if itemsize == 2 else 96_000
    while block_m > 16 and (num_stages - 1) * block_m * key_bytes > budget:
        block_m //= 2
    return block_m, min(num_stages, 1 + budget // (block_m * key_bytes))
