"""An hour of outages, wrong clocks and blindness on virtual time: the rules hold at each step."""

from __future__ import annotations

import pytest

from bench.simulation import Plan, run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_no_wrong_decision_in_an_hour(seed: int) -> None:
    figures = run(
        Plan(macs=200, sites=50, outages_per_hour=3, wrong_clocks=0.1, blindnesses=4, seed=seed)
    )
    values = {figure.name: figure.value for figure in figures}
    assert values["demotions per hour"] > 100  # there was something to get wrong
    assert values["heartbeats per hour"] > 15_000
