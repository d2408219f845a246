"""Gradients as users check them: against finite differences, with chex."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.ops import OPS, Arrays, TestedOp, every_op, words
from tests.support import kernel_implementation, random_array

KERNEL = kernel_implementation()
Rng = np.random.Generator


def check(fn: Any, xs: Arrays, *, order: int, **options: Any) -> None:
    """`chex.assert_numerical_grads`, which multiplies its tolerance by the size of the first."""
    atol, rtol = 5e-3 / xs[0].size, 2e-3 if order == 1 else 1e-2
    chex.assert_numerical_grads(fn, xs, order=order, atol=atol, rtol=rtol, **options)


@pytest.mark.parametrize(("implementation", "order"), [(KERNEL, 1), (None, 2)])
@every_op
def test_reverse_mode(rng: Rng, op: TestedOp, implementation: Any, order: int) -> None:
    xs = op.arguments(rng)
    integers = [jnp.minimum(x, 5) for x in xs[op.num_floating :]]  # at 100, angles grow by 100 eps
    # A step that the kernels' rounding allows: it is divided by it once or twice.
    eps = 5e-4 if order == 1 else 5e-3

    @jax.jit
    def fn(*floating: jax.Array) -> Arrays:
        return op.fn(*floating, *integers, implementation=implementation)

    check(fn, xs[: op.num_floating], order=order, modes=("rev",), eps=eps)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=words)
def test_both_modes_of_the_reference(rng: Rng, op: TestedOp) -> None:
    """In float64, where differences are exact enough to tell much."""
    xs = op.arguments(rng)
    with jax.enable_x64(True):
        wide = tuple(np.asarray(x, np.float64) for x in xs[: op.num_floating])
        fn = jax.jit(lambda *ys: op.fn(*ys, *xs[op.num_floating :], implementation="xla"))
        check(fn, wide, order=2, eps=1e-4)


def test_a_wrong_gradient_is_noticed(rng: Rng) -> None:
    @jax.custom_vjp
    def wrong(x: jax.Array) -> jax.Array:
        return pallas_ops.logcumsumexp(x)

    wrong.defvjp(lambda x: (wrong(x), None), lambda _, do: (0.98 * do,))
    with pytest.raises(AssertionError, match="VJP"):
        check(wrong, (random_array(rng, (7,)),), order=1, modes=("rev",))


MD: Any = dict(shape=(2, 3), num_prefix_tokens=1)
MORE: dict[str, Any] = {
    "lrpe_cosine of real positions": (
        lambda x, theta, p: pallas_ops.lrpe_cosine(x, theta, positions=p, act="silu"),
        [(2, 3, 1, 5), (1, 5), (2, 3)],
    ),
    "md_lrpe_cosine": (partial(pallas_ops.md_lrpe_cosine, **MD), [(2, 7, 1, 5), (1, 3)]),
    "chunk_cumsum_decay of a scale": (
        lambda x, scale: pallas_ops.chunk_cumsum_decay(x, scale=scale, chunk_size=3),
        [(2, 7), ()],
    ),
    "tpa_decode of scales": (
        lambda a, b, scale: pallas_ops.tpa_decode(
            a, a[:, 0], a[:, 0], b, b[:, 0], b[:, 0], **scale
        ),
        [(1, 3, 3, 3), (1, 3, 3, 5), dict(scale=(), scale_q=(), scale_k=(), scale_v=())],
    ),
    "logcumsumexp of a state that is broadcast": (
        lambda x, state: pallas_ops.logcumsumexp_with_state(x, axis=0, initial_state=state, clip=2),
        [(5, 2, 3), (2, 1)],
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_other_arguments(rng: Rng, name: str) -> None:
    fn, shapes = MORE[name]
    xs = jax.tree.map(
        lambda shape: random_array(rng, shape),
        tuple(shapes),
        is_leaf=lambda x: type(x) is tuple and all(isinstance(y, int) for y in x),
    )
    check(jax.jit(fn), xs, order=2, modes=("rev",))


@every_op
def test_forward_mode_says_what_to_do(rng: Rng, op: TestedOp) -> None:
    xs = op.arguments(rng)
    floating, integers = xs[: op.num_floating], xs[op.num_floating :]
    tangents = tuple(map(jnp.ones_like, floating))
    message = f'{op.name}: forward-mode .*implementation="xla".*modes='

    def fn(*ys: jax.Array) -> Arrays:
        return op.fn(*ys, *integers)

    def push(*ys: jax.Array) -> Any:
        return jax.jvp(fn, ys, tangents)

    for forward in (push, jax.jit(push), jax.jacfwd(fn), jax.jit(jax.jacfwd(jax.jit(fn)))):
        with pytest.raises(TypeError, match=message):
            forward(*floating)
    with pytest.raises(TypeError, match=message):
        jax.hessian(lambda x: sum(map(jnp.sum, fn(x, *floating[1:]))))(floating[0])
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda *ys: sum(map(jnp.sum, jax.jvp(fn, ys, ys)[1])))(*floating)
    with pytest.raises(TypeError, match=message):
        chex.assert_numerical_grads(fn, floating, order=1)
    jax.eval_shape(push, *floating)  # nothing is refused where nothing is computed


def test_forward_mode_of_a_grid_names_the_op() -> None:
    grid = partial(pallas_ops.md_lrpe_cosine, shape=(2, 3), implementation=KERNEL)
    xs = jnp.ones((1, 6, 2, 8)), jnp.ones((2, 4))
    with pytest.raises(TypeError, match="md_lrpe_cosine: forward-mode"):
        jax.jvp(grid, xs, xs)
