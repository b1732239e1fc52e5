"""The guided script: faults, and for each the state that must follow.

An act does something to the stage and then waits until its expectation holds. The same acts are
offered by keypress, played in order by `--script`, and asserted by `--once`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from llmkube.api.names import METAL_ACCOUNT_PREFIX, REPORT_ANNOTATION
from llmkube.cli.demo import hostile
from llmkube.cli.demo.stage import MACS, NAMESPACE, SITES, Stage
from llmkube.controller.options import ControllerName
from llmkube.kube.errors import ApiError
from llmkube.kube.resources import EVENTS, FEDERATEDCLUSTERS, LEASES, METALNODES

STUDIO, MINI, MACBOOK = MACS
BERLIN, OSAKA = SITES
WITHIN = timedelta(seconds=90)
_POLL = timedelta(milliseconds=200)

Check = Callable[[Stage], Awaitable[str | None]]
"""None when all is as expected, else what is seen instead."""


class Missed(Exception):
    """An expected state did not come; the message says which, and what was seen."""


@dataclass(frozen=True, slots=True)
class Act:
    """One fault: its key, what the audience is told, what is done, and what must follow.

    `unfit` says why it cannot be played now, None if it can.
    """

    key: str
    title: str
    story: str
    do: Callable[[Stage], Awaitable[None]]
    expect: Check
    unfit: Callable[[Stage], str | None] = lambda _stage: None


async def play(stage: Stage, act: Act, *, within: timedelta = WITHIN) -> None:
    """Do it and wait for what must follow. Raises Missed, also if it does not fit now."""
    if why := act.unfit(stage):
        raise Missed(f"{act.title}: {why}")
    await act.do(stage)
    await wait_for(stage, act.title, act.expect, within=within)


async def wait_for(stage: Stage, title: str, check: Check, *, within: timedelta = WITHIN) -> None:
    """Wait until the check holds. Raises Missed."""
    seen: str | None = "nothing yet"
    try:
        async with asyncio.timeout(within.total_seconds()):
            while True:
                stage.check_alive()
                try:
                    seen = await check(stage)
                except ApiError as error:
                    seen = error.message
                if seen is None:
                    return
                await asyncio.sleep(_POLL.total_seconds())
    except TimeoutError:
        raise Missed(f"{title}: not within {within}: {seen}") from None


# What can be expected -----------------------------------------------------------------------------


def mac_is(name: str, connected: str, reachable: str, *, said: str = "") -> Check:
    """Reasons of both conditions of a Mac, `said` being part of Reachable's message; hostIP is
    set exactly while both conditions are True."""

    async def check(stage: Stage) -> str | None:
        status = (await stage.client.get(METALNODES, name, NAMESPACE)).get("status") or {}
        found = {one["type"]: one for one in status.get("conditions") or ()}
        reasons = [found.get(kind, {}).get("reason") for kind in ("AgentConnected", "Reachable")]
        message = found.get("Reachable", {}).get("message", "")
        if reasons != [connected, reachable] or said not in message:
            return f"{name}: {reasons} {message}"
        if bool(status.get("hostIP")) != (reachable == "Verified"):
            return f"{name}: hostIP is {status.get('hostIP')!r}"
        return None

    return check


def site_is(name: str, phase: str) -> Check:
    async def check(stage: Stage) -> str | None:
        status = (await stage.client.get(FEDERATEDCLUSTERS, name)).get("status") or {}
        seen = status.get("phase")
        return None if seen == phase else f"{name}: {seen}"

    return check


def event_is(reason: str, name: str) -> Check:
    """An Event of that reason about that Mac."""

    async def check(stage: Stage) -> str | None:
        for event in await stage.client.list(EVENTS, NAMESPACE):
            if event.get("reason") == reason and event.get("regarding", {}).get("name") == name:
                return None
        return f"no Event {reason} about {name}"

    return check


def all_of(*checks: Check) -> Check:
    async def check(stage: Stage) -> str | None:
        for one in checks:
            if (seen := await one(stage)) is not None:
                return seen
        return None

    return check


EVERYTHING_IS_WELL = all_of(
    *(mac_is(name, "HeartbeatReceived", "Verified") for name in MACS),
    *(site_is(name, "Connected") for name in SITES),
)


# What must be the case before ---------------------------------------------------------------------


def running(name: str, otherwise: str) -> Callable[[Stage], str | None]:
    return lambda stage: None if name in stage.processes else f"{name} is not running; {otherwise}"


def stopped(name: str, otherwise: str) -> Callable[[Stage], str | None]:
    return lambda stage: f"{name} is running; {otherwise}" if name in stage.processes else None


# What is done -------------------------------------------------------------------------------------


async def _nothing(_stage: Stage) -> None:
    pass


async def _stop_edge(stage: Stage) -> None:
    await stage.stop(OSAKA)


async def _start_edge(stage: Stage) -> None:
    await stage.start_edge(OSAKA)


async def _kill_agent(stage: Stage) -> None:
    await stage.kill(STUDIO)


async def _start_agent(stage: Stage) -> None:
    stage.start_agent(STUDIO)


async def _steal_address(stage: Stage) -> None:
    await stage.start_thief(MACBOOK, hostile.stolen_address(stage.ports[MINI]))


async def _steal_identity(stage: Stage) -> None:
    victim = await stage.client.get(LEASES, METAL_ACCOUNT_PREFIX + MINI, NAMESPACE)
    report: dict[str, Any] = json.loads(victim["metadata"]["annotations"][REPORT_ANNOTATION])
    await stage.start_thief(MACBOOK, report)


async def _honest_again(stage: Stage) -> None:
    await stage.stop_thief()
    stage.start_agent(MACBOOK)


async def _rotate_key(stage: Stage) -> None:
    await stage.stop(MINI)
    stage.forget_key(MINI)
    stage.start_agent(MINI)


async def _revoke(stage: Stage) -> None:
    await stage.revoke_mac(MACBOOK)


async def _renew(stage: Stage) -> None:
    await stage.register_mac(MACBOOK)


class _ControllerRestart:
    """Kill the controller, start it again, and see that no condition moved."""

    def __init__(self) -> None:
        self._before: Mapping[str, str] = {}
        self._starts = 0

    async def do(self, stage: Stage) -> None:
        self._before = await _transitions(stage)
        self._starts = _starts(stage)
        await stage.kill("controller")
        await stage.start_controller()

    async def expect(self, stage: Stage) -> str | None:
        if _starts(stage) < self._starts + len(ControllerName):
            return "the new controller does not lead yet"
        if (seen := await EVERYTHING_IS_WELL(stage)) is not None:
            return seen
        after = await _transitions(stage)
        return None if after == self._before else f"{self._before} became {after}"


def _starts(stage: Stage) -> int:
    """How many reconcilers the controllers of this demo have started so far."""
    return stage.processes["controller"].output().count('"controller started"')


async def _transitions(stage: Stage) -> Mapping[str, str]:
    """When each condition of each Mac last changed."""
    nodes = await stage.client.list(METALNODES, NAMESPACE)
    return {
        f"{node['metadata']['name']}/{one['type']}": one["lastTransitionTime"]
        for node in nodes
        for one in node.get("status", {}).get("conditions") or ()
    }


_restart = _ControllerRestart()

ACTS = (
    Act(
        "1",
        "Stop an edge",
        f"{OSAKA} pushes no more: Stale after three intervals, Unreachable after ten.",
        _stop_edge,
        site_is(OSAKA, "Stale"),
        running(OSAKA, "press e first"),
    ),
    Act(
        "2",
        "Kill an agent",
        f"{STUDIO} loses power: disconnected when its Lease ends, and no address any more.",
        _kill_agent,
        mac_is(STUDIO, "HeartbeatExpired", "AgentDisconnected"),
        running(STUDIO, "press 3 first"),
    ),
    Act(
        "3",
        "Bring it back",
        f"{STUDIO} beats again: connected at once, dialled back, verified.",
        _start_agent,
        mac_is(STUDIO, "HeartbeatReceived", "Verified"),
        stopped(STUDIO, "press 2 first"),
    ),
    Act(
        "4",
        "Steal an address",
        f"{MACBOOK} claims {MINI}'s address. There the dial-back meets another key.",
        _steal_address,
        all_of(
            mac_is(MACBOOK, "HeartbeatReceived", "VerificationFailed", said="PinMismatch"),
            mac_is(MINI, "HeartbeatReceived", "Verified"),
        ),
    ),
    Act(
        "5",
        "Steal an identity",
        f"{MACBOOK} claims {MINI}'s address, key and certificate. The certificate names {MINI}.",
        _steal_identity,
        mac_is(MACBOOK, "HeartbeatReceived", "CertificateMismatch"),
    ),
    Act(
        "6",
        "Be honest again",
        f"{MACBOOK}'s own agent reports the truth, and is verified.",
        _honest_again,
        mac_is(MACBOOK, "HeartbeatReceived", "Verified"),
        stopped(MACBOOK, "press 4 or 5 first"),
    ),
    Act(
        "7",
        "Rotate a key",
        f"{MINI} comes back with a new key: an Event shows both, the new one is verified.",
        _rotate_key,
        all_of(
            mac_is(MINI, "HeartbeatReceived", "Verified"),
            event_is("IngressKeyChanged", MINI),
        ),
        running(MINI, "start the demo again"),
    ),
    Act(
        "8",
        "Revoke a token",
        f"{MACBOOK}'s account is deleted: cut off at once, whatever still beats.",
        _revoke,
        mac_is(MACBOOK, "ServiceAccountNotFound", "AgentDisconnected"),
        running(MACBOOK, "press 6 first"),
    ),
    Act(
        "9",
        "Give it a new one",
        f"A new credential file for {MACBOOK}: the running agent picks it up.",
        _renew,
        mac_is(MACBOOK, "HeartbeatReceived", "Verified"),
        running(MACBOOK, "press 6 first"),
    ),
    Act(
        "u",
        "Ten intervals of silence",
        f"Nobody has touched {OSAKA} since: by now it is Unreachable.",
        _nothing,
        site_is(OSAKA, "Unreachable"),
        stopped(OSAKA, "press 1 first"),
    ),
    Act(
        "e",
        "Start the edge again",
        f"{OSAKA} was silent for ten intervals; one push, and it is Connected.",
        _start_edge,
        site_is(OSAKA, "Connected"),
        stopped(OSAKA, "press 1 first"),
    ),
    Act(
        "c",
        "Restart the controller",
        "The controller is killed and comes back: nobody is disconnected.",
        _restart.do,
        _restart.expect,
    ),
)
