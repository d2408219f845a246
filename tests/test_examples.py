"""The examples run, and check themselves."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import linear_attention
import min_gru
import tpa_decoder

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_tpa_decoder() -> None:
    assert tpa_decoder.main(steps=3).shape == (2, 8)


SERVE = """
from tpa_server import CHUNK, PAGE, main

begun = [(r.prompt[:CHUNK], *r.pages[: CHUNK // PAGE]) for r in main(count=8, pages=24)]
assert len(begun) == 8 > len(set(begun))
"""


@pytest.mark.slow
def test_tpa_server() -> None:
    """It compares bits, under XLA's defaults; prompts that begin alike have the same pages."""
    folders = os.pathsep.join(map(str, (ROOT, ROOT / "examples")))
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = folders
    subprocess.run([sys.executable, "-c", SERVE], env=environment, check=True)


def test_linear_attention() -> None:
    assert linear_attention.main(tokens=16).shape == (2, 16, 32)


@pytest.mark.slow
def test_linear_attention_with_its_sequence_sharded() -> None:
    assert linear_attention.main_sharded().shape == (2, 64, 32)


def test_min_gru() -> None:
    assert min_gru.main(tokens=33).shape == (2, 33, 16)


@pytest.mark.slow
def test_min_gru_learns_the_same_with_its_sequence_sharded() -> None:
    one, sharded = min_gru.train(), min_gru.train(num_devices=jax.device_count())
    assert one[-1] < 0.9 * one[0]
    np.testing.assert_allclose(sharded, one, rtol=1e-5)
