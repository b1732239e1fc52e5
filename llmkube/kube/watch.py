"""A watch stream: raw bytes with an inactivity limit, and reads gathered into batches.

A dead peer enforces no server-side timeout, so the client must notice silence itself; with
bookmarks requested an open watch says something about once a minute. Splitting lines and reading
events is the reflector's work (`llmkube.informers`).
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from llmkube.clock import ZERO
from llmkube.kube.connection import Connection, Disconnected
from llmkube.kube.errors import Unavailable
from llmkube.kube.http1 import BadAnswer

BURST = 32 * 1024
"""Reads of this size or more are a backlog, which is read on without pauses."""


class WatchStream:
    """The body of one watch.

    With `coalesce` the socket is paused that long after each small read, and then everything that
    has gathered is taken: nearly all of an event's cost is the waking up. A slow reader slows the
    server down, and does not fill our memory.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        inactivity_timeout: timedelta,
        coalesce: timedelta = ZERO,
    ) -> None:
        self._connection = connection
        self._inactivity = inactivity_timeout.total_seconds()
        self._coalesce = coalesce.total_seconds()
        self._resume_at: float | None = None

    async def read(self) -> bytes:
        """The next bytes, b"" at the end of the stream.

        Raises Unavailable when the stream breaks or is silent beyond the inactivity timeout.
        """
        try:
            async with asyncio.timeout(self._inactivity):
                if self._resume_at is not None:
                    await self._gather(self._resume_at)
                data = await self._connection.read()
        except TimeoutError as error:
            raise Unavailable(f"the watch was silent for {self._inactivity:g} s") from error
        except (Disconnected, BadAnswer) as error:
            raise Unavailable(f"the watch broke ({error})") from error
        if self._coalesce and 0 < len(data) < BURST:
            self._connection.pause()
            self._resume_at = asyncio.get_running_loop().time() + self._coalesce
        return data

    async def _gather(self, until: float) -> None:
        self._resume_at = None
        pause = until - asyncio.get_running_loop().time()
        if pause > 0:
            await asyncio.sleep(pause)
