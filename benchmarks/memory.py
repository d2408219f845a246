"""How much device memory a call needs at its peak, inputs included, in MiB.

Of a jitted function it is what XLA laid out for its program, which is what the allocator then hands
out; PyTorch counts its own. An eager function of JAX runs many programs, so it is the allocator's
peak. That cannot be reset, so such a case gets a new allocator; since XLA tries kernels out on
scratch memory while it compiles, the case is compiled before; and since a pool that grows hands out
more than is asked for (32 MiB for 24), the pool has one size.
"""

import gc
import os
import shutil
import subprocess
from typing import Any

import jax
from jax.extend import backend

from benchmarks import peers

MIB = 2**20
POOL = "0.62"  # of the card; the largest tables need 50 GiB
FOUND = "/jax/compilation_cache/cache_hits"


def planned(function: Any, arguments: tuple[Any, ...]) -> float | None:
    """Arguments, results and temporaries of one call; None if no one has an account of them."""
    if isinstance(function, peers.Adapted):
        return float(sum(x.nbytes for x in arguments) + function.peak_bytes(*arguments)) / MIB
    if not hasattr(function, "lower"):
        return None
    plan = function.lower(*arguments).compile().memory_analysis()
    used = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    return float(used - plan.alias_size_in_bytes) / MIB


def fix_pool() -> None:
    """Gives JAX a pool of one size; it asks once in a process. The rest is for PyTorch."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = POOL


def nvidia_smi(query: str) -> str:
    """What it says of the first card, "" where it is not installed."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return answer.partition("\n")[0].strip()


_found: list[str] = []  # an event for each program that was compiled before


def keep_compilations(folder: str) -> None:
    """Has every program that is compiled from now on found again, by a new pool too."""
    jax.monitoring.register_event_listener(
        lambda event, **_: _found.append(event) if event == FOUND else None
    )
    for name, value in (
        ("jax_compilation_cache_dir", folder),
        ("jax_persistent_cache_min_compile_time_secs", 0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(name, value)


def programs_found() -> int:
    """How many programs were not compiled, since they had been before."""
    return len(_found)


def new_pool() -> None:
    """Starts JAX anew: all that was on the device is gone."""
    backend.clear_backends()
    gc.collect()  # the old pool goes with the last cycle of objects that knows it


def peak() -> float:
    """The most that the pool ever held."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "peak_bytes_in_use" not in stats:
        raise RuntimeError("the device's allocator keeps no peak")
    return float(stats["peak_bytes_in_use"]) / MIB
