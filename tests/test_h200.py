"""The compiler without a card tells what it should, and refuses what it should."""

import collections
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from tests import emulate, h200


def _gram_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)


def _log1p_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.log1p(x_ref[...])


def _reverse_kernel(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.flip(x_ref[...], 0)


def _call(kernel: Callable[..., None], n: int, num_warps: int, x: jax.Array) -> Any:
    return pl.pallas_call(
        kernel,
        name=kernel.__name__.strip("_"),
        out_shape=jax.ShapeDtypeStruct((n, n), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
    )(x)


def test_ptx_is_kept_by_the_text_that_it_was_compiled_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "new"))
    compiled: list[str] = []

    def ptx(text: str) -> list[str]:
        compiled.append(text)
        return [text.upper()]

    for text in ("one", "two", "one"):
        assert emulate._kept(text, functools.partial(ptx, text)) == [text.upper()]
    assert compiled == ["one", "two"]


@pytest.mark.slow
def test_compile_tells_registers_and_spills() -> None:
    def spills(num_warps: int) -> int:
        fn = functools.partial(_call, _gram_kernel, 128, num_warps)
        program = h200.compile_for_h200(fn, jax.ShapeDtypeStruct((128, 64), jnp.float32))
        (kernel,) = program.kernels
        assert kernel.name == "gram_kernel"
        assert 16 <= kernel.registers <= 255
        assert program.memory.output_size_in_bytes == 128 * 128 * 4
        return kernel.spill_bytes

    assert spills(num_warps=8) == 0
    assert spills(num_warps=1) > 0


def test_compile_counts_collectives() -> None:
    mesh = h200.h200_mesh(data=4, model=2)
    x, w = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)

    def collectives(*specs: P) -> Mapping[str, int]:
        return h200.compile_for_h200(jnp.dot, x, w, mesh=mesh, specs=specs).collectives

    assert collectives(P("data"), P(None, "model")) == collections.Counter()
    assert collectives(P("data", "model"), P("model")) == {"all-reduce": 1}


def test_compile_refuses_what_triton_refuses() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    fn = functools.partial(_call, _log1p_kernel, 64, 4)
    h200.lower_for_cuda(fn, x)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Triton"):
        h200.compile_for_h200(fn, x)


def test_lower_refuses_what_pallas_refuses() -> None:
    fn = functools.partial(_call, _reverse_kernel, 64, 4)
    with pytest.raises(NotImplementedError, match="rev"):
        h200.lower_for_cuda(fn, jax.ShapeDtypeStruct((64, 64), jnp.float32))


def test_cpu_still_computes_beside_the_compiler() -> None:
    h200.compile_for_h200(jnp.sin, jnp.ones(8))
    assert jnp.sum(jax.jit(jnp.cos)(jnp.zeros(8))) == 8


def test_a_missing_compiler_skips_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "why_unavailable", lambda: "ptxas is not installed")
    monkeypatch.delenv(h200.REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="ptxas"):
        h200.compile_for_h200(jnp.sin, jnp.ones(8))
    monkeypatch.setenv(h200.REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="ptxas"):
        h200.compile_for_h200(jnp.sin, jnp.ones(8))
