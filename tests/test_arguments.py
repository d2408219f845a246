"""What all ops accept alike, and that the references check what the ops check."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.support import assert_close

X, THETA = np.linspace(-2, 2, 72, dtype=np.float32).reshape(2, 6, 2, 3), np.ones((2, 3), np.float32)
FACTORS: Any = dict(
    aq=X[:, :1, :, :2],
    ak=X[:, :, :, 0],
    av=X[:, :, :, 1],
    bq=X[:, :1, :2],
    bk=X[:, :, 0],
    bv=X[:, :, 1],
)
CALLS: dict[str, dict[str, Any]] = {
    "chunk_cumsum_decay": dict(x=X, chunk_size=4),
    "logcumsumexp": dict(x=X, axis=1),
    "lrpe_cosine": dict(x=X, theta=THETA),
    "md_lrpe_cosine": dict(x=X, theta=THETA, shape=(2, 3)),
    "tpa_decode": FACTORS,
}
ALIKE = [
    ("chunk_cumsum_decay", dict(axis=1), dict(axis=np.int64(1))),
    ("chunk_cumsum_decay", dict(chunk_size=4), dict(chunk_size=np.int32(4))),
    ("chunk_cumsum_decay", dict(reverse=True), dict(reverse=np.True_)),
    ("chunk_cumsum_decay", dict(scale=0.5), dict(scale=np.float32(0.5))),
    ("chunk_cumsum_decay", dict(scale=0.5), dict(scale=jnp.float32(0.5))),
    ("chunk_cumsum_decay", dict(scale=0.5), dict(scale=np.array(0.5))),
    ("chunk_cumsum_decay", dict(cu_seqlens=np.array([0, 2, 6])), dict(cu_seqlens=[0, 2, 6])),
    ("chunk_cumsum_decay", dict(dtype=jnp.bfloat16), dict(dtype="bfloat16")),
    ("logcumsumexp", dict(axis=1), dict(axis=np.int64(1))),
    ("logcumsumexp", dict(reverse=False), dict(reverse=np.False_)),
    ("logcumsumexp", dict(clip=1.0), dict(clip=np.float64(1))),
    ("logcumsumexp", dict(clip=1.0), dict(clip=np.ones((), jnp.bfloat16)[()])),
    ("logcumsumexp", dict(initial_state=jnp.zeros((2, 1, 2, 3))), dict(initial_state=0.0)),
    ("lrpe_cosine", dict(offset=jnp.array([1, 5])), dict(offset=[1, 5])),
    ("lrpe_cosine", dict(offset=3), dict(offset=np.int64(3))),
    ("lrpe_cosine", dict(offset=3), dict(offset=jnp.uint8(3))),
    ("lrpe_cosine", dict(positions=jnp.arange(6)), dict(positions=range(6))),
    ("lrpe_cosine", dict(act="softmax", axis=1), dict(act="softmax", axis=np.int64(-3))),
    ("md_lrpe_cosine", dict(shape=(2, 3)), dict(shape=np.array([2, 3]))),
    ("md_lrpe_cosine", dict(shape=(2, 3)), dict(shape=[np.int64(2), jnp.int32(3)])),
    (
        "md_lrpe_cosine",
        dict(shape=(5,), num_prefix_tokens=1),
        dict(shape=(5,), num_prefix_tokens=np.int8(1)),
    ),
    ("tpa_decode", dict(lengths=jnp.array([2, 5])), dict(lengths=[2, 5])),
    ("tpa_decode", dict(lengths=jnp.array([4, 4])), dict(lengths=4)),
    ("tpa_decode", dict(scale=0.5), dict(scale=jnp.float32(0.5))),
    ("tpa_decode", dict(scale=2), dict(scale=jnp.int32(2))),
    ("tpa_decode", dict(scale_v=0.5), dict(scale_v=np.float16(0.5))),
]


@pytest.mark.parametrize(("name", "change", "other"), ALIKE, ids=str)
def test_alike_arguments(name: str, change: dict[str, Any], other: dict[str, Any]) -> None:
    op, reference = getattr(pallas_ops, name), getattr(pallas_ops.reference, name)
    want = op(**CALLS[name] | change)
    assert_close(op(**CALLS[name] | other), want)
    assert_close(jax.jit(lambda: reference(**CALLS[name] | other))(), want)


@pytest.mark.parametrize("name", CALLS)
def test_lists_are_arrays(name: str) -> None:
    op, call = getattr(pallas_ops, name), CALLS[name]
    arrays = {key: x.tolist() for key, x in call.items() if isinstance(x, np.ndarray)}
    assert_close(op(**call | arrays), op(**call))


def test_objects_that_are_arrays_to_jax() -> None:
    class Lengths:
        def __jax_array__(self) -> jax.Array:
            return jnp.asarray([2, 1])

    op, call = pallas_ops.tpa_decode, CALLS["tpa_decode"]
    lengths: Any = Lengths()
    assert_close(op(**call | dict(lengths=lengths)), op(**call | dict(lengths=[2, 1])))


REFUSED = [
    ("chunk_cumsum_decay", dict(shift="Chunk"), ValueError),
    ("chunk_cumsum_decay", dict(chunk_size=-3), ValueError),
    ("logcumsumexp", dict(axis=7), ValueError),
    ("logcumsumexp", dict(x=[[1, 2]]), TypeError),
    ("logcumsumexp", dict(x=[[1.0, 2.0], [3.0]]), TypeError),
    ("chunk_cumsum_decay", dict(scale=jax.random.key(0)), TypeError),
    ("chunk_cumsum_decay", dict(cu_seqlens=np.array([0, 2**32])), ValueError),
    ("lrpe_cosine", dict(act="gelu"), ValueError),
    ("lrpe_cosine", dict(offset=np.int64(2**32 + 5)), ValueError),
    ("lrpe_cosine", dict(offset=[2**30 + 1, 0]), ValueError),
    ("lrpe_cosine", dict(positions=np.full(6, 2**32)), ValueError),
    ("md_lrpe_cosine", dict(shape=(4, 4)), ValueError),
    ("md_lrpe_cosine", dict(shape=[2, [3]]), TypeError),
    ("tpa_decode", dict(lengths=np.array([2, 2**40])), ValueError),
    ("tpa_decode", dict(bk=X[:, :, 0, :1]), ValueError),
]


@pytest.mark.parametrize(("name", "change", "error"), REFUSED, ids=str)
def test_references_refuse_in_the_same_words(
    name: str, change: dict[str, Any], error: type[Exception]
) -> None:
    messages = []
    for op in (getattr(pallas_ops, name), getattr(pallas_ops.reference, name)):
        with pytest.raises(error, match=f"{next(iter(change))}.*; accepted: ") as refusal:
            op(**CALLS[name] | change)
        messages.append(str(refusal.value))
    assert messages[0] == messages[1]


def test_a_traced_grid_is_refused() -> None:
    with pytest.raises(TypeError, match=r"shape is \(.*; accepted: the sizes of the grid"):
        jax.jit(pallas_ops.md_lrpe_cosine)(X, THETA, shape=(2, 3))


@pytest.mark.parametrize("name", pallas_ops.reference.__all__)
def test_references_have_the_ops_parameters(name: str) -> None:
    op = getattr(pallas_ops, name.removesuffix("_naive"))
    of_reference = inspect.signature(getattr(pallas_ops.reference, name)).parameters
    kernels = {"implementation", "config", "precision"} | (
        {"axis_name", "batch_invariant"} if name.endswith("_naive") else set()
    )
    of_op = inspect.signature(op).parameters
    assert dict(of_reference) == {k: v for k, v in of_op.items() if k not in kernels}


def test_a_traced_scale_is_multiplied_in_float32() -> None:
    """Where bfloat16 times a scale would round before the sums."""
    x, scale = jnp.asarray(X, jnp.bfloat16), jnp.float32(1.001)
    got = jax.jit(pallas_ops.chunk_cumsum_decay)(x, scale=scale)
    want = pallas_ops.chunk_cumsum_decay(x.astype(jnp.float32) * scale, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_names_of_residuals() -> None:
    """A misspelt one is an error."""
    assert str(pallas_ops.Residuals.TPA_DECODE) == "pallas_ops.tpa_decode"
    with pytest.raises(AttributeError):
        pallas_ops.Residuals.TPA_DECOD  # type: ignore[attr-defined]  # noqa: B018
