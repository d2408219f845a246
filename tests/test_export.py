"""Every op exported: for other platforms, with open sizes, for a GPU that is not there."""

import contextlib
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops.core import card
from tests.ops import OPS, TERMS, TestedOp, compiled, cpu_mesh, every_op, random_weights
from tests.support import assert_close, kernel_implementation, random_array, value_and_vjp
from tests.tpa_decode import factors, loop

KERNEL = kernel_implementation()
Rng = np.random.Generator


def called(loaded: Any, xs: Any, weights: Any) -> Any:
    """What an exported function returns, and its gradients, in one program."""

    def both(xs: Any, weights: Any) -> Any:
        return tuple(loaded.call(*xs)), tuple(loaded.vjp().call(*xs, *weights))

    return jax.jit(both)(xs, weights)


def axis_letters(op: TestedOp) -> list[str]:
    return sorted({letter for axes in op.operands for letter in axes.split()})


OPEN: list[tuple[TestedOp, tuple[str, ...]]]
OPEN = [(op, (letter,)) for op in OPS for letter in axis_letters(op)]
OPEN += [(op, tuple(axis_letters(op))) for op in OPS]


@pytest.mark.parametrize(
    ("op", "letters"), OPEN, ids=lambda x: getattr(x, "name", None) or "".join(x)
)
def test_export_of_open_sizes_runs_the_reference(
    rng: Rng, op: TestedOp, letters: tuple[str, ...]
) -> None:
    """Of any axis, alone and together with all others; with its gradient."""
    symbols = dict(zip(letters, jax.export.symbolic_shape(", ".join(letters)), strict=True))
    xs = jax.device_put(op.arguments(rng, b=3), jax.devices("cpu")[0])
    sizes = dict(op.sizes) | {"b": 3} | symbols
    shapes = ([sizes[axis] for axis in axes.split()] for axes in op.operands)
    structs = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, xs, strict=True)]
    exported = jax.export.export(jax.jit(op.fn), platforms=("cpu", "cuda"))(*structs)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    weights = random_weights(rng, op, xs)
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    out, got = called(loaded, xs, weights)
    assert_close(out, want, terms=TERMS)
    assert_close(got[: op.num_floating], grads[: op.num_floating], terms=TERMS)
    with pytest.raises(ValueError, match="is 'triton', whose kernel does not take symbolic sizes"):
        jax.export.export(jax.jit(partial(op.fn, implementation="triton")))(*structs)


def test_scales_of_open_sizes_have_all_digits(rng: Rng) -> None:
    with jax.enable_x64(True):
        xs = tuple(x.astype(jnp.float64) for x in factors(rng, r=5, d=7))
        aq, ak, av, bq, bk, bv = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)
        r, d = jax.export.symbolic_shape("r, d")
        aq, bq = aq.update(shape=(2, 1, 3, r)), bq.update(shape=(2, 1, r, d))
        bk = bk.update(shape=(2, 40, d))
        exported = jax.export.export(jax.jit(pallas_ops.tpa_decode))(aq, ak, av, bq, bk, bv)
        assert_close(exported.call(*xs), loop(xs, [40, 40])[0])


def chunks_of(size: int | None, **options: Any) -> Any:
    return lambda x: pallas_ops.chunk_cumsum_decay(x, chunk_size=size or x.shape[1], **options)


def on_a_grid(x: jax.Array) -> jax.Array:
    b, height, width, d = x.shape
    theta, shape = jax.numpy.ones((1, d)), (height, width)
    return pallas_ops.md_lrpe_cosine(x.reshape(b, height * width, 1, d), theta, shape=shape)


@pytest.mark.parametrize(
    ("fn", "shape", "symbols"),
    [
        (chunks_of(4, shift="chunk"), (2, 13, 3), "b, n, c"),
        (chunks_of(2**20, reverse=True), (2, 13, 3), "b, n, c"),
        (chunks_of(None, shift="sequence"), (2, 13, 3), "b, n, c"),
        (lambda x: pallas_ops.lrpe_cosine(x, x[0, 0, :1]), (2, 5, 3, 4), "b, n, h, d"),
        (on_a_grid, (2, 3, 5, 4), "b, h, w, d"),
    ],
    ids=["chunks", "one chunk", "chunk of the axis' own size", "shared theta", "grid"],
)
def test_open_sizes_of_other_calls(rng: Rng, fn: Any, shape: tuple[int, ...], symbols: str) -> None:
    x = random_array(rng, shape)
    struct = jax.ShapeDtypeStruct(jax.export.symbolic_shape(symbols), x.dtype)
    assert_close(jax.export.export(jax.jit(fn))(struct).call(x), fn(x), terms=TERMS)


@pytest.mark.parametrize("op", ["lengths", "append", "offset", "cu_seqlens"])
def test_open_sizes_are_numbers(rng: Rng, op: str) -> None:
    """Arguments that are integers."""

    def fn(x: jax.Array) -> jax.Array:
        n = x.shape[1]
        if op == "append":
            return pallas_ops.tpa_append(jax.numpy.zeros((x.shape[0], 9, 4)), x, 9 - n)
        if op == "offset":
            return pallas_ops.lrpe_cosine(x, jax.numpy.ones((1, 4)), offset=9 - n)
        if op == "cu_seqlens":
            return pallas_ops.chunk_cumsum_decay(x, chunk_size=3, cu_seqlens=[0, n])
        factors = x[:, -1:, :, None], x, x, x[:, -1:, None], x, x
        return pallas_ops.tpa_decode(*factors, lengths=n - 1)

    x, struct = random_array(rng, (2, 5, 4)), jax.export.symbolic_shape("b, n, 4")
    exported = jax.export.export(jax.jit(fn))(jax.ShapeDtypeStruct(struct, x.dtype))
    assert_close(exported.call(x), fn(x), terms=TERMS)


def test_an_open_number_of_frequencies(rng: Rng) -> None:
    """Beside features of a known number, which at least bound it."""
    x, theta = random_array(rng, (2, 5, 1, 4)), random_array(rng, (1, 3))
    (e,) = jax.export.symbolic_shape("e", constraints=["e <= 4"])
    struct = jax.ShapeDtypeStruct((1, e), theta.dtype)
    exported = jax.export.export(jax.jit(pallas_ops.lrpe_cosine))(x, struct)
    assert_close(exported.call(x, theta), pallas_ops.lrpe_cosine(x, theta), terms=TERMS)


def test_the_number_of_a_grids_axes_is_known() -> None:
    n, k = jax.export.symbolic_shape("n, k")
    x, theta = jax.ShapeDtypeStruct((1, n, 1, 4), "float32"), jax.numpy.ones((1, 4))
    fn = partial(pallas_ops.md_lrpe_cosine, theta=theta, shape=None)
    with pytest.raises(ValueError, match=r"positions.shape is \(n, k\); accepted: an int for K"):
        jax.export.export(jax.jit(lambda x, p: fn(x, positions=p)))(
            x, jax.ShapeDtypeStruct((n, k), "int32")
        )


def exported(op: TestedOp, xs: Any) -> jax.export.Exported:
    """For CPU and CUDA, with its kernel."""
    both = jax.export.export(
        jax.jit(op.fn),
        platforms=("cpu", "cuda"),
        disabled_checks=pallas_ops.DISABLE_JAX_EXPORT_CHECKS,
    )(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
    assert f"pallas_ops_{op.name}".encode() in both.mlir_module_serialized
    return both


@every_op
def test_export_for_cpu_and_cuda(rng: Rng, op: TestedOp) -> None:
    xs = jax.device_put(op.arguments(rng), jax.devices("cpu")[0])
    weights = random_weights(rng, op, xs)
    with pallas_ops.target_gpu("NVIDIA H100"):  # which need not be there
        data = exported(op, xs).serialize(vjp_order=1)
    loaded = jax.export.deserialize(data)
    assert loaded.platforms == ("cpu", "cuda")
    want, grads = value_and_vjp(compiled(op, "xla"), xs, weights)
    out, got = called(loaded, xs, weights)
    assert_close(out, want, terms=TERMS)
    assert_close(got[: op.num_floating], grads[: op.num_floating], terms=TERMS)


@every_op
def test_export_without_a_gpu_or_its_name(rng: Rng, op: TestedOp) -> None:
    """Is for the smallest card."""
    exported(op, op.arguments(rng))
    with jax.set_mesh(cpu_mesh(AxisType.Explicit)):
        exported(op, op.arguments(rng))


@pytest.mark.parametrize("where", ["mapped", "explicit", "set", "set inside"])
def test_a_target_counts_wherever_a_mesh_is(where: str) -> None:
    """The L4 has fewer multiprocessors, for which the axis is not split into segments."""
    is_mapped = where == "mapped"
    mesh = cpu_mesh(AxisType.Auto if is_mapped else AxisType.Explicit)
    x: Any = jax.ShapeDtypeStruct((8 if is_mapped else 16, 2048, 512), "float32")
    op, spec = partial(pallas_ops.logcumsumexp, axis=1), P("x")
    if is_mapped:
        op = jax.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec)
    else:
        x = x.update(sharding=NamedSharding(mesh, spec))

    def set_where(name: str) -> Any:
        return jax.set_mesh(mesh) if where == name else contextlib.nullcontext()

    texts = []
    with set_where("set"):
        for kind in ("NVIDIA H100", "NVIDIA L4"):
            if where == "set inside":
                jax.clear_caches()  # or JAX takes what it lowered for the H100
            with pallas_ops.target_gpu(kind), set_where("set inside"):
                texts.append(exported_text(op, x))
    for_h100, for_l4 = (text.count("__gpu$xla.gpu.triton") for text in texts)
    assert for_h100 > for_l4 > 0


def test_the_local_card_counts_where_the_mesh_is_a_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does it where the default device is a CPU: JAX itself then finds no GPU."""
    fn, x = (
        partial(pallas_ops.logcumsumexp, axis=1),
        jax.ShapeDtypeStruct((2, 2048, 512), "float32"),
    )
    local = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", core_count=132)
    with pallas_ops.target_gpu("NVIDIA H100"):
        want = exported_text(fn, x).count("__gpu$xla.gpu.triton")
    monkeypatch.setattr(card, "_local", lambda: None)
    jax.clear_caches()
    smallest = exported_text(fn, x).count("__gpu$xla.gpu.triton")
    monkeypatch.setattr(card, "_local", lambda: local)
    jax.clear_caches()
    assert exported_text(fn, x).count("__gpu$xla.gpu.triton") == want > smallest > 0
    with jax.set_mesh(cpu_mesh(AxisType.Explicit)):
        assert exported_text(fn, x).count("__gpu$xla.gpu.triton") == want


def exported_text(fn: Any, *xs: Any) -> str:
    checks = pallas_ops.DISABLE_JAX_EXPORT_CHECKS
    exported = jax.export.export(jax.jit(fn), platforms=("cuda",), disabled_checks=checks)
    return exported(*xs).mlir_module()


def test_a_target_has_a_name() -> None:
    with pytest.raises(TypeError, match="kind is None; accepted: a str"):
        pallas_ops.target_gpu(None).__enter__()  # type: ignore[arg-type]


JAX_HAS_NAMES = pytest.mark.skipif(jax.__version__ == "0.10.2", reason="it has no names")


@pytest.mark.parametrize("kind", ["NVIDIA H1000x", "", pytest.param("H100", marks=JAX_HAS_NAMES)])
def test_unknown_targets_are_refused(kind: str) -> None:
    with (
        pytest.raises(ValueError, match=f"kind is '{kind}'; accepted: a GPU that JAX .* knows"),
        pallas_ops.target_gpu(kind),
    ):
        pass
