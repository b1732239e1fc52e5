"""What holds whatever happens, restarts included."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from llmkube.rules.checks import CheckSettings
from llmkube.rules.verification import decide, start
from tests.support.clock import FakeClock
from tests.support.dialback import (
    LAN,
    MINUTE,
    TAILNET,
    VERIFIED,
    Bench,
    rotated,
    second,
)
from tests.support.reports import UID, report_for


def test_a_restart_in_mid_check_reads_the_answer() -> None:
    bench = Bench()
    bench.settle()
    bench.restart()
    bench.settle()
    bench.answer(Reachable=TAILNET)
    bench.restart()
    bench.settle()
    assert bench.state == VERIFIED
    assert len(bench.starts) == 1


def test_a_start_that_got_no_further_is_due_again_after_30_seconds() -> None:
    bench = Bench()
    now = bench.clock.now()
    decision = start(decide(bench.seen(), bench.settings, bench.policy, now), bench.settings, now)
    bench._apply(decision)  # killed before the pod
    bench.restart()
    bench.wait(second(29))
    assert bench.starts == []
    bench.wait(second(2))
    assert len(bench.starts) == 1
    assert bench.book.failures == 0


ACTIONS = st.sampled_from(
    [
        "pass 1",
        "pass 31",
        "pass 700",
        "reach",
        "refuse",
        "evict",
        "garble",
        "delete",
        "rotate",
        "report",
        "bad report",
        "no report",
        "disconnect",
        "connect",
        "restart",
        "ask",
        "bad spec",
        "good spec",
        "step back",
        "no slots",
        "slots",
    ]
)
ROTATED, _ = rotated()


def play(bench: Bench, action: str) -> None:  # noqa: C901 - one line per action
    match action.split():
        case ["pass", seconds]:
            bench.wait(second(int(seconds)))
        case ["reach" | "refuse" as kind] if bench.book.running and bench.pods:
            bench.answer(**({"Reachable": LAN} if kind == "reach" else {"others": "Refused"}))
        case ["evict"] if bench.book.running and bench.pods:
            bench.pod_status(phase="Failed", reason="Evicted")
        case ["garble"] if bench.book.running and bench.pods:
            bench.answer(message="?")
        case ["delete"]:
            bench.pods.clear()
        case ["rotate"]:
            bench.report = ROTATED
        case ["report"]:
            bench.report = report_for(UID)
        case ["bad", "report"]:
            bench.report = "?"
        case ["no", "report"]:
            bench.report = None
        case ["disconnect" | "connect" as kind]:
            bench.connect("True" if kind == "connect" else "False")
        case ["restart"]:
            bench.restart()
        case ["ask"]:
            bench.ask()
        case ["bad" | "good" as kind, "spec"]:
            bench.edit(hostIP="?" if kind == "bad" else "10.1.1.1")
        case ["step", _]:
            bench.clock.step_wall(-timedelta(hours=3))
        case ["no", "slots"]:
            bench.slots = False
        case ["slots"]:
            bench.slots = True


@settings(max_examples=150, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_whatever_happens(actions: list[str]) -> None:
    """Starts are 30 s apart (a restart after our clock was put on cannot know); hostIP is set
    exactly while Reachable is True, to an address that is listed as Reachable; deciding again
    changes nothing; a wake-up is never in the past."""
    bench = Bench(clock=FakeClock())
    for action in actions:
        play(bench, action)
        decision = bench.settle()
        if decision.wake_at is not None:
            assert decision.wake_at > bench.clock.mono
        true = bench.reachable.status == "True"
        assert (bench.node.status.host_ip is not None) == true
        if true:
            assert bench.results[bench.node.status.host_ip or ""] == "Reachable"
            assert bench.node.status.condition("AgentConnected").status == "True"  # type: ignore[union-attr]
    gaps = [b - a for a, b in zip(bench.starts, bench.starts[1:], strict=False)]
    assert all(gap >= second(30) for gap in gaps)


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTIONS, max_size=15))
def test_waking_changes_the_decision(actions: list[str]) -> None:
    """At the instant that a decision names, there is something new to do or to say."""
    bench = Bench(clock=FakeClock())
    for action in actions:
        play(bench, action)
    decision = bench.settle()
    if decision.wake_at is None:
        return
    before = (bench.node.status, decision.plan, bench.memory)
    bench.clock.advance(decision.wake_at - bench.clock.mono)
    again = decide(bench.seen(), bench.settings, bench.policy, bench.clock.now())
    assert (again.plan, again.memory) != (before[1], before[2]) or again.book != bench.book


def test_the_defaults_are_those_of_the_specification() -> None:
    defaults = CheckSettings()
    assert (defaults.spacing, defaults.timeout) == (second(30), second(120))
    assert (defaults.backoff, defaults.backoff_cap) == (second(30), MINUTE * 10)
    assert (defaults.reverify, defaults.true_lasts) == (MINUTE * 10, MINUTE * 30)
    assert defaults.max_concurrent == 20
