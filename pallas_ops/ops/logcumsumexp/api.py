"""The public face of logcumsumexp."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_ops.core import checks, vary
from pallas_ops.core.dispatch import Implementation
from pallas_ops.ops.logcumsumexp import reference, vjp
from pallas_ops.ops.logcumsumexp.config import LogcumsumexpConfig, Sizes, choose_block_n


def logcumsumexp(
    x: jax.Array,
    *,
    axis: int = -1,
    reverse: bool = False,
    initial_state: jax.Array | None = None,
    clip: float | None = None,
    implementation: Implementation | None = None,
    config: LogcumsumexpConfig | None = None,
) -> jax.Array:
    """The logarithm of running sums of exponentials.

        o_i = log(exp(s) + sum_{j<=i} exp(x_j))

    along one axis, with s the initial state; in reverse, over j >= i.

    Computed in float32 and returned in the dtype of x. Exact for every range and length: however
    far apart the numbers are, and however many small ones stand behind a large one, the result and
    its gradients are those of a float64 evaluation, to float32 rounding. -inf contributes nothing
    and gets gradient 0; where there has been nothing else, o is -inf and passes no gradient on.
    +inf and NaN act from their position on. Gradients at +inf are those of
    `jax.scipy.special.logsumexp`: NaN for an x of +inf, and 0 for any other x from an o that is
    +inf; an o that is NaN makes those of all x in it NaN.

    Args:
      x: bfloat16, float16, float32 (float64 runs the reference), of any rank but 0.
      axis: the axis of the running sums; none is transposed or copied for it.
      reverse: sum from the end.
      initial_state: real, broadcastable to x's shape with length 1 on `axis`; default: -inf.
      clip: clamps x and the state to [-clip, clip] first, with gradient 0 outside. A Python number.
      implementation: None (the Triton kernel where the code is lowered for an NVIDIA GPU, jax.numpy
        elsewhere), "triton", "xla" (jax.numpy: also jvp, jacfwd, hessian) or "interpret".
      config: launch choices; None chooses by shape. "xla" takes none.

    Returns:
      An array like x. Differentiable in x and initial_state.

    Raises:
      ValueError, TypeError: while tracing, naming the argument, its value and what is accepted.

    Source: the kernels parallel and recurrence of xopes, to which it adds exactness, any axis,
    clipping and reversal without copies, and a backward pass that saves nothing of x's size but x.
    """
    return _accumulate(x, initial_state, axis, reverse, clip, implementation, config)[0]


def logcumsumexp_with_state(
    x: jax.Array,
    *,
    axis: int = -1,
    reverse: bool = False,
    initial_state: jax.Array | None = None,
    clip: float | None = None,
    implementation: Implementation | None = None,
    config: LogcumsumexpConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`logcumsumexp`, and the final state: float32, x's shape with length 1 on `axis`.

    It is the initial state of what follows: a sequence may be split anywhere. (With `clip`, that
    state is clipped as any other, so this holds up to `clip`. Of a float64 x it is float64.)
    """
    return _accumulate(x, initial_state, axis, reverse, clip, implementation, config)


def _accumulate(
    x: jax.Array,
    initial: jax.Array | None,
    axis: int,
    reverse: bool,
    clip: float | None,
    implementation: Implementation | None,
    config: LogcumsumexpConfig | None,
) -> tuple[jax.Array, jax.Array]:
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if initial is not None and not isinstance(initial, jax.Array):
        initial = jnp.asarray(initial)
    signature = None if initial is None else (initial.shape, initial.dtype)
    params = _check((x.shape, x.dtype), signature, axis, reverse, clip, implementation, config)
    return _run(x, initial, params=params)  # type: ignore[no-any-return]


@checks.cached
def _check(
    x: tuple[tuple[int, ...], Any],
    initial: tuple[tuple[int, ...], Any] | None,
    axis: int,
    reverse: bool,
    clip: float | None,
    implementation: Implementation | None,
    config: LogcumsumexpConfig | None,
) -> vjp.Params:
    """The static arguments, or a refusal; a function of what can be hashed, so it runs once."""
    checks.implementation(implementation, config, LogcumsumexpConfig)
    shape, dtype = x
    checks.same_floating({"x": jax.ShapeDtypeStruct(shape, dtype)})
    axis = checks.axis(axis, shape)
    if not isinstance(shape[axis], int):
        raise ValueError(f"x.shape is {shape}; accepted: symbolic sizes, but not on axis {axis}")
    if not isinstance(reverse, bool):
        raise TypeError(f"reverse is {reverse!r}; accepted: True or False")
    clip = checks.number_or_none("clip", clip)
    if clip is not None and not clip >= 0:
        raise ValueError(f"clip is {clip!r}; accepted: None or a number >= 0")
    if initial is not None:
        _check_initial(*initial, (*shape[:axis], 1, *shape[axis + 1 :]))
    implementation = _implementation(implementation, shape, axis, dtype)
    block_n = 1
    if implementation != "xla":
        s = Sizes.of(shape, axis, jnp.dtype(dtype).itemsize)
        block_n = config.block_n if config else choose_block_n(s)
    return vjp.Params(
        axis=axis,
        reverse=reverse,
        clip=clip,
        block_n=block_n,
        implementation=implementation,
        config=config,
    )


def _implementation(
    implementation: Implementation | None, shape: tuple[int, ...], axis: int, dtype: Any
) -> Implementation | None:
    """The reference for what no kernel takes, else as asked."""
    sizes = {f"axis {i}": size for i, size in enumerate(shape)}
    implementation = checks.kernel_or_reference(implementation, dtype, sizes)
    if implementation == "xla":
        return implementation
    before, behind = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    sizes = {"all before it": before, "all behind it": behind}
    return checks.kernel_or_reference(implementation, dtype, sizes)


def _check_initial(shape: tuple[int, ...], dtype: Any, want: tuple[int, ...]) -> None:
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"initial_state.dtype is {jnp.dtype(dtype).name!r}; accepted: a floating one"
        )
    fits = len(shape) <= len(want) and all(
        size in (1, full) for size, full in zip(shape[::-1], want[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"initial_state.shape is {shape}; accepted: {want}, or what broadcasts to it"
        )


@functools.partial(jax.jit, static_argnames=("params",), inline=True)
def _run(
    x: jax.Array, initial: jax.Array | None, *, params: vjp.Params
) -> tuple[jax.Array, jax.Array]:
    axis = params.axis
    if initial is not None:
        initial = reference.state(initial, x, axis, params.clip)
    operands: Any = vary.unify(x, initial)
    if params.implementation == "xla":
        out, final = vjp.reference(params, *operands)
    elif axis > 0:
        out, final = vjp.accumulate(params, *operands)
    else:  # the ops' first axis is a batch
        lifted = (None if y is None else y[None] for y in operands)
        out, final = vjp.accumulate(dataclasses.replace(params, axis=1), *lifted)
        out, final = out[0], final[0]
    return out, jnp.expand_dims(final, axis)
