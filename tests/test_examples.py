"""The examples run, and check themselves."""

import linear_attention
import min_gru
import tpa_decoder
import tpa_server


def test_tpa_decoder() -> None:
    assert tpa_decoder.main(steps=3).shape == (2, 8)


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
