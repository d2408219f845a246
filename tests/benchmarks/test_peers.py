"""PyTorch's functions are columns like any other."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
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
            synchronize=lambda: calls.append("wait"),
            reset_peak_memory_stats=lambda: calls.append("reset"),
            empty_cache=lambda: calls.append("empty"),
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
    table = suite.run(TOY, toy_plan(providers=[column], metrics=["speed"])).tables[0]
    cells = [row.cells["torch"] for row in table.rows]
    assert [(cell.reason, cell.kernel_ms, cell.of_copy) for cell in cells] == 2 * [(None, 0.5, 1.0)]
    # What the first call tuned is no part of the peak, nor are other cases' shapes known.
    assert log[:4] == ["compile anew", "wait", "reset", "wait"]
    assert log.count("compile anew") == log.count("reset") == 4  # one a case


def test_pytorch_says_that_it_needs_a_card() -> None:
    column = peers.provider("torch", on_tensors, "squares")
    table = suite.run(TOY, toy_plan(providers=[column])).tables[0]
    assert table.rows[0].cells["torch"].reason == "no NVIDIA GPU for PyTorch to run on"


def test_pytorch_keeps_an_account_of_its_own(
    monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 2 * memory.MIB})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert memory.peak() == 5
    peers.forget()
    monkeypatch.delitem(sys.modules, "torch")
    peers.forget()
    assert memory.peak() == 2
    assert log == ["empty", "reset"]  # so that the next case's count starts anew
