"""A benchmark of next to nothing, with columns that go wrong in every way."""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.cases import Benchmark, Case, Provider
from benchmarks.plan import Plan


def square(x: jax.Array) -> jax.Array:
    return x * x


def off_by_one(x: jax.Array) -> jax.Array:
    return square(x).at[3].add(1)


def refuse(**_: Any) -> Any:
    raise NotImplementedError("square of nothing")


def explode(_: jax.Array) -> jax.Array:
    raise RuntimeError("boom\nand more")


def provider(name: str, function: Callable[..., Any] = square, **options: Any) -> Provider:
    return Provider(name=name, make=lambda **_: function, **options)


TOY = Benchmark(
    op="toy",
    case=lambda dtype, *, k, n: Case(
        title=f"toy-{{metric}}-{{mode}}-k{k}-{{dtype}}",
        inputs=(jax.ShapeDtypeStruct((n,), dtype),),
        reference=square,
    ),
    providers=(
        provider("pallas", kernel=True),
        provider("jnp", jit=False, sizes="largest"),
        provider("jit"),
        provider("wrong", off_by_one),
        provider("broken", explode),
        Provider(name="refused", make=refuse),
    ),
    x="n",
    grid={"k": (1, 2), "n": (8, 2048)},
    quick={"n": (8,)},
    small={"k": (1,)},
)


def toy_plan(**changes: Any) -> Plan:
    given = {"mode": "fwd", "dtypes": ["f32"], "grid": TOY.grid, "providers": TOY.providers}
    return Plan(**{**given, "calls": 2, **changes})
