"""Times are medians of what kernels took, over arguments that no cache holds."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import timing
from tests import h200
from tests.benchmarks.toy import explode


def test_each_call_has_the_sum_of_its_kernels() -> None:
    calls = [(1.0, 2.0), (1.0, 7.0), (1.5, 2.0)]
    kernels = [kernel for a, b in calls for kernel in (("attend", a), ("merge", b))]
    assert timing.per_call(kernels, calls=3) == ([3.0, 8.0, 3.5], 2)


@pytest.mark.parametrize("names", ["ab", "abc", "abba"])
def test_kernel_time_is_a_mean_where_calls_cannot_be_told_apart(names: str) -> None:
    kernels = [(name, float(i)) for i, name in enumerate(names)]
    mean = sum(range(len(names))) / 2
    assert timing.per_call(kernels, calls=2) == ([mean], None)


def test_spread_is_the_middle_half_of_the_calls_over_the_median() -> None:
    assert timing.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == 2 / 3
    assert timing.spread([4.0]) is None


def test_slow_functions_are_called_fewer_times(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def call(_: timing.Rotation, function: Any) -> float:
        calls.append(function)
        return 1e4

    monkeypatch.setattr(timing.Rotation, "call", call)
    found = timing.measure(jnp.sin, (jnp.ones(1),), calls=50)
    assert found.calls == timing.LEAST_CALLS
    assert len(calls) == timing.WARM_UP + timing.LEAST_CALLS


def test_no_kernels_is_an_error_and_not_a_time_of_zero() -> None:
    with pytest.raises(RuntimeError, match="saw no kernel"):
        timing.per_call([], calls=5)


def test_cupti_is_detached_even_if_the_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    def stop(finalize: bool) -> list[timing.Kernel]:
        log.append(finalize)
        return [("k", 1.0)]

    monkeypatch.setattr(timing, "_cupti_functions", lambda: (lambda: log.append("start"), stop))
    with pytest.raises(RuntimeError, match="boom"), timing.cupti() as kernels:
        explode(jnp.ones(1))
    assert log == ["start", True]
    assert kernels == [("k", 1.0)]


def test_without_cupti_the_error_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax._src.lib.mosaic_gpu", None)
    with pytest.raises(RuntimeError, match="kernel times need jax"), timing.cupti():
        pass


def test_rotation_deals_every_copy_before_it_repeats_one() -> None:
    x = jnp.arange(256, dtype=jnp.float32)
    rotation = timing.Rotation((x,), cold_bytes=4 * 1024)
    dealt: list[jax.Array] = []
    for _ in range(8):
        rotation.call(dealt.append)
    places = [x.unsafe_buffer_pointer() for x in dealt]
    assert places[:4] == places[4:]
    assert len(set(places)) == 4
    assert all((x == dealt[0]).all() for x in dealt)


def test_rotation_needs_no_copy_of_what_exceeds_the_cache() -> None:
    rotation = timing.Rotation((jnp.zeros(1024),), cold_bytes=4 * 1024)
    assert rotation._results.maxlen == 1


@pytest.mark.usefixtures("gpu")
def test_copy_copies() -> None:
    x = jnp.arange(4 * timing.COPY_BLOCK, dtype=jnp.float32)
    np.testing.assert_array_equal(timing.copy(x), x)


def test_copy_lowers_for_a_card() -> None:
    x = jax.ShapeDtypeStruct((5 * timing.COPY_BLOCK,), jnp.bfloat16)
    assert "pallas_ops_copy" in h200.lower_for_cuda(timing.pallas_copy, x).as_text()
