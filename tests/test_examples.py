"""The examples run, and check themselves."""

from examples import linear_attention, min_gru, tpa_decoder


def test_tpa_decoder() -> None:
    assert tpa_decoder.main(steps=3).shape == (2, 8)


def test_linear_attention() -> None:
    assert linear_attention.main(tokens=16).shape == (2, 16, 32)


def test_min_gru() -> None:
    assert min_gru.main(tokens=33).shape == (2, 33, 16)
