"""Keeping the garbage collector from stalling the loop over a big cache.

A full collection visits every tracked object; with ten thousand cached objects that is a stall of
a tenth of a second and more. What is there after the first sync mostly stays, so it is moved out
of the collector's sight.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta

FILLING_LIMIT = timedelta(seconds=60)


async def freeze_after_sync(
    syncs: Iterable[Callable[[], Awaitable[None]]], *, limit: timedelta = FILLING_LIMIT
) -> None:
    """Fill caches with the collector off, then freeze what they hold and switch it on again.

    `syncs` are the informers' `wait_synced`. Those that take longer than `limit` (a missing CRD,
    a forbidden list) are not waited for: their caches fill later, with the collector on. Does not
    raise for them.
    """
    gc.freeze()  # what the imports left: the collection below need not look through it
    gc.disable()
    try:
        waits = [asyncio.ensure_future(sync()) for sync in syncs]
        if waits:
            _, late = await asyncio.wait(waits, timeout=limit.total_seconds())
            for wait in late:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()
