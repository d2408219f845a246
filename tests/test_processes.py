"""Sequences sharded over the devices of two processes."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_two_processes_agree_with_one_device() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    root = pathlib.Path(__file__).parents[1]
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    flags = f"{os.environ['XLA_FLAGS']} {flags}"  # of two, the last one counts
    env = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    command = [sys.executable, "-m", "tests.processes", str(port)]
    both = [
        subprocess.Popen(
            [*command, str(i)],
            cwd=root,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    for text in texts:
        assert text.endswith("all agree\n"), text
