"""The NVIDIA GPU that code is lowered for, and what is known of it."""

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ops.core import checks, launch
from pallas_ops.core.backend import NoKernelError, plgpu


@dataclasses.dataclass(frozen=True)
class Card:
    """What launch choices depend on."""

    name: str
    capability: int  # 90 is sm_90
    num_sms: int
    shared_memory: int  # bytes that a program can have

    @property
    def has_tensor_memory(self) -> bool:
        """Whether tensor cores accumulate in tensor memory (TMEM), as on sm_100 and sm_103."""
        return self.capability // 10 == 10

    def __str__(self) -> str:
        memory = f"{self.shared_memory} bytes of shared memory a program"
        return f"{self.name} ({self.num_sms} multiprocessors, {memory})"


# Bytes of shared memory by capability; https://docs.nvidia.com/cuda/cuda-c-programming-guide
SHARED_MEMORY = {
    **dict.fromkeys((86, 89, 120, 121), 101_376),
    **dict.fromkeys((80, 87), 166_912),
    **dict.fromkeys((90, 100, 103, 107, 110), 232_448),
}
# Capability and multiprocessors by a part of the name, for absent GPUs.
KNOWN = {
    name: (capability, num_sms)
    for capability, cards in {
        75: {"T4": 40},
        80: {"A30": 56, "A100": 108, "A800": 108},
        86: {"A10": 72, "A40": 84, "A6000": 84, "RTX 3090": 82},
        89: {"L4": 58, "L40": 142, "L40S": 142, "RTX 4090": 128},
        90: {"H20": 78, "H100": 132, "H200": 132, "H800": 132, "GH200": 132},
        100: {"B200": 148, "GB200": 148},
        103: {"B300": 148, "GB300": 148},
        110: {"Thor": 20},
        120: {"RTX 5090": 170, "RTX PRO 4500": 82, "RTX PRO 5000": 110, "RTX PRO 6000": 188},
        121: {"GB10": 48},
    }.items()
    for name, num_sms in cards.items()
}
H200 = Card("NVIDIA H200", 90, 132, SHARED_MEMORY[90])
SMALLEST = Card("an unknown NVIDIA GPU", 80, 48, min(SHARED_MEMORY.values()))
# What JAX is told where the GPU is unknown; num_cores=0 tells it from a real A30, which has 56.
_UNKNOWN = AbstractDevice(device_kind="NVIDIA A30", num_cores=0, platform="gpu")
# What `target_gpu` names: `jax.shard_map` and `jax.set_mesh` put other meshes in place of its own.
_TARGET: contextvars.ContextVar[AbstractDevice | None] = contextvars.ContextVar(
    "pallas_ops_target", default=None
)


def current() -> Card:
    """The GPU of `target_gpu`; else that of the mesh; else the local one; else `SMALLEST`.

    The mesh is the one that code is lowered under. Interpreted kernels are launched as on an H200.
    """
    if launch.is_interpreted():
        return H200
    meant, local = _meant(), _local()
    if meant == _UNKNOWN:
        return SMALLEST
    if meant is not None and (local is None or meant.device_kind != local.device_kind):
        return named(meant.device_kind)
    return SMALLEST if local is None else _of(local)


def require() -> None:
    """Refuses GPUs before Ampere, and sm_110 (Thor): Triton or XLA does not compile for them.

    Raises:
      NoKernelError: where code is lowered for one of these.
    """
    card = current()
    if card.capability < SMALLEST.capability or card.capability == 110:
        raise NoKernelError(
            f"{card.name} has compute capability {card.capability / 10}, and the kernels need 8.0 "
            "(Ampere) or later, but not 11.0, for which XLA compiles no matrix products"
        )


def is_here() -> bool:
    """Whether code is lowered for a GPU of this process."""
    local = _local()
    return local is not None and current() == _of(local)


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Inside, JAX finds a GPU to lower for, which JAX 0.11.2 and later ask for.

    By itself it finds none where code is for another machine, or the mesh or the default device is
    a CPU's; then this names the target, else the local GPU, else an unknown one.
    """
    meant, local = _meant(), _local()
    is_named = _is_found() if meant is None else meant == _of_mesh()
    device = meant or (_UNKNOWN if local is None else _abstract(local.device_kind))
    with contextlib.nullcontext() if is_named else lowered_for(device):
        yield


def _meant() -> AbstractDevice | None:
    """The GPU of `target_gpu`, else that of the mesh that code is lowered under."""
    return _TARGET.get() or _of_mesh()


def _of_mesh() -> AbstractDevice | None:
    device = device_of_mesh()
    return device if device is not None and device.platform == "gpu" else None


def _local() -> Any:
    """A GPU of this process, if JAX has one."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None


def _of(device: Any) -> Card:
    """A GPU of this process: the facts that JAX has, else those of the tables."""
    card = named(device.device_kind)
    digits = str(getattr(device, "compute_capability", "")).replace(".", "")
    capability = int(digits or card.capability)
    num_sms = getattr(device, "core_count", card.num_sms)
    memory = SHARED_MEMORY.get(capability, SMALLEST.shared_memory)
    memory = getattr(device, "shared_memory_per_block_optin", memory)
    return Card(card.name, capability, num_sms, memory)


def named(kind: str) -> Card:
    """An absent GPU, by the tables; one that they do not have counts as the smallest."""
    name = _known_name(kind)
    if name is None:
        return dataclasses.replace(SMALLEST, name=kind)
    capability, num_sms = KNOWN[name]
    return Card(kind, capability, num_sms, SHARED_MEMORY.get(capability, SMALLEST.shared_memory))


def _known_name(kind: str) -> str | None:
    """The name in the table that is part of `kind`, if one is."""
    names = sorted(KNOWN, key=len, reverse=True)
    return next((name for name in names if re.search(rf"\b{name}\b", kind)), None)


def _is_found() -> bool:
    """Whether JAX knows which GPU code is lowered for. JAX 0.10.2 does not ask."""
    try:
        getattr(plgpu, "get_gpu_info", lambda: None)()
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def target_gpu(kind: str) -> Iterator[None]:
    """Code that is exported inside is lowered for a GPU of this kind, present or not.

    Enter `jax.set_mesh` before it, if at all. Under a mesh, JAX's caches are cleared on entry and
    on exit, because their keys do not contain the GPU.

    Args:
      kind: a name as `jax.Device.device_kind` has it, such as "NVIDIA H100" or "NVIDIA A100".

    Raises:
      ValueError, TypeError: if this version of JAX does not know the kind, or it is no str.
    """
    if not isinstance(kind, str):
        raise TypeError(f"{checks.shown('kind', kind)}; accepted: a str")
    device = _abstract(kind)
    with lowered_for(device):  # JAX 0.10.2 has no names, so the table answers
        is_known = _is_found() if hasattr(plgpu, "get_gpu_info") else _known_name(kind) is not None
    if not is_known:
        raise ValueError(
            f"{checks.shown('kind', kind)}; accepted: a GPU that JAX {jax.__version__} knows by "
            "name, such as 'NVIDIA H100'"
        )
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    token = _TARGET.set(device)
    if has_mesh:
        jax.clear_caches()
    try:
        with contextlib.nullcontext() if has_mesh else lowered_for(device):
            yield
    finally:
        _TARGET.reset(token)
        if has_mesh:
            jax.clear_caches()


def _abstract(kind: str) -> AbstractDevice:
    return AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")


def device_of_mesh() -> AbstractDevice | None:
    """The device that the current mesh names, if there is one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def lowered_for(device: AbstractDevice | None) -> Any:
    """A mesh without axes that names the device."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
