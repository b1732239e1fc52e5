"""Running a coroutine beside a test, and seeing what becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Run the coroutines while the block runs, then cancel them.

    If one of them failed, its error is raised at the end of the block (unless the block raised).
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
