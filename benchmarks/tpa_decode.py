"""TPA decode: one query token against m cached tokens. `python -m benchmarks.tpa_decode --help`"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, peers, sweep
from benchmarks.cases import EAGER, Benchmark, Case, Function, Provider, Sizes, implementation
from benchmarks.tpa_models import BATCHES, MODELS, SIZES, has
from pallas_ops import TpaDecodeConfig, reference, tpa_decode

ROUNDED = "every product is rounded to the inputs' dtype"
NAIVE = "q, k and v materialised, in the inputs' dtype"


def case(dtype: Any, *, model: str, batch: int, m: int) -> Case:
    x = MODELS[model]
    ranks = () if x.ranks is None else (x.ranks,)
    cache = (batch, m) if x.page_size is None else (batch * m // x.page_size, x.page_size)
    struct: Any = jax.ShapeDtypeStruct
    heads = struct((*cache, *ranks, x.heads), dtype)
    features = struct((*cache, *ranks, x.dim), x.features or dtype)
    query = [struct((batch, 1, x.heads, x.rank or x.dim), dtype)]
    bq = [] if x.rank is None else [struct((batch, 1, x.rank, x.dim), dtype)]
    return Case(
        title=f"tpa_decode-{{metric}}-{{mode}}-batch{batch}-{x.title}-{{dtype}}",
        inputs=(*query, heads, heads, *bq, features, features),
        further=() if x.page_size is None else (np.full(batch, m), shuffled(batch, *cache)),
        reference=of_model(reference.tpa_decode, model),
        tolerance=2 if x.features else 1,  # the weights of the values are rounded, twice
    )


def shuffled(batch: int, pages: int, _: int) -> np.ndarray[Any, Any]:
    """A page table: every page once, in an order of no order."""
    return np.random.default_rng(0).permutation(pages).reshape(batch, -1)


def of_model(call: Function, model: str) -> Function:
    """A function of the model's factors: where there is no bq, of five; pages come last."""
    x = MODELS[model]

    def run(*arrays: Any) -> Any:
        pages = {}
        if x.page_size is not None:
            *arrays, lengths, table = arrays  # type: ignore[assignment]
            pages = dict(lengths=lengths, page_table=table)
        aq, ak, av, *bq, bk, bv = arrays
        return call(aq, ak, av, *(bq or [None]), bk, bv, **pages)

    return run


def parallel_b(*, model: str, **_: Any) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=MODELS[model].heads, block_m=64)


def parallel_bh(**_: Any) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=1, block_m=64)


def parallel_bn(*, model: str, m: int, **_: Any) -> TpaDecodeConfig:
    return TpaDecodeConfig(block_h=MODELS[model].heads, block_m=64, num_splits=max(2, m // 512))


def kernel(
    name: str,
    config: Callable[..., TpaDecodeConfig | None],
    note: str,
    precision: Literal["high", "default"] | None = None,
    **options: Any,
) -> Provider:
    def make(**point: Any) -> Function:
        given: Any = dict(implementation=implementation(), precision=precision)
        return of_model(partial(tpa_decode, config=config(**point), **given), point["model"])

    return Provider(name=name, make=make, kernel=True, note=note, **options)


def scores_bound(*, model: str, **_: Any) -> bool:
    """Whether fewer bits in scores may save time: factored queries of more than 32 heads."""
    x = MODELS[model]
    return x.heads > 32 and x.rank is not None and not x.is_served


def function(name: str, call: Function, note: str, **options: Any) -> Provider:
    def make(*, model: str, **_: Any) -> Function:
        return of_model(call, model)

    return Provider(name=name, make=make, note=note, **options)


def plain(
    aq: Any, ak: Any, av: Any, bq: Any, bk: Any, bv: Any, *, page_table: Any = None, **lengths: Any
) -> jax.Array:
    """Without the kernel's pages and eight bits: they are gathered and widened first."""
    bk, bv = bk.astype(ak.dtype), bv.astype(av.dtype)
    if page_table is not None:
        ak, av, bk, bv = (
            x[page_table].reshape(len(page_table), -1, *x.shape[2:]) for x in (ak, av, bk, bv)
        )
    return tpa_decode(aq, ak, av, bq, bk, bv, **lengths, implementation=implementation())


def einsum(aq: Any, ak: Any, av: Any, bq: Any, bk: Any, bv: Any, **pages: Any) -> jax.Array:
    """What one would write down first: every product in the dtype of the inputs."""
    _check_is_plain(ak, bk, pages)
    q, k, ranks = _query(jnp.einsum, aq, bq), "r" * (ak.ndim - 3), _ranks(ak)
    score = jnp.einsum(f"bnhd,bm{k}d,bm{k}h->bnhm", q, bk, ak)
    p = jax.nn.softmax(score * jnp.asarray(bk.shape[-1] ** -0.5 / ranks, score.dtype))
    return jnp.einsum(f"bnhm,bm{k}h,bm{k}e->bnhe", p, av, bv) / ranks


def attend_in_torch(torch: Any, *, model: str, **_: Any) -> Function:
    def call(aq: Any, ak: Any, av: Any, bq: Any, bk: Any, bv: Any, **pages: Any) -> Any:
        _check_is_plain(ak, bk, pages)
        form = "bmrh,bmrd->bhmd" if ak.ndim == 4 else "bmh,bmd->bhmd"
        q = _query(torch.einsum, aq, bq).swapaxes(1, 2)
        k, v = (torch.einsum(form, *pair) / _ranks(ak) for pair in ((ak, bk), (av, bv)))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).swapaxes(1, 2)

    return of_model(call, model)


def of_xopes(module: Any, *, model: str, **_: Any) -> Function:
    if model != "seed" and not model.startswith("flash"):
        raise NotImplementedError("queries, keys and values of factors without an axis of ranks")
    return of_model(module.tpa_decode_parallel_bn_triton, model)


def sizes(*, mode: str, model: str, batch: int, **_: Any) -> Sizes:
    """The seeds' tables whole; of the other models a batch, and the gradient of two."""
    if model == "seed":
        return "all"
    if mode == "bwd":
        return "largest" if model in ("t6-34", "t6-47") and batch == 16 else "none"
    return "largest" if batch == MODELS[model].batches[-1] else "none"


def _check_is_plain(ak: Any, bk: Any, pages: dict[str, Any]) -> None:
    if pages or ak.dtype != bk.dtype:
        raise NotImplementedError("takes neither pages nor eight bits")


def _query(einsum: Function, aq: Any, bq: Any) -> Any:
    return aq if bq is None else einsum("bnhr,bnrd->bnhd", aq, bq) / bq.shape[2]


def _ranks(ak: Any) -> int:
    return int(ak.shape[2]) if ak.ndim == 4 else 1


def proposals(*, model: str, batch: int, m: int, **_: Any) -> list[Provider]:
    """From half a program a multiprocessor to three, of 132, with 32 to 128 keys a step."""
    splits = sorted({min(-(-m // 32), max(1, round(132 * x / batch))) for x in (0.5, 1, 1.5, 2, 3)})
    configs = sweep.configs(
        TpaDecodeConfig,
        block_h=(MODELS[model].heads,),
        block_m=(32, 64, 128),
        num_splits=splits,
        num_stages=(2, 3, 4),
    )
    return [kernel(sweep.label(c), sweep.always(c), "") for c in (None, *configs)]


BENCHMARK = Benchmark(
    op="tpa_decode",
    case=case,
    providers=(
        kernel("plb", parallel_b, "parallel over b", sizes="few"),
        kernel("plbh", parallel_bh, "parallel over b and h", sizes="few"),
        kernel("plbn", parallel_bn, "parallel over b and parts of 512 keys", sizes="few"),
        kernel("pallas", lambda **_: None, "the default: chosen by shape"),
        kernel(
            "high",
            lambda **_: None,
            'precision="high": scores keep 16 bits',
            precision="high",
            modes=("fwd",),  # calls that are differentiated use "highest"
            has=scores_bound,
        ),
        kernel(
            "rounded",
            lambda **_: None,
            'less precise: precision="default", q and the weights of the values rounded',
            precision="default",
            tolerance=16,  # what q's rounding does to the gradients of ak
            sizes="few",
        ),
        function(
            "plain",
            plain,
            "pages gathered, eight bits widened, then the default",
            kernel=True,
            has=lambda *, model, **_: MODELS[model].is_served,
        ),
        function("jnp", reference.tpa_decode, "the reference, eager", **EAGER),
        function("jit", reference.tpa_decode, "the reference, jitted"),
        function("naive", reference.tpa_decode_naive, f"{NAIVE}, eager", tolerance=8, **EAGER),
        function(
            "naive jit", reference.tpa_decode_naive, f"{NAIVE}, jitted", tolerance=8, sizes="few"
        ),
        function("einsum", einsum, f"jitted, less precise: {ROUNDED}", tolerance=32, sizes="few"),
        *peers.pair(attend_in_torch, f"scaled_dot_product_attention: {ROUNDED}", tolerance=8),
        peers.xopes("flash_attn.tpa.tpa_decode_triton", of_xopes, "tpa_decode_parallel_bn_triton"),
    ),
    x="m",
    grid={"model": tuple(MODELS), "batch": BATCHES, "m": SIZES},
    quick={"model": ("seed", "t6-34", "t6-47"), "batch": (8, 16), "m": (256, 2048, 32768)},
    small={"model": ("seed",), "batch": (2,), "m": (64, 256)},
    has=has,
    sizes=sizes,
    point_s=3.4,
    proposals=proposals,
)

if __name__ == "__main__":
    command.main(BENCHMARK)
