"""The public face of logcumsumexp."""

import dataclasses
from collections.abc import Callable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_ops.core import checks, forward_mode, implementations, shards
from pallas_ops.core.dispatch import Implementation
from pallas_ops.core.shards import AxisName
from pallas_ops.core.tiles import wide
from pallas_ops.ops.logcumsumexp import reference, vjp
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig, Params, choose_block_n
from pallas_ops.scan.view import Sizes, implementation_for


def logcumsumexp(
    x: ArrayLike,
    *,
    axis: SupportsIndex = -1,
    reverse: bool | np.bool_ = False,
    initial_state: ArrayLike | None = None,
    clip: float | np.floating[Any] | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: LogcumsumexpConfig | None = None,
) -> jax.Array:
    """The logarithm of running sums of exponentials (`jax.lax.cumlogsumexp`, but exact).

        o_i = log(exp(s) + sum_{j<=i} exp(x_j))

    along one axis, with s the initial state; in reverse, over j >= i.

    Computed in float32 and returned in the dtype of x. Exact for every range and length: however
    far apart the numbers are, and however many small ones follow a large one, the result and
    its gradients are those of a float64 evaluation, to float32 rounding. -inf contributes nothing
    and gets gradient 0; where there has been nothing else, o is -inf and passes no gradient on.
    +inf and NaN act from their position on. Gradients at +inf are those of
    `jax.scipy.special.logsumexp`: NaN for an x of +inf, and 0 for any other x from an o that is
    +inf; an o that is NaN makes those of all x in it NaN.

    Args:
      x: bfloat16, float16, float32 (float64 runs the reference), of any rank but 0.
      axis: the axis of the running sums; none is transposed or copied for it.
      reverse: sum from the end.
      initial_state: floating, broadcastable to x's shape with length 1 on `axis`; default: -inf.
      clip: clamps x and the state to [-clip, clip] first, with gradient 0 outside. A number >= 0;
        nothing is outside of one that float32 (for float64 x, float64) does not hold.
      axis_name: inside `jax.shard_map`, the mesh axis (or a tuple of them, the major first) over
        which `axis` is sharded, in order: the sums are those of the whole sequence, whose initial
        state enters its first shard and whose final state all shards get. Shards exchange one
        state each, forward and backward.
      implementation: None (the kernel on NVIDIA GPUs; jax.numpy elsewhere or, with a warning, where
        none can run), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices; None: by shape, dtype and GPU. "xla" takes none.

    Returns:
      An array like x. Differentiable in x and initial_state.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: the kernels parallel and recurrence of xopes, to which it adds exactness, any axis,
    clipping and reversal without copies, and a backward pass that saves nothing of x's size but x.
    """
    static = axis, reverse, clip, implementation, config
    return _run(*prepare(x, initial_state, axis_name, *static))[0]


def logcumsumexp_with_state(
    x: ArrayLike,
    *,
    axis: SupportsIndex = -1,
    reverse: bool | np.bool_ = False,
    initial_state: ArrayLike | None = None,
    clip: float | np.floating[Any] | None = None,
    axis_name: AxisName | None = None,
    implementation: Implementation | None = None,
    config: LogcumsumexpConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`logcumsumexp`, and the final state: float32, x's shape with length 1 on `axis`.

    It is the initial state of what follows: a sequence may be split anywhere (with `clip`, only if
    the state lies in [-clip, clip], as it is clipped too). For a float64 x it is float64.
    """
    static = axis, reverse, clip, implementation, config
    return _run(*prepare(x, initial_state, axis_name, *static))


def prepare(
    x: ArrayLike, initial_state: ArrayLike | None, axis_name: AxisName | None, *static: Any
) -> tuple[Params, jax.Array, jax.Array | None]:
    """What `evaluate` takes, or a refusal; `static` is what `_check` takes beside these."""
    x, initial = checks.array("x", x), checks.optional_array("initial_state", initial_state)
    names = checks.axis_name(axis_name)
    facts = checks.signature(x), checks.signature(initial), names
    return _check(*facts, *static), x, initial


@checks.cached
def _check(
    x: jax.ShapeDtypeStruct,
    initial: jax.ShapeDtypeStruct | None,
    axis_name: tuple[str, ...] | None,
    axis: SupportsIndex,
    reverse: bool | np.bool_,
    clip: Any,
    implementation: Implementation | None = "xla",
    config: LogcumsumexpConfig | None = None,
) -> Params:
    """The static arguments, checked. Arguments can be hashed, so results are cached."""
    implementations.check(implementation, config, LogcumsumexpConfig)
    checks.floating("x", x)
    axis = checks.axis(axis, x.shape)
    reverse = checks.flag("reverse", reverse)
    clip = _check_clip(clip, x.dtype)
    if initial is not None:
        checks.any_floating("initial_state", initial)
        shape, want = initial.shape, (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        pairs = zip(shape[::-1], want[::-1], strict=False)
        if len(shape) > len(want) or not all(size in (1, full) for size, full in pairs):
            raise ValueError(
                f"initial_state.shape is {shape}; accepted: {want}, or what broadcasts to it"
            )
    implementation = implementation_for(implementation, x.shape, axis, x.dtype)
    block_n = 1
    if implementation != "xla":
        s = Sizes.of(x.shape, axis, x.dtype.itemsize)
        block_n = config.block_n if config else choose_block_n(s)
    return Params(
        axis=axis,
        reverse=reverse,
        clip=clip,
        block_n=block_n,
        axis_name=axis_name,
        implementation=implementation,
        config=config,
    )


def _check_clip(clip: Any, dtype: Any) -> float | None:
    """A number that is finite in the dtype of the sums; None for a larger one."""
    if clip is None:
        return None
    if not checks.is_number(clip):
        raise TypeError(
            f"{checks.shown('clip', clip)}; accepted: None or a number >= 0 (to clip at a traced "
            "value, call jax.numpy.clip on x and on initial_state)"
        )
    accepted = "None or a number >= 0"
    if not clip >= 0:
        raise ValueError(f"clip is {clip!r}; accepted: {accepted}")
    clip = checks.number("clip", clip, accepted)
    return clip if clip <= float(jnp.finfo(wide(dtype)).max) else None


def evaluate(
    params: Params, x: jax.Array, initial: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The output, and the final state with an axis of length 1."""
    if params.axis == 0:  # the first axis of an `Op` is a batch
        if initial is not None:  # widened first, so that its gradient is not added up in 16 bits
            initial = jnp.broadcast_to(initial.astype(wide(x.dtype)), (1, *x.shape[1:]))[None]
        out, final = evaluate(dataclasses.replace(params, axis=1), x[None], initial)
        return out[0], final[0]
    if initial is not None:
        initial = reference.initial_state(initial, x, params.axis, params.clip)
    operands = shards.unify_but_replicated(params.axis_name, x, initial)
    if params.implementation == "xla":
        out, final = vjp.evaluate(params, *operands)
    else:
        out, final = vjp.accumulate(params, *forward_mode.refuse("logcumsumexp", *operands))
    return out, jnp.expand_dims(final, params.axis)


_run: Callable[..., tuple[jax.Array, jax.Array]] = jax.jit(evaluate, static_argnums=0, inline=True)
