"""The numbers of a random call."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.fuzz import tpa_decode
from tests.fuzz.calls import Call, Operand, Rng, Values, integers, numbers
from tests.support import TOLERANCES


def draw(rng: Rng, call: Call) -> Values:
    """Operands, as their names have it."""
    s = call.signature
    operands, static = dict(s.operands), dict(s.static)
    narrow = s.x64 or rng.random() < 0.3
    values: Values = {}
    for name, x in operands.items():
        if name == "cu_seqlens":
            values[name] = integers(rng, x, 0, operands["x"].shape[static["axis"]])
            values[name] = np.sort(values[name]) if rng.random() < 0.8 else values[name]
        elif name == "lengths":
            info, m = np.iinfo(x.dtype), operands["bk"].shape[1]
            m *= operands["page_table"].shape[1] if "page_table" in operands else 1
            odd = rng.choice(np.asarray([info.min, info.max], x.dtype), x.shape)
            values[name] = np.where(rng.random(x.shape) < 0.1, odd, integers(rng, x, -2, m + 2))
        elif name == "page_table":
            values[name] = integers(rng, x, -2, operands["bk"].shape[0] + 1)
        elif name in ("bk", "bv") and x.dtype == "int8":
            values[name] = integers(rng, x, -128, 127)
        elif (
            name in ("positions", "offset") and not x.is_floating
        ):  # positions and offsets; near 2**24 only float32 phases are exact
            values[name] = integers(rng, x, -100, 100 if narrow else 2**23)
        elif name in ("theta", "positions") or name.startswith("scale"):
            values[name] = rng.uniform(-2, 2, x.shape).astype(jnp.dtype(x.dtype))
        else:
            values[name] = _draw_numbers(rng, x, call)
            if name in ("ak", "av") and operands["bk"].dtype == "int8":
                values[name] /= np.asarray(64, values[name].dtype)
    return tpa_decode.spoilt(rng, call, values) if "bk" in values and call.specials else values


def _draw_numbers(rng: Rng, x: Operand, call: Call) -> Any:
    """Such that neither sums overflow, nor gradients have infinite terms of either sign."""
    s, static = call.signature, dict(call.signature.static)
    is_logarithm, kind = s.op.startswith("log"), call.kind
    most = min(float(jnp.finfo(y).max) for y in (x.dtype, static.get("dtype", x.dtype)))
    most /= 4096 if s.op.startswith("chunk") else 1
    if s.op.startswith("tpa"):
        call = call._replace(specials=())
    if s.has_gradient:
        # The loop's float64 has to tell equal numbers from the logarithm of their sum.
        most = min(most, 1e16 * TOLERANCES[jnp.dtype(x.dtype)].relative if is_logarithm else 1e20)
        if not is_logarithm:
            call = call._replace(specials=tuple(filter(math.isnan, call.specials)))
        if kind == "tiny" and (static.get("act") == "relu" or static.get("clip") == 0):
            call = call._replace(kind="small")  # a step at 0, for which subnormals may be taken
    return numbers(rng, x, call, most)
