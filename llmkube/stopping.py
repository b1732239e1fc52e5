"""Work that a stop may cut short: what is waited for while a program starts.

A plugin that logs in may take a minute; whoever stops the program does not want to wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The stop came first."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises. Raises Stopped, with `work` cancelled, if `stop` is set
    before it ends."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Stopped
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.wait({working, stopping})
