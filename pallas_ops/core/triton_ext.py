"""Features of Triton that Pallas lacks: scans, gathers, and pipelined loops.

The private JAX that this takes is imported here and nowhere else. Without it, kernels that scan run
as jax.numpy, no kernel gathers, and loops are not pipelined.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from pallas_ops.core import backend, launch

try:
    ir: Any = importlib.import_module("jax._src.lib.mlir").ir
    triton: Any = importlib.import_module("jax._src.lib.triton").dialect
    lowering: Any = importlib.import_module("jax._src.pallas.triton.lowering")
    _needed = (
        *(ir.InsertionPoint, ir.IntegerAttr, ir.IntegerType),
        *(triton.ScanOp, triton.scan_return, triton.gather),
        *(lowering._ensure_ir_value, lowering._element_type, lowering.lower_jaxpr_to_triton_ir),
        lowering.register_lowering,
    )
    AVAILABLE = True
except (ImportError, AttributeError):
    AVAILABLE = False

Tiles = Sequence[jax.Array]
Combine = Callable[[Tiles, Tiles], Tiles]


def scan(combine: Combine, xs: Tiles, *, axis: int, reverse: bool = False) -> tuple[jax.Array, ...]:
    """Inclusive scan of several tiles of one shape under an associative operator.

    `combine(before, after)` has to be elementwise; `before` is what the scan met first, which in
    reverse is what has the higher index.
    """
    if launch.is_interpreted():
        return tuple(lax.associative_scan(combine, tuple(xs), axis=axis, reverse=reverse))
    if not AVAILABLE:
        reason = f"JAX {jax.__version__} has no scans in kernels"
        raise backend.NoKernelError(reason, ", or an earlier JAX")
    return tuple(_scan_p.bind(*xs, combine=combine, axis=axis, reverse=reverse))


def pipelined(i: jax.Array, num_stages: int) -> jax.Array:
    """The loop index `i`; in its body, lets the loop's loads run `num_stages` - 1 steps ahead.

    Triton pipelines a loop without matrix products only where the loop has an attribute for it,
    which Pallas does not set.
    """
    if launch.is_interpreted() or not AVAILABLE or num_stages < 2:
        return i
    return _hint_p.bind(i, num_stages=num_stages)


def gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] of a tile [n], by way of shared memory; `index` has any shape, and is in range.

    Triton writes the tile to shared memory and waits for all threads. Then each thread reads the
    numbers that it needs, in the layout in which the result is used.
    """
    if launch.is_interpreted():
        return x[index]
    gathered: jax.Array = _gather_p.bind(x, index.reshape(-1))
    return gathered.reshape(index.shape)


_scan_p = Primitive("pallas_ops_scan")
_scan_p.multiple_results = True
_scan_p.def_abstract_eval(lambda *xs, **_: [ShapedArray(x.shape, x.dtype) for x in xs])

_gather_p = Primitive("pallas_ops_gather")
_gather_p.def_abstract_eval(lambda x, i: ShapedArray(i.shape, x.dtype))

_hint_p = Primitive("pallas_ops_loop_hint")
_hint_p.def_abstract_eval(lambda x, **_: ShapedArray(x.shape, x.dtype))


def _lower_scan(ctx: Any, *xs: Any, combine: Combine, axis: int, reverse: bool) -> list[Any]:
    operands = [lowering._ensure_ir_value(x, a) for x, a in zip(xs, ctx.avals_in, strict=True)]
    op = triton.ScanOp(operands, axis, reverse)
    types = [lowering._element_type(x.type) for x in operands]
    entry = op.regions[0].blocks.append(*types, *types)
    scalars = [jax.ShapeDtypeStruct((), a.dtype) for a in ctx.avals_in]
    jaxpr = jax.make_jaxpr(lambda *ab: tuple(combine(ab[: len(xs)], ab[len(xs) :])))(
        *scalars, *scalars
    )
    with ir.InsertionPoint.at_block_begin(entry):
        results = lowering.lower_jaxpr_to_triton_ir(
            ctx.context, jaxpr.jaxpr, None, *entry.arguments
        )
        triton.scan_return(results)
    op.verify()
    return list(op.result)


def _lower_gather(ctx: Any, *operands: Any) -> Any:
    pairs = zip(operands, ctx.avals_in, strict=True)
    return triton.gather(*(lowering._ensure_ir_value(x, a) for x, a in pairs), axis=0)


def _lower_hint(ctx: Any, x: Any, *, num_stages: int) -> Any:
    loop = ir.InsertionPoint.current.block.owner
    loop = getattr(loop, "operation", loop)
    loop.attributes["tt.num_stages"] = ir.IntegerAttr.get(
        ir.IntegerType.get_signless(32), num_stages
    )
    return lowering._ensure_ir_value(x, ctx.avals_in[0])


if AVAILABLE:
    lowering.register_lowering(_scan_p)(_lower_scan)
    lowering.register_lowering(_gather_p)(_lower_gather)
    lowering.register_lowering(_hint_p)(_lower_hint)
