"""What the suite is told about the machine that it runs on."""

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks import timing
from pallas_ops.core import launch


@contextlib.contextmanager
def fake_cupti() -> Iterator[list[timing.Kernel]]:
    kernels: list[timing.Kernel] = []
    yield kernels
    kernels += [("square", 0.25), ("merge", 0.25)] * 2


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tests on any machine."""
    monkeypatch.setattr(timing, "on_gpu", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card that takes half a millisecond for everything, as far as the suite can tell."""
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    monkeypatch.setattr(timing, "cupti", fake_cupti)
    monkeypatch.setattr(timing, "COLD_BYTES", 2**16)
    with launch.interpreted(True):
        yield
