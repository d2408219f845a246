"""What every test stands on: where JAX runs, how strict it is, and where the numbers come from."""

import ctypes.util
import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import zlib
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _has_gpu() -> bool:
    """Whether there are a card and the libraries that JAX needs to run on it."""
    return all(pathlib.Path("/dev", name).exists() for name in ("nvidia0", "nvidiactl")) and (
        _installed("nvidia.cuda_runtime")
        or _installed("nvidia.cu13")
        or ctypes.util.find_library("cudart") is not None
    )


# JAX reads all of these when it is imported, which is after this file.
_XLA_FLAGS = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
if not _has_gpu():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # LLVM's optimiser is half the time of these tests, each a small program that runs once.
    _XLA_FLAGS.append("--xla_backend_optimization_level=0")
    is_old = importlib.metadata.version("jaxlib").startswith("0.10.")
    if is_old:
        # There XLA's newer emitters for CPUs take half of what is left; later versions have no
        # others. The older ones add up in an order that depends on the shape.
        _XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # Without a folder nothing is kept, and yet a key is made of each program. With one, the next
    # run takes two fifths of the time (`emulate._kept` keeps what Triton made). JAX 0.10 cannot
    # make the key of a program for an H200.
    has_folder = "JAX_COMPILATION_CACHE_DIR" in os.environ
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = str(has_folder and not is_old)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several workers share one card
os.environ["XLA_FLAGS"] = " ".join(_XLA_FLAGS)

pytest.register_assert_rewrite("tests.support")

# The first example compiles, so no deadline; the same examples on every run.
hypothesis.settings.register_profile(
    "pallas_ops", deadline=None, derandomize=True, database=None, max_examples=20
)
hypothesis.settings.load_profile("pallas_ops")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of each test the first case is quick (`-m quick`), unless it takes long."""
    met = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test not in met and not any(map(item.get_closest_marker, ("slow", "cards", "large"))):
            item.add_marker("quick")
        met.add(test)


def pytest_collection_finish() -> None:
    """Tracing makes objects by the million, and hardly a cycle: Python need not look so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(scope="module", autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    """Files of tests share few programs; kept, they are half of a worker's memory."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()
    gc.collect()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on the test's id and on nothing else."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))
