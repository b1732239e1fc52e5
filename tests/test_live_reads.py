"""Live reads: which of an answer and the cache is newer, and what a late answer says."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from llmkube.api.cached import CachedLease, LeaseMeta, LeaseSpec
from llmkube.informers.informer import Informer
from llmkube.kube.errors import NotFound, Unavailable
from llmkube.kube.resources import LEASES
from llmkube.reconcilers.live import Evidence, overtaken
from tests.support.clock import FakeClock
from tests.support.virtualtime import VirtualClock, virtual, virtual_clock

SECOND = timedelta(seconds=1)


def lease(version: str, *, name: str = "mac", uid: str = "u1") -> CachedLease:
    return CachedLease(LeaseMeta(name, "macs", uid, version), LeaseSpec())


def cache(*shown: CachedLease, watched_up_to: str = "") -> Informer[CachedLease]:
    """An informer that holds these objects, without a client."""
    clock = FakeClock()
    informer: Informer[CachedLease] = Informer(
        None,  # type: ignore[arg-type]
        LEASES,
        decode=CachedLease,
        clock=clock,
    )
    for obj in shown:
        informer.put(obj, clock.now(), first_sight=False)
    informer._reflectors[None].resource_version = watched_up_to
    return informer


# Which is newer ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("informer", "newer"),
    [
        pytest.param(cache(lease("13")), False, id="the cache is older"),
        pytest.param(cache(lease("14")), True, id="the cache shows the same"),
        pytest.param(cache(lease("15")), True, id="an event came before the answer"),
        pytest.param(cache(lease("9")), False, id="9 is older than 14, though not as a text"),
        pytest.param(cache(lease("15", uid="u2")), True, id="it was re-created meanwhile"),
        pytest.param(cache(), False, id="the cache has not seen it yet"),
        pytest.param(cache(watched_up_to="20"), True, id="it was deleted meanwhile"),
    ],
)
def test_the_newer_of_answer_and_cache_is_believed(
    informer: Informer[CachedLease], newer: bool
) -> None:
    assert overtaken(informer, lease("14")) is newer


def test_an_answer_whose_version_is_no_number_is_believed() -> None:
    assert not overtaken(cache(lease("15")), lease("x"))


# What a late answer says -------------------------------------------------------------------------
TIMEOUT = 60 * SECOND


class Scene:
    """A Lease watch that is open since long ago, and an API server that is asked for Leases and
    lets the asker wait. Everybody hears it a last time at 1,000 s."""

    def __init__(self, answer: Exception | None = None) -> None:
        self.clock: VirtualClock = virtual_clock()
        self.answer = answer
        self.answers = asyncio.Event()
        self.informer: Informer[CachedLease] = Informer(
            None,  # type: ignore[arg-type]
            LEASES,
            decode=CachedLease,
            namespaces=["macs", "others"],
            clock=self.clock,
        )
        self.macs, self.others = self.informer.view.watches
        client: Any = self
        self.evidence = Evidence(client, self.informer, CachedLease, self.clock)

    async def get(self, _resource: Any, name: str, *_: Any, **__: Any) -> dict[str, Any]:
        """The client's part."""
        if name != "prompt":
            await self.answers.wait()
        if self.answer is not None:
            raise self.answer
        return {
            "metadata": {"name": "mac", "namespace": "macs", "uid": "u", "resourceVersion": "1"}
        }

    async def begin(self) -> None:
        for watch in (self.macs, self.others):
            watch.opened(self.now())
        await asyncio.sleep(1000)
        self.macs.heard(self.now())
        self.others.heard(self.now())

    def now(self) -> timedelta:
        return self.clock.monotonic()

    async def asked(self, *, at: float, answered: float) -> None:
        """A live read that is sent and answered so many seconds after the last sign of life."""
        loop = asyncio.get_running_loop()
        loop.call_later(answered, self.answers.set)
        await asyncio.sleep(at)
        await self.evidence.read("macs/mac", TIMEOUT)

    def outage(self, key: str = "macs/mac") -> float | None:
        """The length of the last outage but the start."""
        _, *outages = self.informer.view.sight_of(key).outages
        return outages[-1].length.total_seconds() if outages else None


@pytest.mark.parametrize(
    ("at", "answered", "outage"),
    [
        pytest.param(50, 56, None, id="a prompt answer, however quiet the stream was before"),
        pytest.param(50, 57, 57, id="a late one: blind since the last sign of life"),
    ],
)
def test_a_late_answer_is_an_outage_although_the_stream_is_open(
    at: float, answered: float, outage: float | None
) -> None:
    @virtual
    async def test() -> None:
        scene = Scene()
        await scene.begin()
        await scene.asked(at=at, answered=answered)
        assert scene.outage() == (None if outage is None else pytest.approx(outage))
        assert scene.outage("others/mac") == scene.outage(), "the server is the same for all"
        assert scene.informer.view.up

    test()


@virtual
async def test_whoever_asks_last_is_not_fooled_by_a_prompt_answer() -> None:
    scene = Scene()
    await scene.begin()
    first = asyncio.ensure_future(scene.asked(at=40, answered=60))
    await asyncio.sleep(59.9)
    await scene.evidence.read("macs/prompt", TIMEOUT)
    assert scene.outage() == pytest.approx(59.9)
    await first
    assert scene.outage() == pytest.approx(60)


@virtual
async def test_no_answer_is_an_outage_too() -> None:
    scene = Scene(Unavailable("no answer within 30 s"))
    told = []
    await scene.begin()
    scene.informer.view.add_listener(lambda: told.append(scene.now()))
    with pytest.raises(Unavailable):
        await scene.asked(at=20, answered=50)
    assert scene.outage() == pytest.approx(50)
    assert told, "what was held back is decided again"


@virtual
async def test_that_there_is_no_such_object_is_an_answer() -> None:
    scene = Scene(NotFound("no such lease", status=404))
    await scene.begin()
    await scene.asked(at=20, answered=21)
    assert scene.outage() is None


@virtual
async def test_a_watch_that_is_down_stays_down() -> None:
    scene = Scene()
    await scene.begin()
    scene.macs.closed(scene.now())
    await scene.asked(at=20, answered=50)
    assert not scene.informer.view.up
