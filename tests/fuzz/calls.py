"""Random calls of the ops: signatures, which are compiled, and the numbers of a call.

A signature is all that a program is compiled for: shapes, dtypes, static arguments, transforms.
Signatures are random, but there are few, for compiling takes longest; each call has new numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Values = dict[str, Any]
Float64 = npt.NDArray[np.float64]

SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 100, 127, 129, 257)
TRANSFORMS = (  # the outermost first
    ("jit",),
    (),
    ("jit", "grad"),
    ("jit", "vmap"),
    ("jit", "grad", "vmap"),
    ("grad",),
    ("jit", "scan"),
    ("jit", "vmap", "grad"),
    ("jit", "grad", "remat"),
    ("vmap",),
    ("jit", "grad", "scan"),
)
MULTIPLIERS = dict(zeros=0.0, small=1e-3, large=2.0)


class Operand(NamedTuple):
    """An array argument, and where it has a batch axis under vmap or scan; None: it has none."""

    shape: tuple[int, ...]
    dtype: str
    axis: int | None = None

    @property
    def is_floating(self) -> bool:
        """In more than eight bits, which have no gradient."""
        dtype = jnp.dtype(self.dtype)
        return dtype.itemsize > 1 and bool(jnp.issubdtype(dtype, jnp.floating))


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a call is compiled for."""

    op: str
    operands: tuple[tuple[str, Operand], ...]
    static: tuple[tuple[str, Any], ...]
    transform: tuple[str, ...] = ()
    batch: int | None = None  # the size of vmap's axis
    x64: bool = False

    @property
    def differentiable(self) -> tuple[int, ...]:
        return tuple(i for i, (_, x) in enumerate(self.operands) if x.is_floating)

    @property
    def axes(self) -> tuple[int | None, ...]:
        return tuple(x.axis for _, x in self.operands)

    @property
    def has_gradient(self) -> bool:
        return "grad" in self.transform


class Call(NamedTuple):
    """A signature, and the numbers: of a kind, with some special ones among them."""

    signature: Signature
    kind: str
    specials: tuple[float, ...]
    seed: int


class Near(NamedTuple):
    """What a result should be, and the size of the numbers that it is a sum of."""

    want: Float64
    scale: Any


Form = tuple[str, dict[str, Operand], dict[str, Any]]  # name, arrays, static arguments
Truths = tuple[list[Near], list[Near]]
# Results and gradients of one signature without a transform, for some operands and cotangents.
Truth = Callable[[Signature, Values, tuple[Float64, ...]], Truths]


class FuzzedOp(NamedTuple):
    """How calls of an op are made, and what they are compared with."""

    form: Callable[[Rng], Form]  # where None stands for an argument that is not given
    truth: Truth
    terms: int
    kinds: tuple[str, ...]
    refused: Callable[[Form], Iterator[dict[str, Any]]]  # changes that make a call invalid
    config: Any
    launches: dict[str, tuple[Any, ...]]  # of which a config is made


FLOATS = ("normal", "zeros", "tiny", "wide")
EVERYTHING = (*FLOATS, "extreme", "rising", "falling", "stairs")
MODEST = ("normal", "zeros", "small", "large")


def split(arguments: dict[str, Any]) -> tuple[dict[str, Operand], dict[str, Any]]:
    """The arrays and the others."""
    operands = {k: v for k, v in arguments.items() if isinstance(v, Operand)}
    return operands, {k: v for k, v in arguments.items() if k not in operands}


def pick(rng: Rng, *options: Any) -> Any:
    """One of the options, as it is."""
    return options[rng.integers(len(options))]


def random_shape(rng: Rng) -> tuple[int, ...]:
    """Of any rank but 0, with at most 3,000 numbers; now and then with an empty axis."""
    shape = [pick(rng, *SIZES) for _ in range(rng.integers(1, 5))]
    while math.prod(shape) > 3000:
        shape[rng.integers(len(shape))] = pick(rng, *SIZES[:7])
    if rng.random() < 0.05:
        shape[rng.integers(len(shape))] = 0
    return tuple(shape)


def random_dtype(rng: Rng) -> str:
    return str(pick(rng, *["float32", "bfloat16", "float16"] * 4, "float64"))


def transformed(rng: Rng, s: Signature) -> Signature:
    """`s` under random transforms."""
    transform = pick(rng, *TRANSFORMS)
    wide = any(x.dtype.endswith("64") for _, x in s.operands)
    s = dataclasses.replace(s, transform=transform, x64=wide or rng.random() < 0.1)
    if not {"vmap", "scan"} & set(transform):
        return s
    every = transform[-2:] == ("vmap", "grad")  # else gradients would have another batch axis
    batched = [every or rng.random() < 0.6 for _ in s.operands]
    batched[rng.integers(len(batched))] = True
    operands = (
        (name, x._replace(axis=int(rng.integers(len(x.shape) + 1)) if here else None))
        for (name, x), here in zip(s.operands, batched, strict=True)
    )
    return dataclasses.replace(s, operands=tuple(operands), batch=pick(rng, 1, 2, 3))


def numbers(rng: Rng, x: Operand, call: Call, most: float = math.inf) -> Any:
    """An array of the call's kind; at most `most` in magnitude, but for the special numbers."""
    info = jnp.finfo(x.dtype)
    most, tiny = min(most, float(info.max)), float(info.tiny)
    y: Any = MULTIPLIERS.get(call.kind, 1.0) * rng.standard_normal(x.shape)
    if call.kind == "wide":
        y *= 10.0 ** rng.uniform(-30, np.log10(most) - 1, x.shape)
    elif call.kind == "extreme":
        y = rng.choice([most, -most, tiny, -0.0, 1.0], x.shape)
    elif call.kind == "tiny":
        y *= 4 * tiny
    elif call.kind == "rising":
        y = np.sort(100 * y, axis=None).reshape(x.shape)
    elif call.kind == "falling":
        y = -np.sort(100 * y, axis=None).reshape(x.shape)
    elif call.kind == "stairs":
        y += 300.0 * (np.arange(y.size).reshape(x.shape) // 8)
    y = np.clip(y, -most, most)
    if call.specials:
        y = np.where(rng.random(x.shape) < 0.03, rng.choice(call.specials, x.shape), y)
    return y.astype(jnp.dtype(x.dtype))


def integers(rng: Rng, x: Operand, low: int, high: int) -> Any:
    """From low to high, as far as the dtype goes."""
    info = np.iinfo(x.dtype)
    low, high = max(low, info.min), min(high, info.max)
    return rng.integers(low, high, x.shape, endpoint=True).astype(x.dtype)
