"""Which card code is lowered for: by its name, or as a local one tells of itself."""

import dataclasses
from types import SimpleNamespace

import pytest
from jax.sharding import AbstractDevice

from pallas_ops.core import card, launch
from tests import h200


@pytest.mark.parametrize(
    ("kind", "capability", "num_sms"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, 108),
        ("NVIDIA A10", 86, 72),
        ("NVIDIA H100 80GB HBM3", 90, 132),
        ("NVIDIA H20", 90, 78),
        ("NVIDIA GeForce RTX 4090", 89, 128),
        ("NVIDIA RTX PRO 5000 Blackwell", 120, 110),
    ],
)
def test_cards_by_name(kind: str, capability: int, num_sms: int) -> None:
    found = card.named(kind)
    assert (found.name, found.capability, found.num_sms) == (kind, capability, num_sms)
    assert found.shared_memory == card.SHARED_MEMORY[capability]


def test_an_unknown_card_counts_as_the_smallest() -> None:
    name = "NVIDIA GeForce RTX 9999"
    assert card.named(name) == dataclasses.replace(card.SMALLEST, name=name)


def test_the_smallest_card_has_no_more_than_any() -> None:
    known = [card.named(name) for name, (x, _) in card.KNOWN.items() if x >= 80 and x != 110]
    assert card.SMALLEST.shared_memory <= min(x.shared_memory for x in known)
    assert card.SMALLEST.num_sms <= min(x.num_sms for x in known)


def test_a_local_card_tells_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(
        device_kind="NVIDIA H100 MIG 1g.10gb",
        compute_capability="9.0",
        core_count=16,
        shared_memory_per_block_optin=232_448,
    )
    monkeypatch.setattr(card, "_local", lambda: device)
    assert card.current() == card.Card(device.device_kind, 90, 16, 232_448)
    with launch.interpreted(True):
        assert card.current() == card.H200
    with h200.instead("NVIDIA L4"), h200.on_h200():
        assert card.current() == card.named("NVIDIA L4")
    monkeypatch.setattr(card, "_local", lambda: None)
    assert card.current() == card.SMALLEST


def test_a_mesh_of_a30s_is_known() -> None:
    """JAX is told of an A30 where the card is unknown."""
    device = AbstractDevice(device_kind="NVIDIA A30", num_cores=56, platform="gpu")
    with card.lowered_for(device):
        assert card.current() == card.named("NVIDIA A30")


def test_a_card_without_a_name_tells_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(device_kind="NVIDIA X", compute_capability="12.0")
    monkeypatch.setattr(card, "_local", lambda: device)
    found = card.current()
    assert found.capability == 120
    assert found.shared_memory == card.SHARED_MEMORY[120]
