"""The HTTP endpoints that kubelet and Prometheus ask: /healthz, /readyz, /metrics.

A check is a function that returns None when all is well, else a sentence that says what is not.
`/healthz` and `/readyz` answer in the form that Kubernetes' own components use. The controller
serves them from a thread (`serving_apart`), because an event loop that is stuck cannot say so
itself: a `LoopPulse` beats in it, and the thread sees the beat fail to come. Metrics are rendered
in a thread, so that a scrape of ten thousand objects does not delay a heartbeat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from llmkube.clock import Clock

if TYPE_CHECKING:  # else where it is needed: a program that serves nothing starts without it
    from aiohttp import web

Check = Callable[[], str | None]
Render = Callable[[], tuple[bytes, str]]
"""Returns the exposition and its content type; called in a thread."""
Route = tuple[str, "Callable[[web.Request], Awaitable[web.Response]]"]
"""A path and what answers a GET of it."""


class BadAddress(ValueError):
    """A bind address that is not HOST:PORT, :PORT or 0."""


@dataclass(frozen=True, slots=True)
class BindAddress:
    """Where to listen. `host` None is every interface; port 0 lets the kernel choose."""

    host: str | None
    port: int

    @classmethod
    def parse(cls, text: str) -> BindAddress | None:
        """Read ":8080", "127.0.0.1:8080" or "[::1]:8080"; "0" and "" mean: do not listen."""
        if text in ("", "0"):
            return None
        host, colon, port = text.rpartition(":")
        if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise BadAddress(f"bind address {text!r}: use HOST:PORT, :PORT, or 0 to switch it off")
        return cls(host.strip("[]") or None, int(port))


@dataclass(slots=True)
class Checks:
    """Named checks of one endpoint."""

    named: dict[str, Check] = field(default_factory=dict)

    def add(self, name: str, check: Check) -> None:
        self.named[name] = check

    def failures(self) -> Mapping[str, str]:
        """The failing checks and what each says."""
        results = {name: check() for name, check in self.named.items()}
        return {name: why for name, why in results.items() if why is not None}

    async def answer(self, request: web.Request) -> web.Response:
        """200 "ok", or 500 with a line for each check."""
        from aiohttp import web

        failing = self.failures()
        if not failing and "verbose" not in request.query:
            return web.Response(text="ok")
        lines = [
            f"[-]{name} failed: {failing[name]}" if name in failing else f"[+]{name} ok"
            for name in self.named
        ]
        return web.Response(text="\n".join(lines) + "\n", status=500 if failing else 200)


class LoopPulse:
    """Beats in the event loop, so that other threads can tell whether it is stuck.

    `limit` is how long it may be. Run `beat` as a task of the loop; `complaint` is the check.
    """

    def __init__(self, clock: Clock, limit: timedelta) -> None:
        self._clock = clock
        self._limit = limit
        self._every = min(limit / 10, timedelta(seconds=1))
        self._last = clock.monotonic()

    async def beat(self) -> None:
        """Until cancelled."""
        while True:
            self._last = self._clock.monotonic()
            await asyncio.sleep(self._every.total_seconds())

    def complaint(self) -> str | None:
        """What is wrong. Any thread may ask."""
        # The last beat came up to one pause before the loop got stuck.
        if self._clock.monotonic() - self._last <= self._limit + self._every:
            return None
        return f"the event loop has been stuck for more than {self._limit.total_seconds():g} s"


def metrics_routes(render: Render) -> list[Route]:
    """The route that Prometheus scrapes."""

    async def answer(_request: web.Request) -> web.Response:
        from aiohttp import web

        body, content_type = await asyncio.to_thread(render)
        return web.Response(body=body, headers={"Content-Type": content_type})

    return [("/metrics", answer)]


def health_routes(live: Checks, ready: Checks) -> list[Route]:
    """The routes that a kubelet probes."""
    return [("/healthz", live.answer), ("/readyz", ready.answer)]


@asynccontextmanager
async def serving(address: BindAddress | None, routes: list[Route]) -> AsyncIterator[int]:
    """Serve `routes` while the block runs; yields the port (0 if not listening)."""
    if address is None:
        yield 0
        return
    from aiohttp import web

    app = web.Application()
    app.add_routes([web.get(path, answer) for path, answer in routes])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=90)
    await runner.setup()
    try:
        site = web.TCPSite(runner, address.host, address.port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_apart(address: BindAddress | None, routes: list[Route]) -> AsyncIterator[int]:
    """As `serving`, from a thread of its own: it answers even while the caller's loop is stuck.

    What the routes call must be safe to call from another thread.
    """
    if address is None:
        yield 0
        return
    with _loop_in_a_thread() as run_there:
        server = serving(address, routes)
        port = await run_there(server.__aenter__())
        try:
            yield port
        finally:
            await run_there(server.__aexit__(None, None, None))


@contextmanager
def _loop_in_a_thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]]:
    """Gives a function that runs a coroutine in a thread's event loop, to be awaited here."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="health", daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
