"""Arguments that no op accepts."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.fuzz.calls import Form, Operand

TRACED = Operand((), "int32")
NOT_INTEGERS = (1.0, "1", None, True, 1j, [1], np.ones(2), object(), math.nan, TRACED)
NOT_FLAGS = (1, 0, None, "yes", 0.0, [True], np.ones(2), TRACED)
NOT_NAMES = ("", "X", 1, True, b"none", ["none"], np.ones(2), object(), 10**400, TRACED)
NOT_SCALES = ("1", math.inf, math.nan, 10**400, 1j, True, [1.0], np.ones(2), object())
NOT_ARRAYS: Any = (object(), {}, "x", [[1.0], [1.0, 2.0]], len, 10**400, np.array(["a"]), {1.0})
NOT_DTYPES: Any = ("int8", "float99", int, 3, "complex64", "float8_e4m3fn", object(), [], {}, "f,f")
NOT_AXIS_NAMES = (0, "nowhere", True, ["x"])
SCALES = ("scale", "scale_q", "scale_k", "scale_v")
OPTIONAL = ("bq", "initial_state", "cu_seqlens", "positions", "lengths", "page_table", *SCALES)


def each(**values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    for name, options in values.items():
        yield from ({name: value} for value in options)


def not_axes(form: Form) -> tuple[Any, ...]:
    rank = len(form[1]["x"].shape)
    return (*NOT_INTEGERS, rank, -rank - 1, 10**30)
