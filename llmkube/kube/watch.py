"""A watch stream: raw bytes with an inactivity limit, and reads gathered into batches.

A dead peer enforces no server-side timeout, so the client must notice silence itself; with
bookmarks requested an open watch says something about once a minute. Splitting lines and reading
events is the reflector's work (`llmkube.informers`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from llmkube.clock import ZERO
from llmkube.kube.connection import Connection, Disconnected
from llmkube.kube.errors import Unavailable
from llmkube.kube.http1 import BadAnswer

BURST = 32 * 1024
"""Reads of this size or more are a backlog, which is read on without pauses."""
_GRAIN = 0.05
"""Seconds by which an event loop may round its clock: whoever measures the silence by another one
shall find it long enough, too."""


Pace = Callable[[], timedelta]
"""For how long what arrives next may lie; asked after each small read."""


def at_once() -> timedelta:
    """The pace of those whose latency matters."""
    return ZERO


class WatchStream:
    """The body of one watch. `close` it when it is no longer read.

    If its `pace` says so, the socket is paused after a small read, and what has gathered is taken
    at the next beat of that period: nearly all of an event's cost is the waking up, and the
    streams of one process wake together. A slow reader slows the server down, and does not fill
    our memory.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        inactivity_timeout: timedelta,
        pace: Pace = at_once,
    ) -> None:
        self._connection = connection
        self._watchdog = _Watchdog(connection, inactivity_timeout.total_seconds())
        self._pace = pace

    async def read(self) -> bytes:
        """The next bytes, b"" at the end of the stream.

        Raises Unavailable when the stream breaks or is silent beyond the inactivity timeout.
        """
        self._watchdog.listen()
        try:
            data = await self._connection.read()
        except (Disconnected, BadAnswer) as error:
            raise Unavailable(self._watchdog.complaint or f"the watch broke ({error})") from error
        finally:
            self._watchdog.relax()
        if 0 < len(data) < BURST and (period := self._pace()):
            self._connection.rest(period)
        return data

    def close(self) -> None:
        """Stop minding the silence."""
        self._watchdog.stop()


class _Watchdog:
    """Cuts a connection that is silent for longer than `limit` seconds while somebody listens.

    It is one timer, armed anew only when it fires: `asyncio.timeout` for every read of a busy
    stream would cost as much as the reading.
    """

    def __init__(self, connection: Connection, limit: float) -> None:
        self._connection = connection
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None
        self._timer: asyncio.TimerHandle
        self.complaint: str | None = None
        """Why the connection was cut, None if it was not."""
        self._look()

    def listen(self) -> None:
        """Somebody waits for the next bytes from now on."""
        self._since = self._loop.time()

    def relax(self) -> None:
        """Nobody waits: silence means nothing."""
        self._since = None

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        silent = 0.0 if self._since is None else self._loop.time() - self._since
        left = self._limit + _GRAIN - silent
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.complaint = f"the watch was silent for {self._limit:g} s"
            self._connection.abort()
