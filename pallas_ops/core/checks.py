"""Refusals in our own words: what was given, and what would be accepted."""

import dataclasses
import functools
import numbers
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, TypeVarTuple

import jax.numpy as jnp

from pallas_ops.core.dispatch import Implementation

IMPLEMENTATIONS = (None, "triton", "xla", "interpret")
KERNEL_DTYPES = (jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32"))
FLOAT_DTYPES = (*KERNEL_DTYPES, jnp.dtype("float64"))
LONGEST = 2**31 - 1  # an axis that kernels can count along
MAX_WARPS = 32  # of a program
LARGEST = 2**20  # elements of a tile

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def cached(check: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """`check`, remembered by its arguments and their types: 1.0 may be refused where 1 is not.

    Within a tuple they are told apart by value alone, so what a caller gives is no part of one.
    What cannot be hashed is checked each time, to be refused in our own words.
    """
    remembered: Any = functools.lru_cache(maxsize=1024, typed=True)(check)

    def run(*args: *Ts) -> T:
        try:
            hash(args)
        except TypeError:
            return check(*args)
        result: T = remembered(*args)
        return result

    return run


def one_of(name: str, value: Any, options: tuple[str | None, ...]) -> None:
    # What is neither may compare as an array does, and have no one truth.
    if not isinstance(value, str | None) or value not in options:
        raise ValueError(f"{_is(name, value)}; accepted: {', '.join(map(repr, options))}")


def implementation(value: Any, config: Any, cls: type) -> None:
    """One of those there are; a config, if any, is its kernel's."""
    one_of("implementation", value, IMPLEMENTATIONS)
    instance("config", config, cls)
    if value == "xla" and config is not None:
        raise ValueError("config and implementation='xla' are both given; accepted: one of them")


def same_floating(arrays: Mapping[str, Any]) -> None:
    """All arrays have one dtype, a floating one."""
    (first, x), *others = arrays.items()
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(
            f"{_is(f'{first}.dtype', str(x.dtype))}; accepted: bfloat16, float16, "
            "float32, and float64 (which runs the jax.numpy reference)"
        )
    for name, other in others:
        if other.dtype != x.dtype:
            raise TypeError(
                f"{_is(f'{name}.dtype', str(other.dtype))}; accepted: that of {first}, {x.dtype}"
            )


def axis(value: Any, shape: tuple[int, ...]) -> int:
    """An axis of x, counted from the front."""
    try:
        index = operator.index(value)
        if isinstance(value, bool):
            raise TypeError
    except TypeError:
        raise TypeError(f"{_is('axis', value)}; accepted: an int") from None
    if not -len(shape) <= index < len(shape):
        raise ValueError(
            f"{_is('axis', value)} and x.shape {shape}; accepted: -x.ndim <= axis < x.ndim"
        )
    return index % len(shape)


def integers(name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{_is(f'{name}.dtype', str(x.dtype))}; accepted: integers")


def kernel_or_reference(
    implementation: Implementation | None, dtype: Any, sizes: Mapping[str, int]
) -> Implementation | None:
    """The reference for what no kernel takes (float64, an axis of size 0); else as asked."""
    unknown = [name for name, size in sizes.items() if not isinstance(size, int)]
    if unknown:  # of `jax.export`
        return reference_instead(implementation, f"symbolic sizes ({', '.join(unknown)})")
    empty = [name for name, size in sizes.items() if size == 0]
    if empty:
        return reference_instead(implementation, f"an axis of size 0 ({', '.join(empty)})")
    long = [name for name, size in sizes.items() if size > LONGEST]
    if long:
        return reference_instead(implementation, f"2**31 or more ({', '.join(long)})")
    if jnp.dtype(dtype) not in KERNEL_DTYPES:
        return reference_instead(implementation, jnp.dtype(dtype).name)
    return implementation


def reference_instead(implementation: Implementation | None, of: str) -> Implementation:
    """The reference, since no kernel takes `of`; a refusal if the kernel was asked for."""
    if implementation in ("triton", "interpret"):
        raise ValueError(
            f"{_is('implementation', implementation)}, whose kernel does not take {of}; "
            "accepted: None or 'xla'"
        )
    return "xla"


def shape(name: str, x: Any, axes: str, sizes: dict[str, int]) -> None:
    """Checks `x` against axis letters ("B M H"), filling in `sizes` as letters are first met."""
    letters = axes.split()
    if len(x.shape) != len(letters):
        raise ValueError(f"{_is(f'{name}.shape', x.shape)}; accepted: [{', '.join(letters)}]")
    for letter, size in zip(letters, x.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            known = ", ".join(f"{k}={sizes[k]}" for k in letters)
            raise ValueError(
                f"{_is(f'{name}.shape', x.shape)}; accepted: [{', '.join(letters)}] with {known}"
            )


def number_or_none(name: str, value: Any) -> float | None:
    """A static Python or NumPy real number, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{_is(name, value)}; accepted: a Python or NumPy real number, or None (to scale by a "
            "traced value, multiply an input by it)"
        )
    return float(value)


def launch_choices(
    config: Any, *, powers_of_two: Collection[str], least: Mapping[str, int] | None = None
) -> None:
    """The ints among a config's fields are such as a launch can have; `least` if that is not 1."""
    for field in dataclasses.fields(config):
        name, value = f"{type(config).__name__}.{field.name}", getattr(config, field.name)
        low = (least or {}).get(field.name, 1)
        high = MAX_WARPS if field.name == "num_warps" else LARGEST
        if field.type is not int:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"{_is(name, value)}; accepted: an int from {low} to {high}")
        if field.name in powers_of_two and value & (value - 1):
            raise ValueError(f"{_is(name, value)}; accepted: a power of two")


def instance(name: str, value: Any, cls: type) -> None:
    if value is not None and not isinstance(value, cls):
        raise TypeError(f"{_is(name, value)}; accepted: None or a {cls.__name__}")


def _is(name: str, value: Any) -> str:
    return f"{name} is {value!r}"
