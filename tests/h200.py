"""Compiling for a card that is not there: an H200, or another one (`instead`).

XLA's GPU plugin compiles for a described device, so Triton, LLVM and ptxas give here, on any CPU,
the errors, registers and spills they would give on an NVIDIA H200. ptxas takes long, and runs
where a test asks for `Program.kernels`. Nothing is run.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import importlib
import math
import os
import pathlib
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ops.core import card
from tests import ptxas

REQUIRED = "PALLAS_OPS_REQUIRE_COMPILE"  # "1": a missing compiler is a failure, not a skip

# MLIR looks for bindings of Triton's dialect at each value of a kernel, and never finds any: up to
# a third of what lowering takes.
sys.modules.setdefault("jaxlib.mlir.dialects.tt", types.ModuleType("jaxlib.mlir.dialects.tt"))

if jax.__version__.startswith("0.10."):
    # To make one takes 4 ms, for each program; later versions use one for ten programs.
    mlir: Any = importlib.import_module("jax._src.interpreters.mlir")
    util: Any = importlib.import_module("jax._src.util")
    mlir.make_ir_context = util.cache(trace_context_in_key=False)(mlir.make_ir_context)

_CARD = contextvars.ContextVar("card", default=card.H200)
# A GpuTargetConfigProto as text; OpenXLA keeps others in xla/backends/gpu/target_config/specs.
_TARGET = """
gpu_device_info {{
  name: "{name}"
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  core_count: {num_sms}  fpus_per_core: 128  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: {per_core}  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_memory}
  driver_version: "12.8.0"  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{name}"
"""

_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute"
    r"|ragged-all-to-all|reduce-scatter)(?:-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program compiled for the H200."""

    compiled: jax.stages.Compiled
    ptx: tuple[str, ...]

    @functools.cached_property
    def kernels(self) -> tuple[ptxas.Kernel, ...]:
        """What ptxas makes of each kernel, ours and XLA's own, by name; a Pallas kernel keeps its.

        Raises:
          subprocess.CalledProcessError: where ptxas refuses one.
        """
        return ptxas.kernels(self.ptx)

    @functools.cached_property
    def hlo(self) -> str:
        """The optimised program of one device, after partitioning."""
        text = self.compiled.as_text()
        assert text is not None
        return text

    @property
    def collectives(self) -> collections.Counter[str]:
        """How many collectives of each kind a device takes part in: {"all-reduce": 1}."""
        return count_collectives(self.hlo)

    @property
    def memory(self) -> Any:
        """Bytes of arguments, outputs and temporaries on one device."""
        return self.compiled.memory_analysis()


def count_collectives(hlo: str) -> collections.Counter[str]:
    """How many collectives of each kind an optimised program has."""
    return collections.Counter(_COLLECTIVE.findall(hlo))


def h200_mesh(**axes: int) -> Mesh:
    """A mesh of H200s to compile for: `h200_mesh(data=4, model=2)`."""
    _require_compiler()
    return topologies.make_mesh(
        _topology(_CARD.get(), math.prod(axes.values())), tuple(axes.values()), tuple(axes)
    )


def with_gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and its own pullback, so that both passes are compiled."""

    def run(*xs: Any) -> Any:
        out, pull = jax.vjp(fn, *xs)
        return out, pull(out)

    return run


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    specs: Sequence[P] | None = None,
) -> Program:
    """Compiles `fn` for H200s; skips the test where the compiler is not installed.

    Args:
      fn: what to compile; jitted here if it is not yet.
      *args: trees of arrays or of `jax.ShapeDtypeStruct`; only shapes and dtypes matter.
      mesh: of `h200_mesh`; one device if None.
      specs: how each argument (all of its leaves) is sharded over the mesh; replicated if None.

    Raises:
      jax.errors.JaxRuntimeError: where XLA or Triton refuses the program.
    """
    return compile_lowered(lower_for_h200(fn, *args, mesh=mesh, specs=specs))


def lower_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    specs: Sequence[P] | None = None,
) -> jax.stages.Lowered:
    """As `compile_for_h200`, and stops before Triton compiles."""
    mesh = mesh or h200_mesh(device=1)
    specs = specs or [P()] * len(args)
    structs = [
        _structs(arg, NamedSharding(mesh, spec)) for arg, spec in zip(args, specs, strict=True)
    ]
    with on_h200():
        lowered: jax.stages.Lowered = _jitted(fn).trace(*structs).lower()
    return lowered


def compile_lowered(lowered: jax.stages.Lowered) -> Program:
    """Compiles what `lower_for_h200` returned."""
    # Options of this one compilation: in XLA_FLAGS that of the emitter breaks XLA for CPUs.
    options: dict[str, Any] = {"xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": 3}
    options["xla_gpu_cuda_data_dir"] = ptxas.pretended()
    with on_h200(), tempfile.TemporaryDirectory() as dump:
        compiled = lowered.compile({"xla_dump_to": dump} | options)
        ptx = tuple(path.read_text() for path in sorted(pathlib.Path(dump).rglob("*.ptx")))
    return Program(compiled, tuple(text for text in ptx if ".entry" in text))


def lower_for_cuda(fn: Callable[..., Any], *args: Any) -> jax.stages.Lowered:
    """Lowers `fn` for an H200, which needs no CUDA plugin: Pallas' part alone."""
    with on_h200():
        traced = _jitted(fn).trace(*map(_structs, args))
        lowered: jax.stages.Lowered = traced.lower(lowering_platforms=("cuda",))
    return lowered


@contextlib.contextmanager
def instead(name: str) -> Iterator[card.Card]:
    """Everything here compiles for another GPU, of a name that `card` and JAX know."""
    chosen = card.named(name)
    token = _CARD.set(chosen)
    try:
        yield chosen
    finally:
        _CARD.reset(token)


def on_h200() -> contextlib.AbstractContextManager[Any]:
    """Says which GPU is meant, where tracing or lowering asks."""
    device = AbstractDevice(device_kind=_CARD.get().name, num_cores=None, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def why_unavailable() -> str | None:
    """What is missing to compile for an H200, or None."""
    if not any(ptxas.folders(f"jax_plugins.xla_cuda{version}") for version in (12, 13)):
        return "JAX's CUDA plugin is not installed"
    if ptxas.executable() is None:
        return "ptxas is not installed"
    return None


def _require_compiler() -> None:
    reason = why_unavailable()
    if reason and os.environ.get(REQUIRED) == "1":
        pytest.fail(f"cannot compile for an H200, as {REQUIRED}=1 demands: {reason}")
    if reason:
        pytest.skip(f'{reason}: pip install -e ".[test]" on Linux')


@functools.cache
def _topology(gpu: card.Card, num_devices: int) -> topologies.TopologyDescription:
    target = _TARGET.format(
        **dataclasses.asdict(gpu),
        major=gpu.capability // 10,
        minor=gpu.capability % 10,
        features="feature_extension: ACCELERATED_FEATURES" if gpu.capability >= 90 else "",
        per_core=gpu.shared_memory + 1024,
    )
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{num_devices}"
    )


def _structs(tree: Any, sharding: NamedSharding | None = None) -> Any:
    def struct(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(struct, tree)


def _jitted(fn: Callable[..., Any]) -> Any:
    return fn if hasattr(fn, "trace") else jax.jit(fn)
