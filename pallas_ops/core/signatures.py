"""Checks that run once for all calls of one signature: shapes, dtypes and static arguments."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

import jax

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def cached(check: Callable[[*Ts], T]) -> Callable[[*Ts], T]:
    """`check`, remembered by its arguments and their types: 1.0 may be refused where 1 is not.

    Items of a tuple are compared by value alone, so no argument may be a tuple that a caller gave.
    What cannot be hashed is checked each time, to be refused in our own words.
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
    """What checks need of an array, and can be hashed."""
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
