"""Which arguments tpa_decode accepts, and which of them have gradients."""

from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ops.core import checks, implementations
from pallas_ops.core.dispatch import Implementation
from pallas_ops.ops.tpa_decode.config import Operands, Params, Precision, TpaDecodeConfig

QUANTISED = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
PRECISIONS: dict[Any, Precision] = {
    **dict.fromkeys((None, "highest", lax.Precision.HIGHEST), "highest"),
    **dict.fromkeys(("high", lax.Precision.HIGH), "high"),
    **dict.fromkeys(("default", lax.Precision.DEFAULT), "default"),
}


@checks.cached
def static(
    o: Operands,
    window: SupportsIndex | None,
    batch_invariant: bool | np.bool_,
    axis_name: tuple[str, ...] | None,
    implementation: Implementation | None,
    config: TpaDecodeConfig | None,
    precision: Precision | lax.Precision | None,
) -> tuple[tuple[int, ...], Params]:
    """(D, R, Rk, Rv) and the static arguments, from `jax.ShapeDtypeStruct`s; raises a refusal."""
    implementations.check(implementation, config, TpaDecodeConfig)
    sizes = {"Rk": 1, "Rv": 1} | _sizes(o)
    _check_dtypes(o)
    if window is not None:
        window = min(checks.integer("window", window, least=1), implementations.LONGEST)
        if axis_name is None and isinstance(sizes["M"], int) and window >= sizes["M"]:
            window = None
    if o.page_table is not None and axis_name is not None:
        raise ValueError("page_table and axis_name are both given; accepted: one of them")
    if not isinstance(precision, str | lax.Precision | None) or precision not in PRECISIONS:
        accepted = "None, 'highest', 'high' or 'default'"
        raise ValueError(f"{checks.shown('precision', precision)}; accepted: {accepted}")
    batch_invariant = checks.flag("batch_invariant", batch_invariant)
    if batch_invariant and config is not None:
        raise ValueError("config and batch_invariant are both given; accepted: one of them")
    if config is not None and config.block_m < 16 and 1 in (sizes["Rk"], sizes["Rv"]):
        raise ValueError(f"config.block_m is {config.block_m}; accepted: 16 or more for one rank")
    rows = {f"N * {x}": sizes["N"] * sizes[x] for x in "HR" if x in sizes}
    rows |= {f"M * {x}": sizes["M"] * sizes[x] for x in ("Rk", "Rv")}
    if o.page_table is not None:
        keys = sizes["P"] * sizes["page_size"]
        rows |= {f"P * page_size * {x}": keys * sizes[x] for x in ("Rk", "Rv")}
    implementation = implementations.kernel_or_reference(implementation, o.aq.dtype, sizes | rows)
    params = Params(
        window=window,
        precision=PRECISIONS[precision],
        batch_invariant=batch_invariant,
        axis_name=axis_name,
        implementation=implementation,
        config=config,
    )
    return (sizes["D"], sizes.get("R", 1), sizes["Rk"], sizes["Rv"]), params


def _sizes(o: Operands) -> dict[str, int]:
    """The size of each axis letter. aq is checked last: then H is known from the other factors."""
    axes = checks.Axes()
    cache = "B M" if o.page_table is None else "P page_size"
    if o.bq is not None:
        axes.check("bq", o.bq, "B N R D")
    for letter, a, b, width in (("k", o.ak, o.bk, "D"), ("v", o.av, o.bv, "E")):
        forms = cache, f"{cache} R{letter}"
        axes.check(f"a{letter}", a, *(f"{form} H" for form in forms))
        axes.check(f"b{letter}", b, f"{forms[len(a.shape) - 3]} {width}")
    axes.check("aq", o.aq, "B N H D" if o.bq is None else "B N H R")
    if o.lengths is not None:
        checks.integers("lengths", o.lengths)
        axes.check("lengths", o.lengths, "", "B")
    if o.page_table is not None:
        checks.integers("page_table", o.page_table)
        axes.check("page_table", o.page_table, "B pages")
        if o.lengths is None:
            raise ValueError("lengths is None; accepted, with a page_table: integers [B] or []")
        axes.learn("page_table", M=tokens_of_table(axes.sizes["pages"], axes.sizes["page_size"]))
    return axes.sizes


def tokens_of_table(pages: int, page_size: int) -> int:
    """M, the tokens that a row of a page table holds, which an int32 must count."""
    m = pages * page_size
    if isinstance(m, int) and m > implementations.LONGEST:
        raise ValueError(
            f"page_table has {pages} pages of {page_size} tokens a row; accepted: at most "
            f"{implementations.LONGEST} tokens"
        )
    return m


def _check_dtypes(o: Operands) -> None:
    """The queries share one dtype, and the cache another one, which may be narrower."""
    arrays = {name: x for name, x in zip(o._fields[:6], o[:6], strict=True) if x is not None}
    for name, x in arrays.items():
        if name not in ("bk", "bv") or x.dtype not in QUANTISED:
            checks.floating(name, x)
    for first, second in (("ak", "av"), ("bk", "bv"), ("ak", "bk"), ("aq", "bq")):
        want, given = (getattr(o, name) for name in (first, second))
        may_differ = given is None or (second == "bk" and given.dtype in QUANTISED)
        if not may_differ and given.dtype != want.dtype:
            raise TypeError(
                f"{second}.dtype is '{given.dtype}'; accepted: that of {first}, {want.dtype}"
            )
    query, cache = o.aq.dtype, o.ak.dtype
    if query != cache and not (query == jnp.float32 and cache.itemsize == 2):
        raise TypeError(
            f"aq.dtype is '{query}'; accepted: that of the cache, {cache}, or float32 beside a "
            "cache of 16 bits"
        )


@jax.custom_jvp
def no_gradient(x: jax.Array) -> jax.Array:
    """A quantised factor: a TypeError where it is differentiated."""
    return x


@no_gradient.defjvp
def _(primals: Any, _: Any) -> Any:
    raise TypeError(
        f"tpa_decode is differentiated with respect to a factor of dtype {primals[0].dtype}; "
        "accepted: factors that are not quantised"
    )
