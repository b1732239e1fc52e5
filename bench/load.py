"""The bench's own client: makes objects, pushes heartbeats at a steady rate, watches results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, takewhile
from typing import Any, Self

import msgspec

from bench.report import Figure
from bench.subject import Subject
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import Resource

PARALLEL = 32


async def for_each(items: Iterable[Any], work: Callable[[Any], Awaitable[object]]) -> float:
    """Do `work` on each item, `PARALLEL` at a time; returns the seconds it took."""
    queue = iter(items)
    began = time.perf_counter()

    async def worker() -> None:
        for item in queue:
            await work(item)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(PARALLEL):
            tasks.create_task(worker())
    return time.perf_counter() - began


async def at_rate(
    items: Sequence[Any],
    work: Callable[[Any], Awaitable[object]],
    *,
    rate: float,
    seconds: float,
) -> int:
    """Do `work` on the items in turn, `rate` a second, never catching up; returns how many."""
    began = time.perf_counter()
    done = 0
    slots = asyncio.Semaphore(PARALLEL)

    async def one(item: Any) -> None:
        nonlocal done
        try:
            await work(item)
            done += 1
        finally:
            slots.release()

    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            await slots.acquire()
            tasks.create_task(one(items[number % len(items)]))
    return done


async def flat_out(
    items: Sequence[Any], work: Callable[[Any], Awaitable[object]], *, seconds: float
) -> int:
    """Do `work` on the items in turn, `PARALLEL` at once, as fast as it goes; returns how many."""
    ends, done = time.perf_counter() + seconds, 0

    async def counted(item: Any) -> None:
        nonlocal done
        await work(item)
        done += 1

    await for_each(takewhile(lambda _: time.perf_counter() < ends, cycle(items)), counted)
    return done


async def in_turn(
    part: str,
    objects: str,
    subjects: Iterable[Subject],
    measure: Callable[[Subject, Sheet], Awaitable[None]],
    reset: Callable[[], Awaitable[None]],
) -> list[Figure]:
    """The figures of each subject, on `objects` ("2000 sites") that are `reset` after it.

    A subject that does not get ready within a limit is told, not waited for, and keeps the figures
    that it had until then; if it is ours, TimeoutError is raised.
    """
    figures: list[Figure] = []
    for subject in subjects:
        sheet = Sheet(part, objects, subject)
        try:
            await measure(subject, sheet)
        except* TimeoutError:
            if sheet.ours:
                raise
            sheet.add("did not come to an end", float("inf"), "s")
        figures += sheet.figures
        await reset()
    return figures


@dataclass(frozen=True, slots=True)
class Sheet:
    """The figures of one subject, noted as they are found."""

    part: str
    objects: str
    subject: Subject
    figures: list[Figure] = field(default_factory=list)

    @property
    def ours(self) -> bool:
        return self.subject.name == "llmkube"

    def add(self, name: str, value: float, unit: str, target: float | None = None) -> None:
        """Note a figure; the target is ours, and not a peer's."""
        name = f"{name}, {self.objects}"
        wanted = target if self.ours else None
        self.figures.append(Figure(self.part, name, self.subject.name, value, unit, wanted))


class _Meta(msgspec.Struct):
    name: str = ""


class _Object(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    status: dict[str, Any] = msgspec.field(default_factory=dict)


class _Event(msgspec.Struct):
    type: str
    object: _Object


_decode = msgspec.json.Decoder(_Event).decode
_decode_list = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(slots=True)
class Watcher:
    """When each object's interesting value last changed, as seen by a watch of the bench's own."""

    client: KubeClient
    resource: Resource
    value_of: Callable[[dict[str, Any]], str | None]
    namespace: str | None = None
    values: dict[str, str | None] = field(default_factory=dict)
    changed: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds of the last change of each object's value, by name."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two changes of any field of one object."""
    _touched: dict[str, float] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[Self]:
        """Watch while the block runs, from the beginning of the world."""
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self._run())
            yield self
            task.cancel()

    async def _run(self) -> None:
        while True:  # an API server ends watches when it likes, soon after a CRD is new
            await self._watch(await self._list())

    async def _watch(self, version: str) -> None:
        async with self.client.watch(
            self.resource, self.namespace, resource_version=version
        ) as stream:
            rest = b""
            while chunk := await stream.read():
                *lines, rest = (rest + chunk).split(b"\n")
                seen = time.time()
                for line in lines:
                    self._see(_decode(line), seen)
                self._news.set()

    async def _list(self) -> str:
        page = _decode_list(await self.client.list_page(self.resource, self.namespace, limit=0))
        seen = time.time()
        for item in page.get("items") or ():
            self._note(item["metadata"]["name"], item.get("status") or {}, seen)
        self._news.set()
        return str(page["metadata"]["resourceVersion"])

    def _see(self, event: _Event, seen: float) -> None:
        if event.type not in ("ADDED", "MODIFIED"):
            return
        name = event.object.metadata.name
        if name in self._touched:
            self.gaps.append(seen - self._touched[name])
        self._touched[name] = seen
        self._note(name, event.object.status, seen)

    def _note(self, name: str, status: dict[str, Any], seen: float) -> None:
        value = self.value_of(status)
        if self.values.get(name) != value:
            self.values[name], self.changed[name] = value, seen

    def all(self, names: Iterable[str], value: str) -> bool:
        """Whether each of these objects has that value."""
        return all(self.values.get(name) == value for name in names)

    async def until(self, condition: Callable[[], bool], *, seconds: float) -> None:
        """Wait until `condition` holds; raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():
                self._news.clear()
                await self._news.wait()
