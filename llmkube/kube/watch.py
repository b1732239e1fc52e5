"""A watch stream: raw bytes with an inactivity limit, and reads gathered into batches.

A dead peer enforces no server-side timeout, so the client must notice silence itself; with
bookmarks requested an open watch says something about once a minute. Splitting lines and reading
events is the reflector's work (`llmkube.informers`).
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

import aiohttp

from llmkube.clock import ZERO
from llmkube.kube.errors import Unavailable

BURST = 32 * 1024
"""Reads of this size or more are a backlog, which is read on without pauses."""


class WatchStream:
    """The body of one watch.

    With `coalesce` the transport is paused that long after each small read and then takes
    everything that has gathered: nearly all of an event's cost is the waking up. Nothing is read
    while nobody awaits `read`, so a slow reader slows the server down, not our memory up.
    """

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        *,
        inactivity_timeout: timedelta,
        coalesce: timedelta = ZERO,
    ) -> None:
        self._response = response
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
                    await self._gather()
                data = await self._response.content.readany()
        except TimeoutError as error:
            raise Unavailable(f"the watch was silent for {self._inactivity:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the watch broke ({type(error).__name__})") from error
        if self._coalesce and 0 < len(data) < BURST:
            self._pause()
        return data

    def _pause(self) -> None:
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.pause_reading()
            self._resume_at = asyncio.get_running_loop().time() + self._coalesce

    async def _gather(self) -> None:
        assert self._resume_at is not None
        pause = self._resume_at - asyncio.get_running_loop().time()
        if pause > 0:
            await asyncio.sleep(pause)
        self._resume_at = None
        connection = self._response.connection
        if connection is not None and connection.transport is not None:
            connection.transport.resume_reading()
