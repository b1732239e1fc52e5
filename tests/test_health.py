"""What kubelet and Prometheus are told."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
import yaml

from llmkube.clock import SystemClock
from llmkube.controller.tuning import Tuning
from llmkube.health import (
    BadAddress,
    BindAddress,
    Checks,
    LoopPulse,
    health_routes,
    metrics_routes,
    serving,
    serving_apart,
)
from tests.support.background import background
from tests.support.clock import FakeClock
from tests.support.wait import eventually

LOOPBACK = BindAddress("127.0.0.1", 0)
MANIFEST = Path(__file__).resolve().parent.parent / "config" / "manager" / "deployment.yaml"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(":8080", BindAddress(None, 8080), id="every interface"),
        pytest.param(
            "127.0.0.1:0", BindAddress("127.0.0.1", 0), id="a port of the kernel's choice"
        ),
        pytest.param("[::1]:8081", BindAddress("::1", 8081), id="IPv6 in brackets"),
        pytest.param("0", None, id="zero switches it off"),
        pytest.param("", None, id="empty switches it off"),
    ],
)
def test_bind_address(text: str, expected: BindAddress | None) -> None:
    assert BindAddress.parse(text) == expected


@pytest.mark.parametrize("text", ["8080", "host:", "host:http", ":70000", ":-1", ":８０"])
def test_bad_bind_address_says_what_to_write(text: str) -> None:
    with pytest.raises(BadAddress, match="HOST:PORT"):
        BindAddress.parse(text)


async def test_checks_answer_as_kubernetes_components_do() -> None:
    live, ready = Checks(), Checks()
    trouble: list[str] = []
    live.add("loop", lambda: None)
    ready.add("leases", lambda: trouble[0] if trouble else None)
    async with serving(BindAddress("127.0.0.1", 0), health_routes(live, ready)) as port:
        assert await _get(port, "/healthz") == (200, "ok")
        assert await _get(port, "/readyz?verbose") == (200, "[+]leases ok\n")
        trouble.append("403 since start")
        assert await _get(port, "/readyz") == (500, "[-]leases failed: 403 since start\n")
        assert await _get(port, "/healthz") == (200, "ok")


async def test_metrics_keep_the_content_type_of_the_exposition() -> None:
    routes = metrics_routes(lambda: (b"up 1\n", "text/plain; version=1.0.0; charset=utf-8"))
    async with serving(BindAddress("127.0.0.1", 0), routes) as port:
        assert await _get(port, "/metrics") == (200, "up 1\n")


async def test_zero_does_not_listen() -> None:
    async with serving(None, []) as port, serving_apart(None, []) as other:
        assert port == other == 0


def test_a_loop_is_stuck_once_it_has_not_beaten_for_longer_than_the_limit() -> None:
    clock = FakeClock()
    pulse = LoopPulse(clock, timedelta(seconds=10))
    clock.advance(timedelta(seconds=11))  # up to a second of it before it got stuck
    assert pulse.complaint() is None
    clock.advance(timedelta(milliseconds=1))
    assert pulse.complaint() == "the event loop has been stuck for more than 10 s"


async def test_a_stuck_loop_is_told_while_it_is_stuck_and_forgiven_afterwards() -> None:
    pulse, live = LoopPulse(SystemClock(), timedelta(milliseconds=200)), Checks()
    live.add("event-loop", pulse.complaint)
    routes = health_routes(live, Checks())
    async with background(pulse.beat()), serving_apart(LOOPBACK, routes) as port:
        await eventually(lambda: _is_well(port), "it is well")
        told: list[str] = []
        asker = threading.Thread(target=_ask_until_it_fails, args=(port, told), daemon=True)
        asker.start()
        asker.join(60)  # which blocks the loop
        assert told[-1].startswith("[-]event-loop failed: the event loop has been stuck")
        await eventually(lambda: _is_well(port), "it is well again")


async def test_an_address_that_is_taken_is_told_by_the_thread_too() -> None:
    async with serving_apart(LOOPBACK, []) as port:
        with pytest.raises(OSError, match="in use"):
            async with serving_apart(BindAddress("127.0.0.1", port), []):
                pass


def test_no_probe_gives_up_before_the_loop_counts_as_stuck() -> None:
    (container,) = yaml.safe_load(MANIFEST.read_text())["spec"]["template"]["spec"]["containers"]
    patience = timedelta(seconds=container["livenessProbe"]["timeoutSeconds"])
    assert patience >= Tuning().life.loop_stall_limit


async def _is_well(port: int) -> bool:
    return await _get(port, "/healthz") == (200, "ok")


def _ask_until_it_fails(port: int, told: list[str]) -> None:
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).close()
        except urllib.error.HTTPError as error:
            told.append(error.read().decode())
            return


async def _get(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()
