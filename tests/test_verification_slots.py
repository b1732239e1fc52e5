"""Slots: never more checks than the cap, and nobody starves. Rules first, then at full size."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from llmkube.reconcilers.check_slots import CheckSlots
from tests.support.dialback import second


@dataclass
class World:
    """A cluster as the caches show it: starts appear in it late, and end in it."""

    limit: int
    shown: dict[str, None] = field(default_factory=dict)
    lagging: bool = False
    """The cache does not show the last start yet."""
    told: list[str] = field(default_factory=list)
    last_start: dict[str, timedelta] = field(default_factory=dict)
    starts: int = 0
    slots: CheckSlots = field(init=False)

    def __post_init__(self) -> None:
        self.slots = CheckSlots(self.limit, self, self.told.append)

    def running(self) -> set[str]:
        return set(self.shown)

    def shows(self, key: str, version: str) -> bool:
        return not self.lagging

    def request(self, key: str) -> bool:
        return self.slots.request(key, self.last_start.get(key))

    def start(self, key: str) -> bool:
        """Ask, and start if there is a slot."""
        if not self.request(key):
            return False
        self.starts += 1
        self.last_start[key] = second(self.starts)
        self.slots.started(key, "1")
        self.shown[key] = None
        return True

    def end(self, key: str) -> None:
        del self.shown[key]
        self.slots.look()

    def drain(self) -> list[str]:
        """End checks one at a time, oldest first, and let those who are told start."""
        order: list[str] = []
        while self.shown:
            self.told.clear()
            self.end(next(iter(self.shown)))
            for key in list(self.told):
                assert self.start(key), "whoever is told gets a slot"
                order.append(key)
        return order


def test_there_are_as_many_slots_as_the_limit_says() -> None:
    world = World(limit=2)
    assert [world.start(key) for key in "abc"] == [True, True, False]
    assert (world.slots.in_use(), world.slots.waiting) == (2, 1)


def test_a_slot_is_held_from_the_request_until_the_cache_shows_the_check_and_its_end() -> None:
    world = World(limit=1)
    assert world.request("a")
    assert world.request("a"), "asking again does no harm"
    assert not world.request("b")
    world.lagging = True
    world.slots.started("a", "1")
    assert not world.request("b"), "the cache does not show it yet"
    world.lagging = False
    world.shown["a"] = None
    assert not world.request("b")
    world.end("a")
    assert world.told == ["b"]
    assert world.request("b")


def test_a_start_that_fails_gives_its_slot_to_the_next() -> None:
    world = World(limit=1)
    world.request("a")
    world.request("b")
    world.slots.withdraw("a")
    assert world.told == ["b"]


def test_a_slot_is_free_when_the_pod_is_deleted_not_when_the_result_is_written() -> None:
    world = World(limit=1)
    world.start("a")
    world.request("b")
    world.slots.ending("a")
    world.end("a")
    assert world.told == []
    world.slots.ended("a")
    assert world.told == ["b"]


def test_who_withdraws_does_not_hold_up_the_next() -> None:
    world = World(limit=1)
    world.start("a")
    world.request("b")
    world.request("c")
    world.end("a")
    assert world.told == ["b"]
    world.slots.withdraw("b")  # not due any more
    assert world.told == ["b", "c"]


def test_who_comes_and_goes_while_all_slots_are_taken_leaves_nothing_behind() -> None:
    world = World(limit=1)
    world.start("busy")
    world.request("patient")
    for _ in range(1000):
        world.request("fickle")
        world.slots.withdraw("fickle")
    world.request("fickle")
    assert world.slots.waiting == 2
    assert len(world.slots._line) < 100
    assert world.drain() == ["patient", "fickle"]


def test_macs_without_a_check_come_first_and_then_the_oldest_start() -> None:
    world = World(limit=1)
    world.last_start = {"old": second(-900), "older": second(-1000), "recent": second(-10)}
    world.start("busy")
    for key in ("recent", "old", "older", "new", "newer"):
        world.request(key)
    assert world.drain() == ["new", "newer", "older", "old", "recent"]


def test_a_mac_that_flaps_goes_to_the_end_of_the_line_each_time() -> None:
    world = World(limit=1)
    others = [f"mac-{n}" for n in range(5)]
    world.last_start = {key: second(-100 + n) for n, key in enumerate(others)}
    world.start("flapping")
    for key in others:
        world.request(key)
    served: list[str] = []
    for _ in range(6):
        world.told.clear()
        world.end(next(iter(world.shown)))
        world.slots.withdraw("flapping")  # gone…
        world.request("flapping")  # …and back
        served += [key for key in dict.fromkeys(world.told) if world.start(key)]
    assert served == [*others, "flapping"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["request", "withdraw", "start", "end"]), st.sampled_from("abcdefgh")
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.integers(1, 3))
def test_never_more_than_the_limit_and_no_slot_is_lost(
    steps: list[tuple[str, str]], limit: int
) -> None:
    world = World(limit)
    granted: set[str] = set()
    for action, key in steps:
        if action == "request" and key not in world.shown and world.request(key):
            granted.add(key)
        elif action == "withdraw":
            world.slots.withdraw(key)
            granted.discard(key)
        elif action == "start" and key in granted:
            world.start(key)
            granted.discard(key)
        elif action == "end" and key in world.shown:
            world.end(key)
        assert len(granted | world.running()) <= limit
    for key in granted:
        world.start(key)
    while world.slots.waiting:
        told = list(dict.fromkeys(world.told))
        world.told.clear()
        started = [key for key in told if key not in world.shown and world.start(key)]
        assert started or world.shown, "a slot is free and nobody is told"
        if not started:
            world.end(next(iter(world.shown)))
