"""How close is close enough, and the small things that tests share."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from tests import emulate

EPS32 = float(np.finfo(np.float32).eps)


class Tolerance(NamedTuple):
    """Allowed |got - want|: `relative` * (|want| + scale) * sqrt(terms) + `rounding` * |want|."""

    relative: float
    rounding: float


def _sixteen_bit(dtype: Any) -> Tolerance:
    return Tolerance(relative=8 * EPS32, rounding=float(jnp.finfo(dtype).eps))


# The one table. `relative` is the arithmetic, float32 whatever the dtype: 8 ulps cover exp2 and
# log2 as the hardware approximates them (2 each) and a few roundings, and sqrt(terms) lets the
# rounding of a sum grow as a random walk, in whatever order it is added. `rounding` is the one
# conversion to a 16-bit result: two float32 that differ in the last place may land on neighbours,
# which are one eps of the dtype apart.
TOLERANCES = {
    jnp.dtype(jnp.float64): Tolerance(relative=1e-13, rounding=0.0),
    jnp.dtype(jnp.float32): Tolerance(relative=8 * EPS32, rounding=0.0),
    jnp.dtype(jnp.float16): _sixteen_bit(jnp.float16),
    jnp.dtype(jnp.bfloat16): _sixteen_bit(jnp.bfloat16),
}


def assert_close(got: Any, want: Any, *, terms: int = 1, scale: float | None = None) -> None:
    """Two trees agree to the table's tolerance for the dtype of `got`.

    Args:
      got: a tree of arrays; its dtypes choose the tolerances.
      want: the same tree and shapes, of the same dtypes or float64.
      terms: how many numbers were added up to make one of `got`.
      scale: the size of those numbers, which bounds what cancellation leaves; the largest of |want|
        if None, 0 to hold every element to its own size.
    """

    def check(where: str, got: Any, want: Any) -> None:
        _assert_same_form(where, got, want)
        tolerance = TOLERANCES[jnp.dtype(got.dtype)]
        got, want = to_float64(got), to_float64(want)
        _assert_same_specials(where, got, want)
        difference, size = np.abs(_finite(got) - _finite(want)), np.abs(_finite(want))
        unit = size.max(initial=0.0) if scale is None else scale
        allowed = tolerance.relative * (size + unit) * terms**0.5 + tolerance.rounding * size
        if (difference > allowed).any():
            worst = np.unravel_index(np.argmax(difference - allowed), difference.shape)
            raise AssertionError(
                f"{where}{list(map(int, worst))}: got {got[worst]}, want {want[worst]}; they differ"
                f" by {difference[worst]:.3g}, allowed is {allowed[worst]:.3g}"
            )

    _for_each_leaf(check, got, want)


def assert_as_good_as_reference(
    got: Any,
    same_dtype_reference: Any,
    float64_truth: Any,
    *,
    factor: float = 2.0,
    worst: float | None = None,
    floor: float = 4 * EPS32,
) -> None:
    """The error of `got` is at most `factor` times the reference's own, so no dtype needs a number.

    Each error is against the truth: in the mean (||.|| / ||truth||), and the largest (max|.| /
    max|truth|), for which `worst` is the factor if given. `floor`, some ulps of float32, is for
    references that are exact by luck. It need not grow for 16-bit results: where the reference's
    rounding is smaller, the truth is almost a representable number, to which `got` rounds as well.
    """

    def check(where: str, got: Any, reference: Any, truth: Any) -> None:
        assert got.dtype == reference.dtype, f"{where}: {got.dtype=}, {reference.dtype=}"
        assert truth.dtype == np.float64, f"{where}: the truth is {truth.dtype}, not float64"
        _assert_same_form(where, got, truth)
        _assert_same_form(where, reference, truth)
        with np.errstate(over="ignore"):
            rounded = to_float64(np.asarray(truth).astype(got.dtype))
        got, reference = to_float64(got), to_float64(reference)
        _assert_same_specials(f"reference {where}", reference, rounded)
        _assert_same_specials(where, got, rounded)
        truth = np.where(np.isfinite(rounded), truth, 0.0)
        norms = ("mean", _root_mean_square, factor), ("largest", _largest, worst or factor)
        for name, norm, times in norms:
            error, own = norm(_finite(got) - truth), norm(_finite(reference) - truth)
            allowed = times * own + floor * norm(truth)
            assert error <= allowed, (
                f"{where}: {name} error {error:.3g}, reference {own:.3g}, allowed {allowed:.3g}"
            )

    _for_each_leaf(check, got, same_dtype_reference, float64_truth)


def to_float64(x: Any) -> npt.NDArray[np.float64]:
    """An array of any real dtype, as NumPy's float64."""
    return np.asarray(x).astype(np.float64)


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """`fn` of the same arguments in float64: the truth, if `fn` does not cast on its way.

    Floating arguments are widened, the rest kept; results are NumPy's. For the truth of a gradient,
    let `fn` be what takes it.
    """

    def widen(x: Any) -> Any:
        return to_float64(x) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(fn)(*jax.tree.map(widen, args)))


def random_array(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = jnp.float32, scale: float = 1.0
) -> jax.Array:
    """Normal numbers."""
    return on_device(scale * rng.standard_normal(shape), dtype)


def on_device(x: npt.ArrayLike, dtype: Any = None) -> jax.Array:
    """NumPy's numbers as JAX's; `jnp.asarray` would compile a program for each shape."""
    with np.errstate(over="ignore"):
        array: jax.Array = jax.device_put(np.asarray(x, dtype))
    return array


def on_host(tree: Any) -> Any:
    """NumPy's numbers: to cut JAX's own into shards takes a program for each shape."""
    return jax.tree.map(np.asarray, tree)


def random_cotangents(rng: np.random.Generator, tree: Any) -> Any:
    """A random cotangent for each array of `tree`, which may be of `jax.ShapeDtypeStruct`.

    Random, since a sum of outputs has cotangents of ones, under which a softmax has no gradient.
    """

    def cotangent(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return random_array(rng, x.shape, x.dtype)
        return np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(cotangent, tree)


def value_and_vjp(
    fn: Callable[..., Any], args: tuple[Any, ...], cotangents: Any
) -> tuple[Any, Any]:
    """`fn(*args)` and the cotangents of `args`, in one compiled call."""
    out, grads = _with_vjp(fn)(args, cotangents)
    return out, grads


@functools.lru_cache(maxsize=64)
def _with_vjp(fn: Callable[..., Any]) -> Any:
    """One function for each `fn`, so that its compilations are shared."""

    def both(args: tuple[Any, ...], cotangents: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(fn, *args)
        return out, pull(cotangents)

    return jax.jit(both)


def case(**settings: Any) -> Any:
    """A dict of settings to parametrize a test with, and an id such as `n33-chunk16-reverse`."""

    def word(name: str, value: Any) -> str:
        if isinstance(value, bool):
            return name if value else ""
        value = getattr(value, "__name__", value)
        return f"{name}{value}" if isinstance(value, int | float) else str(value)

    words = (word(name, value) for name, value in settings.items() if value is not None)
    return pytest.param(settings, id="-".join(filter(None, words)) or "default")


def in_turn(cases: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Each case with one value, and each value with a case, to parametrize a test.

    For programs that take long to compile; `tests/fuzz` draws every combination.
    """

    def parameters(x: Any) -> Any:
        name = getattr(x, "__name__", None) or getattr(x, "name", None) or str(x)
        return x if hasattr(x, "values") else pytest.param(x, id=name)

    count = max(len(cases), len(values))
    pairs = zip(range(count), itertools.cycle(cases), itertools.cycle(values), strict=False)
    return [
        pytest.param(*a.values, *b.values, id=f"{a.id}-{b.id}")
        for a, b in (map(parameters, pair) for _, *pair in pairs)
    ]


def _for_each_leaf(check: Callable[..., None], got: Any, *others: Any) -> None:
    """Calls `check(name, leaf, ...)`; the trees must have one structure."""
    jax.tree.map_with_path(
        lambda path, *leaves: check(f"array{jax.tree_util.keystr(path)}", *leaves), got, *others
    )


def _assert_same_form(where: str, got: Any, want: Any) -> None:
    assert got.shape == want.shape, f"{where}: {got.shape=}, {want.shape=}"
    assert want.dtype in (got.dtype, np.float64), f"{where}: {got.dtype=}, {want.dtype=}"


def _assert_same_specials(where: str, got: Any, want: Any) -> None:
    """NaN and infinities stand in the same places, with the same signs."""
    special = ~np.isfinite(got) | ~np.isfinite(want)
    np.testing.assert_array_equal(got[special], want[special], f"{where}: NaN or infinite")


def _finite(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(np.isfinite(x), x, 0.0)


def _root_mean_square(x: npt.NDArray[np.float64]) -> float:
    return float(np.linalg.norm(x) / max(x.size, 1) ** 0.5)


def _largest(x: npt.NDArray[np.float64]) -> float:
    return float(np.abs(x).max(initial=0.0))


def kernel_implementation() -> Literal["triton", "interpret"]:
    """The kernels as this machine can run them: on an NVIDIA GPU, or emulated, or interpreted."""
    if jax.default_backend() == "gpu":
        return "triton"
    if emulate.is_possible():
        emulate.install()
        return "triton"
    return "interpret"
