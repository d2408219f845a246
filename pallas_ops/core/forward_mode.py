"""Forward-mode differentiation of a kernel, refused in our own words.

Kernels have `jax.custom_vjp` rules, so JAX cannot push tangents through them; its error does not
name the op. `refuse` passes the inputs of an op through a primitive. Reverse mode transposes the
primitive of a tangent; forward mode evaluates it, which raises the error.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

mark_p = Primitive("pallas_ops_reverse_mode_only")
tangent_p = Primitive("pallas_ops_tangent")


def refuse(op: str, *xs: jax.Array | None) -> tuple[Any, ...]:
    """The same arrays; evaluating their tangents raises a TypeError that names `op`."""
    return tuple(
        mark_p.bind(x, op=op) if x is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
        for x in xs
    )


def _jvp(primals: Any, tangents: Any, *, op: str) -> Any:
    (x,), (dx,) = primals, tangents
    return mark_p.bind(x, op=op), dx if type(dx) is ad.Zero else tangent_p.bind(dx, op=op)


def _raise(*_: Any, op: str) -> Any:
    raise TypeError(
        f"{op}: forward-mode differentiation (jax.jvp, jax.jacfwd, jax.hessian) of a kernel; "
        'accepted: reverse mode (jax.grad, jax.vjp, jax.jacrev), or implementation="xla". To check '
        "gradients with chex.assert_numerical_grads or jax.test_util.check_grads, pass "
        'modes=("rev",)'
    )


mark_p.def_impl(lambda x, **_: x)
mark_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(mark_p, lambda _, x, **__: [x])
batching.defvectorized(mark_p)
ad.primitive_jvps[mark_p] = _jvp

tangent_p.def_impl(_raise)
tangent_p.def_abstract_eval(lambda x, **_: x)
mlir.register_lowering(tangent_p, mlir.lower_fun(_raise, multiple_results=False))
# Only forward mode batches tangents (jax.jacfwd); reverse mode transposes them first.
batching.primitive_batchers[tangent_p] = _raise
ad.deflinear2(tangent_p, lambda ct, _, **__: [ct])
ad.primitive_jvps[tangent_p] = _raise  # where reverse mode meets the tangent of forward mode
