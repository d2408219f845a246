"""The examples run, and check themselves."""

import numpy as np
import pytest

import linear_attention
import min_gru
import tpa_decoder
import tpa_server


@pytest.mark.slow
def test_tpa_decoder() -> None:
    assert tpa_decoder.main(steps=3).shape == (2, 8)


@pytest.mark.slow
def test_tpa_server() -> None:
    """It checks every request; prompts that begin alike have the same pages there."""
    finished = tpa_server.main(count=8, pages=24)
    chunk = tpa_server.CHUNK
    begun = [(r.prompt[:chunk], *r.pages[: chunk // tpa_server.PAGE]) for r in finished]
    assert len(begun) == 8
    assert len(set(begun)) < 8


def test_linear_attention() -> None:
    assert linear_attention.main(tokens=16).shape == (2, 16, 32)


def test_min_gru() -> None:
    assert min_gru.main(tokens=33).shape == (2, 33, 16)


@pytest.mark.slow
def test_min_gru_learns_the_same_with_its_sequence_sharded() -> None:
    one, eight = min_gru.train(), min_gru.train(num_devices=8)
    assert one[-1] < 0.9 * one[0]
    np.testing.assert_allclose(eight, one, rtol=1e-5)
