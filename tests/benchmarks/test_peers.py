"""PyTorch's functions are columns like any other."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import memory, peers, suite
from tests.benchmarks.toy import TOY, toy_plan


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a PyTorch that has NumPy's arrays for tensors."""
    calls: list[str] = []
    torch = SimpleNamespace(
        from_dlpack=np.asarray,
        no_grad=lambda: lambda function: function,
        compiler=SimpleNamespace(reset=lambda: calls.append("compile anew")),
        cuda=SimpleNamespace(
            synchronize=lambda: None,
            reset_peak_memory_stats=lambda: calls.append("reset"),
            memory_allocated=lambda: memory.MIB,
            max_memory_allocated=lambda: 3 * memory.MIB,
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return calls


def on_tensors(_: Any, **__: Any) -> Callable[..., Any]:
    return lambda x: x * x


@pytest.mark.usefixtures("gpu")
def test_pytorch_is_a_column_like_any_other(log: list[str]) -> None:
    column = peers.provider("torch", on_tensors, "squares")
    table = suite.run(TOY, toy_plan(providers=[column])).tables[0]
    cells = [row.cells["torch"] for row in table.rows]
    assert [(cell.reason, cell.kernel_ms, cell.of_copy) for cell in cells] == 2 * [(None, 0.5, 1.0)]
    # Two MiB of PyTorch's, and our input.
    assert [cell.memory_mib for cell in cells] == [2 + 4 * n / memory.MIB for n in (8, 2048)]
    assert log == ["compile anew", "reset"] * 4  # of each case: no other's shapes are known


def test_pytorch_says_that_it_needs_a_card() -> None:
    column = peers.provider("torch", on_tensors, "squares")
    table = suite.run(TOY, toy_plan(providers=[column])).tables[0]
    assert table.rows[0].cells["torch"].reason == "no NVIDIA GPU for PyTorch to run on"
