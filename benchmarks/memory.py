"""How much device memory a call needs at its peak, inputs included, in MiB.

On a GPU it is the allocator's own peak. That cannot be reset, so each case gets a fresh process;
since XLA tries kernels out on scratch memory while it compiles, that process loads what the parent
compiled; and since a pool that grows hands out more than is asked for (32 MiB for 24), its pool has
one size. On a CPU, which keeps no such count, it is what XLA planned for the program.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax

from benchmarks import peers

MIB = 2**20
_ROOT = pathlib.Path(__file__).parents[1]
_SECONDS = 600
_POOLS = 0.8  # of the card, for all processes that measure; PyTorch has its own

Spec = dict[str, Any]  # which case and provider: what `python -m` can be told
Peak = dict[str, Any]  # {"memory_mib": ...} or {"memory_reason": ...}


def share_device() -> None:
    """Lets processes share one card: each takes what it needs, up to all of it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def share_compilations(folder: str) -> None:
    """Keeps every program this process compiles in `folder`, where its children find them."""
    for name, value in (
        ("jax_compilation_cache_dir", folder),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)
        os.environ[name.upper()] = str(value)


def peak() -> float:
    """The most this process ever held on its device; PyTorch keeps an account of its own."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        raise RuntimeError("the device's allocator keeps no peak")
    return float(stats["peak_bytes_in_use"] + peers.peak_bytes()) / MIB


def planned(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float:
    """Arguments, results and temporaries of a jitted function, as XLA laid them out."""
    if not hasattr(function, "lower"):
        raise ValueError("not jitted, so there is no one program to analyse")
    plan = function.lower(*arguments).compile().memory_analysis()
    used = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return float(used - plan.alias_size_in_bytes) / MIB


def peaks(module: str, specs: Sequence[Spec], *, jobs: int) -> Iterator[tuple[int, Peak]]:
    """Peaks of all cases, each in a process of its own, as (index, peak) in order of arrival.

    A case that fails beside others, for lack of memory say, is tried once more on its own.
    """
    failed = []
    with futures.ThreadPoolExecutor(jobs) as pool:
        share = _POOLS / jobs
        running = {pool.submit(_one_peak, module, spec, share): i for i, spec in enumerate(specs)}
        for future in futures.as_completed(running):
            if "memory_reason" in future.result() and jobs > 1:
                failed.append(running[future])
            else:
                yield running[future], future.result()
    for index in failed:
        yield index, _one_peak(module, specs[index], _POOLS)


def _one_peak(module: str, spec: Spec, share: float) -> Peak:
    pool = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share}"}
    command = [sys.executable, "-m", module, f"--memory_case={json.dumps(spec)}"]
    try:
        child = subprocess.run(
            command,
            cwd=_ROOT,
            env=os.environ | pool,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"memory_reason": f"not done after {_SECONDS} s"}
    lines = (child.stdout if child.returncode == 0 else child.stderr).split("\n")
    last = next((line for line in reversed(lines) if line.strip()), f"exit {child.returncode}")
    try:
        return dict(json.loads(last))
    except ValueError:
        return {"memory_reason": last[:200]}
