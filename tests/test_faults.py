"""`python -m tests.faults` can plant every fault: what it replaces is there once."""

from tests.faults import FAULTS, ROOT


def test_every_fault_has_its_place() -> None:
    found = {
        name: (ROOT / "pallas_ops" / fault.file).read_text().count(fault.right)
        for name, fault in FAULTS.items()
    }
    assert found == dict.fromkeys(FAULTS, 1)
