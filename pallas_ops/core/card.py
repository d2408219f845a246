"""The GPU that code is lowered for."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import triton
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_ops.core import checks


@contextlib.contextmanager
def target_gpu(kind: str) -> Iterator[None]:
    """Code that is exported inside is lowered for a GPU of this kind, present or not.

    Args:
      kind: a name as `jax.Device.device_kind` has it, such as "NVIDIA H100" or "NVIDIA A100".

    Raises:
      ValueError: if this version of JAX does not know the kind.
    """
    checks.instance("kind", kind, str)
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        info = getattr(triton, "get_gpu_info", None)  # JAX 0.10.2 has none, and needs none
        try:
            if info is not None:
                info()
        except ValueError:
            raise ValueError(
                f"{checks.shown('kind', kind)}; accepted: a GPU that JAX {jax.__version__} knows "
                "by name, such as 'NVIDIA H100'"
            ) from None
        yield
