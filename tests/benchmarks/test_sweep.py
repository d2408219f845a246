"""A sweep ranks what a module proposes; what is wrong or refused comes last, with its reason."""

import dataclasses

import pytest

from benchmarks import sweep
from pallas_ops import LrpeCosineConfig
from tests.benchmarks.toy import TOY, explode, off_by_one, provider, toy_plan


def test_configs_leaves_out_what_is_refused() -> None:
    found = sweep.configs(LrpeCosineConfig, variant=("sequence", "block"), num_stages=(1, 2))
    launches = [("sequence", 1), ("block", 1), ("block", 2)]
    assert [(c.variant, c.num_stages) for c in found] == launches
    assert sweep.label(found[0]).startswith("variant='sequence', block_n=16")
    assert sweep.label(None) == "default"


@pytest.mark.usefixtures("gpu")
def test_lines_are_ranked_and_wrong_ones_last() -> None:
    proposed = [provider("wrong", off_by_one), provider("broken", explode), provider("fine")]
    toy = dataclasses.replace(TOY, proposals=lambda **_: proposed)
    plan = toy_plan(grid={"k": (1,), "n": (8,)})
    (found,) = sweep.run(toy, plan, lambda _: None)
    title, first, *others = sweep.lines(found)
    assert title == "toy fwd f32 k=1 n=8 (copy: 500.0 us)"
    assert first.split() == ["500.0", "us", "1.000", "fine"]
    assert [line.split()[:2] for line in others] == [["-1", "wrong:"], ["-1", "broken:"]]
