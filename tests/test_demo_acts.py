"""The demo's acts: each fits only where it makes sense, and the picture fits its window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from llmkube.cli.demo.acts import ACTS, Missed, play
from llmkube.cli.demo.stage import MACS, SITES, Stage
from llmkube.cli.demo.view import Picture

STUDIO, MINI, MACBOOK = MACS
BERLIN, OSAKA = SITES
EVERYTHING = {*MACS, *SITES, "controller"}


def stage(*missing: str) -> Stage:
    """A stage on which all programs run but those."""
    return cast(Stage, SimpleNamespace(processes=dict.fromkeys(EVERYTHING - set(missing))))


@pytest.mark.parametrize(
    ("key", "missing", "fits"),
    [
        pytest.param("1", (), True, id="an edge that runs can be stopped"),
        pytest.param("1", (OSAKA,), False, id="but not twice"),
        pytest.param("2", (STUDIO,), False, id="a dead agent cannot be killed"),
        pytest.param("3", (), False, id="a living one cannot be brought back"),
        pytest.param("3", (STUDIO,), True, id="a dead one can"),
        pytest.param("4", (MACBOOK,), True, id="a thief can steal again"),
        pytest.param("6", (), False, id="who is honest cannot become so"),
        pytest.param("8", (MACBOOK,), False, id="a thief's token is no example of revocation"),
        pytest.param("u", (), False, id="an edge that pushes never becomes Unreachable"),
        pytest.param("e", (OSAKA,), True, id="a stopped edge can be started"),
    ],
)
def test_an_act_fits_or_says_why_not(key: str, missing: tuple[str, ...], fits: bool) -> None:
    why = {act.key: act for act in ACTS}[key].unfit(stage(*missing))
    assert (why is None) is fits, why
    assert fits or "press" in (why or "")


async def test_an_act_that_does_not_fit_does_nothing() -> None:
    revive = {act.key: act for act in ACTS}["3"]
    with pytest.raises(Missed, match="studio is running; press 2 first"):
        await play(stage(), revive)


@pytest.mark.parametrize("height", [24, 40, 60])
def test_the_picture_fits_the_window_and_shows_the_newest_events(height: int) -> None:
    picture = Picture("/somewhere/admin.kubeconfig", nodes=_nodes(), events=_events(50))
    for number in range(20):
        picture.tell(f"step {number}")
    console = Console(width=120, height=height, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(picture.render(height))
    text = captured.get()
    assert len(text.splitlines()) <= height
    assert "step 19" in text
    assert "studio" in text
    if height >= 40:
        assert "note 49" in text
        assert "export KUBECONFIG=/somewhere/admin.kubeconfig" in text


def _nodes() -> list[dict[str, Any]]:
    return [{"metadata": {"name": name}, "status": {}} for name in MACS]


def _events(count: int) -> list[dict[str, Any]]:
    return [
        {
            "eventTime": f"2026-01-01T00:00:{number:02d}.000000Z",
            "reason": "Reason",
            "regarding": {"name": "studio"},
            "note": f"note {number}",
        }
        for number in range(count)
    ]
