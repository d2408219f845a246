"""The models whose sizes `benchmarks.tpa_decode` measures.

The seeds' shape, those of the T6 models (of tensorgi/TPA; "kv": only keys and values have factors),
and those of FlashTPA's figures; from pages, and with features in eight bits.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of its factors, and of its tables."""

    heads: int
    dim: int = 64
    rank: int | None = 16  # None: the query has no factors
    ranks: int | None = None  # of keys and of values, with an axis of their own
    page_size: int | None = None
    features: str | None = None  # the dtype of bk and bv, where it is not that of the rest
    batches: Sequence[int] = (1, 16)
    sizes: Sequence[int] = (4096, 32768, 524288)
    most: int = 2**19  # tokens of all sequences

    @property
    def is_served(self) -> bool:
        return bool(self.page_size or self.features)

    @property
    def title(self) -> str:
        rank = "full" if self.rank is None else f"rank{self.rank}"
        ranks = "" if self.ranks is None else f"-ranks{self.ranks}"
        pages = "" if self.page_size is None else f"-pages{self.page_size}"
        features = "" if self.features is None else f"-{self.features}"
        return f"head{self.heads}-dim{self.dim}-{rank}{ranks}{pages}{features}"


SEED = Model(heads=32, dim=128, batches=(8, 32), sizes=[2**k for k in range(8, 16)], most=2**20)
SERVED = dataclasses.replace(SEED, batches=(32,), sizes=(4096, 32768))
T6 = partial(Model, ranks=2, sizes=(4096, 16384, 32768))
MODELS = {
    "seed": SEED,
    **{f"t6-{heads}": T6(heads=heads, rank=6) for heads in (34, 47, 61, 78)},
    **{f"t6-kv-{heads}": T6(heads=heads, rank=None) for heads in (22, 29, 37, 47)},
    **{f"flash-{heads}": Model(heads=heads) for heads in (16, 32, 48)},
    **{f"pages-{n}": dataclasses.replace(SERVED, page_size=n) for n in (16, 64, 256)},
    "t6-47-pages-64": T6(heads=47, rank=6, page_size=64, batches=(16,)),
    "int8": dataclasses.replace(SERVED, features="int8"),
    "fp8": dataclasses.replace(SERVED, features="float8_e4m3fn"),
}
BATCHES = sorted({batch for x in MODELS.values() for batch in x.batches})
SIZES = sorted({m for x in MODELS.values() for m in x.sizes})


def has(*, model: str, batch: int, m: int) -> bool:
    """Whether a point is in the model's tables; sizes that are not in the grid always are."""
    x = MODELS[model]
    own = batch in x.batches or batch not in BATCHES, m in x.sizes or m not in SIZES
    return all(own) and batch * m <= x.most
