"""The examples run, and check themselves."""

from examples import tpa_decoder


def test_tpa_decoder() -> None:
    assert tpa_decoder.main(steps=3).shape == (2, 8)
