"""The stale-cache guard: no reconcile on a cache that has not seen our own last write."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest

from llmkube.api.cached import CachedMeta, Meta
from llmkube.informers.guard import CacheGuard, Freshness, parse_version
from llmkube.informers.store import Change, Store
from tests.support.virtualtime import virtual, virtual_clock

SECOND = timedelta(seconds=1)
FRESH, WAIT, READ_LIVE = Freshness.FRESH, Freshness.WAIT, Freshness.READ_LIVE


def thing(version: int, uid: str = "u1", *, doomed: bool = False) -> CachedMeta:
    deletion = "2026-01-01T00:00:00Z" if doomed else None
    meta = Meta("a", "ns", uid, str(version), deletion_timestamp=deletion)
    return CachedMeta(meta)


class Setting:
    """A store, its guard, and the informer's part played by hand."""

    def __init__(self) -> None:
        self.store: Store[CachedMeta] = Store()
        self.clock = virtual_clock()
        self.list_version = 0
        self.guard = CacheGuard(
            self.store, self.clock, passed=lambda _key, version: self.list_version >= version
        )

    def see(self, new: CachedMeta | None) -> None:
        old = self.store.get("ns/a")
        if new is None:
            self.store.remove("ns/a")
        else:
            self.store.put(new)
        self.guard.observe(Change("ns/a", old, new, False, self.clock.now()))


@virtual
async def test_without_a_write_the_cache_is_fresh_and_nothing_is_remembered() -> None:
    s = Setting()
    assert s.guard.check("ns/a") is FRESH
    assert await s.guard.wait_fresh("ns/a") is FRESH
    assert len(s.guard) == 0


@virtual
async def test_a_reconcile_waits_until_the_informer_has_passed_our_write() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "12")
    assert s.guard.check("ns/a") is WAIT
    waiting = asyncio.ensure_future(s.guard.wait_fresh("ns/a"))
    await asyncio.sleep(1)
    s.see(thing(11))  # somebody else's write, before ours
    await asyncio.sleep(1)
    assert not waiting.done()
    s.see(thing(13))  # the watch may skip to a later one
    assert await waiting is FRESH
    assert asyncio.get_running_loop().time() == pytest.approx(2)
    assert len(s.guard) == 0


@virtual
async def test_an_echo_that_came_before_the_answer_leaves_nothing_to_wait_for() -> None:
    s = Setting()
    s.see(thing(12))
    s.guard.wrote("ns/a", "u1", "12")
    assert s.guard.check("ns/a") is FRESH
    assert len(s.guard) == 0


@virtual
async def test_versions_are_compared_as_numbers() -> None:
    s = Setting()
    s.see(thing(999))
    s.guard.wrote("ns/a", "u1", "1000")
    assert s.guard.check("ns/a") is WAIT


@virtual
async def test_it_never_waits_for_ever_and_the_bound_counts_from_the_write() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "12")
    await asyncio.sleep(3)
    assert await s.guard.wait_fresh("ns/a") is READ_LIVE
    assert asyncio.get_running_loop().time() == pytest.approx(5, abs=0.01)
    assert await s.guard.wait_fresh("ns/a") is READ_LIVE, "at once, until the cache catches up"
    assert asyncio.get_running_loop().time() == pytest.approx(5, abs=0.01)
    s.see(thing(12))
    assert s.guard.check("ns/a") is FRESH


@virtual
async def test_a_later_write_of_another_reconciler_counts_and_an_earlier_one_does_not() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "14")
    s.guard.wrote("ns/a", "u1", "12")  # its answer came late
    s.see(thing(12))
    assert s.guard.check("ns/a") is WAIT
    s.see(thing(14))
    assert s.guard.check("ns/a") is FRESH


@virtual
async def test_a_deletion_clears() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "12")
    s.see(None)
    assert s.guard.check("ns/a") is FRESH
    assert len(s.guard) == 0


@virtual
async def test_a_re_creation_clears() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "12")
    s.see(thing(15, "u2"))
    assert s.guard.check("ns/a") is FRESH


@virtual
async def test_the_deletion_of_the_predecessor_does_not_clear_a_write_to_its_successor() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u2", "15")  # we read the new object live and wrote to it
    s.see(None)  # now the cache hears of the old one's end
    assert s.guard.check("ns/a") is WAIT
    s.see(thing(14, "u2"))
    assert s.guard.check("ns/a") is WAIT
    s.see(thing(15, "u2"))
    assert s.guard.check("ns/a") is FRESH


@virtual
async def test_an_object_that_came_and_went_between_two_lists_is_settled_by_the_list() -> None:
    s = Setting()
    s.guard.wrote("ns/a", "u1", "12")  # created; deleted by somebody; no event ever comes
    assert s.guard.check("ns/a") is WAIT
    s.list_version = 20
    assert s.guard.check("ns/a") is FRESH
    assert len(s.guard) == 0


@virtual
async def test_our_deletion_is_waited_for() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.deleted("ns/a", "u1")
    s.guard.wrote("ns/a", "u1", "11")  # a late answer does not make it forget the deletion
    s.see(thing(11))
    assert s.guard.check("ns/a") is WAIT
    s.see(None)
    assert s.guard.check("ns/a") is FRESH


@virtual
async def test_a_deletion_is_seen_when_the_object_is_doomed_or_replaced() -> None:
    for after in (thing(11, doomed=True), thing(12, "u2")):
        s = Setting()
        s.see(thing(10))
        s.guard.deleted("ns/a", "u1")
        s.see(after)
        assert s.guard.check("ns/a") is FRESH


@virtual
async def test_several_waiters_are_all_told() -> None:
    s = Setting()
    s.see(thing(10))
    s.guard.wrote("ns/a", "u1", "11")
    waiting = [asyncio.ensure_future(s.guard.wait_fresh("ns/a")) for _ in range(3)]
    cancelled = asyncio.ensure_future(s.guard.wait_fresh("ns/a"))
    await asyncio.sleep(1)
    cancelled.cancel()
    await asyncio.sleep(0)
    s.see(thing(11))
    assert await asyncio.gather(*waiting) == [FRESH] * 3
    assert s.guard._waiters == {}


@pytest.mark.parametrize(
    ("text", "number"), [("12", 12), ("", 0), ("0", 0), ("-1", 0), ("x", 0), ("1.5", 0)]
)
def test_a_version_that_is_no_number_means_nothing(text: str, number: int) -> None:
    assert parse_version(text) == number
