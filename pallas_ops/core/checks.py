"""Refusals in our own words: what was given, and what would be accepted."""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops.core.tiles import MOST_PARTS

KERNEL_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
FLOAT_DTYPES = (*KERNEL_DTYPES, jnp.dtype("float64"))
MAX_WARPS = 32  # of a program
LARGEST = 2**20  # limit of the other launch choices: Triton's of elements in a tile
_MOST = dict(num_warps=MAX_WARPS, num_parts=MOST_PARTS, num_splits=MOST_PARTS)
SHOWN = 80  # characters of a value in a message
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def cached(check: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """`check`, remembered by values and types of its arguments: 1.0 may be refused where 1 is not.

    Items of a tuple are compared by value alone, so no argument may be a tuple that a caller gave.
    Arguments that cannot be hashed are checked each time.
    """
    remembered: Any = functools.lru_cache(maxsize=1024, typed=True)(check)

    def run(*args: *Ts) -> T:
        try:
            hash(args)
        except TypeError:
            return check(*args)
        return remembered(*args)

    return run


def signature(x: jax.Array | None) -> Any:
    """The shape and dtype of an array: what checks need of it, and hashable."""
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)


def array(name: str, value: Any) -> jax.Array:
    """`jax.numpy.asarray` of NumPy arrays, numbers and lists."""
    if isinstance(value, jax.Array):
        return value
    try:
        x = jnp.asarray(value)
    except OverflowError:
        raise ValueError(f"{shown(name, value)}; accepted: int32 (in x64 mode int64)") from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{shown(name, value)}; accepted: an array, or numbers that jax.numpy.asarray takes"
        ) from error
    may_wrap = jnp.issubdtype(x.dtype, jnp.integer) and getattr(value, "dtype", None) != x.dtype
    if may_wrap and is_beyond(value, jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max):
        raise ValueError(f"{shown(name, value)}; accepted: integers that {x.dtype} holds")
    return x


def is_beyond(value: Any, least: int, most: int) -> bool:
    """Whether any integer is outside [least, most]; False for a jax.Array or a symbolic size."""
    for x in jax.tree.leaves(value):
        if isinstance(x, jax.Array) or hasattr(x, "__jax_array__") or jax.export.is_symbolic_dim(x):
            return False
    given = np.asarray(value)
    return bool(np.any((given < least) | (given > most)))


def optional_array(name: str, value: Any) -> jax.Array | None:
    return None if value is None else array(name, value)


def one_of(name: str, value: Any, options: tuple[str | None, ...]) -> None:
    # An array compares elementwise, so the type is tested before `in`.
    if not isinstance(value, str | None) or value not in options:
        raise ValueError(f"{shown(name, value)}; accepted: {', '.join(map(repr, options))}")


def floating(name: str, x: Any) -> None:
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{name}.dtype is '{x.dtype}'; accepted: bfloat16, float16, "
            "float32, and float64 (which runs the jax.numpy reference)"
        )


def any_floating(name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype is '{x.dtype}'; accepted: a floating dtype")


def integers(name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype is '{x.dtype}'; accepted: integers")


def axis(value: Any, shape: tuple[int, ...]) -> int:
    """An axis of x, counted from the front."""
    if not is_index(value):
        raise TypeError(f"{shown('axis', value)}; accepted: an int")
    index = operator.index(value)
    if not -len(shape) <= index < len(shape):
        raise ValueError(
            f"{shown('axis', value)} and x.shape {shape}; accepted: -x.ndim <= axis < x.ndim"
        )
    return index % len(shape)


def axis_name(value: Any) -> tuple[str, ...] | None:
    """None, or mesh axes of the `jax.shard_map` around the call, the major one first."""
    if value is None:
        return None
    names = value if isinstance(value, tuple) else (value,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{shown('axis_name', value)}; accepted: None, a str or a tuple of them")
    if len(set(names)) < len(names):
        raise ValueError(f"{shown('axis_name', value)}; accepted: each mesh axis once")
    try:
        jax.lax.axis_size(names)
    except NameError:
        raise ValueError(
            f"{shown('axis_name', value)}; accepted: None, or a mesh axis of the jax.shard_map "
            "that this call is inside of"
        ) from None
    return names


def integer(name: str, value: Any, *, least: int) -> int:
    if not is_index(value) or operator.index(value) < least:
        error = ValueError if is_index(value) else TypeError
        raise error(f"{shown(name, value)}; accepted: an int >= {least}")
    return operator.index(value)


def is_index(value: Any) -> bool:
    """Whether `value` is a Python or NumPy integer."""
    if isinstance(value, bool | np.bool_) or (hasattr(value, "shape") and value.shape != ()):
        return False
    try:
        operator.index(value)
    except TypeError:  # a tracer, too
        return False
    return True


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{shown(name, value)}; accepted: True or False")
    return bool(value)


def is_number(value: Any) -> bool:
    """Whether `value` is a real number of Python, NumPy or ml_dtypes (bfloat16), and no array."""
    is_scalar = isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    return is_scalar or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def number(name: str, value: Any, accepted: str) -> float:
    """A real number as a float."""
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{shown(name, value)}; accepted: {accepted}") from None


def scale(name: str, value: Any, dtype: Any) -> float | jax.Array | None:
    """A number that is finite in `dtype`; or a real scalar array, which may be traced.

    The array comes back in `dtype`: a product of scales is not to be rounded to 16 bits.
    """
    if value is None:
        return None
    if is_number(value):
        accepted = "None or a finite number"
        factor = number(name, value, accepted)
        if not abs(factor) <= float(jnp.finfo(dtype).max):
            raise ValueError(f"{shown(name, value)}; accepted: {accepted}")
        return factor
    is_array = hasattr(value, "dtype") and not isinstance(value, type)
    real = is_array and any(jnp.issubdtype(value.dtype, x) for x in (jnp.integer, jnp.floating))
    if not real or value.shape != ():
        raise TypeError(
            f"{shown(name, value)}; accepted: None, a real number, or a real array of shape []"
        )
    return array(name, value).astype(dtype)


class Axes:
    """The sizes of axis letters, and the argument that gave each."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self._givers: dict[str, str] = {}

    def learn(self, name: str, **sizes: int) -> None:
        """Sizes that the argument `name` gives."""
        self.sizes = sizes | self.sizes
        self._givers = dict.fromkeys(sizes, name) | self._givers

    def check(self, name: str, x: Any, *forms: str) -> None:
        """Checks the shape of `x` against the form of its rank, "B M H" say, and learns from it."""
        for form in map(str.split, forms):
            sizes = dict(zip(form, x.shape, strict=False))
            if len(form) == len(x.shape) and sizes == sizes | self._known(form):
                self.learn(name, **sizes)
                return
        said = " or ".join(f"[{', '.join(form.split())}]" for form in forms)
        known: dict[str, list[str]] = {}
        for letter, size in self._known(" ".join(forms).split()).items():
            known.setdefault(self._givers[letter], []).append(f"{letter}={size}")
        given = (f"{', '.join(sizes)} (as in {giver})" for giver, sizes in known.items())
        known_sizes = " with " + ", ".join(given) if known else ""
        raise ValueError(f"{name}.shape is {x.shape}; accepted: {said}{known_sizes}")

    def _known(self, letters: Sequence[str]) -> dict[str, int]:
        return {letter: self.sizes[letter] for letter in letters if letter in self.sizes}


def launch_choices(
    config: Any, *, powers_of_two: Collection[str], least: Mapping[str, int] | None = None
) -> None:
    """Refuses ints of a config that no launch can have; `least` has lower limits other than 1."""
    for field in dataclasses.fields(config):
        name, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
        low = (least or {}).get(field.name, 1)
        high = _MOST.get(field.name, LARGEST)
        if field.type is not int:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{shown(name, value)}; accepted: an int from {low} to {high}")
        if field.name in powers_of_two and value & (value - 1):
            raise ValueError(f"{shown(name, value)}; accepted: a power of two")


def shown(name: str, value: Any) -> str:
    """The beginning of a message: arrays by dtype and shape, whatever is long cut short."""
    is_shaped = hasattr(value, "dtype") and hasattr(value, "shape")
    if is_shaped and not isinstance(value, np.generic | type):
        is_array = isinstance(value, jax.Array | np.ndarray)
        kind = "an array" if is_array else type(value).__name__
        return f"{name} is {kind} {value.dtype}[{', '.join(map(str, value.shape))}]"
    text = repr(value)
    return f"{name} is {text if len(text) <= SHOWN else text[: SHOWN - 3] + '...'}"
