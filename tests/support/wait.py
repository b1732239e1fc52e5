"""Waiting on a condition, with a bound and a sentence that says what did not come true."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    what: str,
    *,
    within: timedelta = timedelta(seconds=30),
    poll: timedelta = timedelta(milliseconds=20),
) -> T:
    """Return the condition's first true value; fail with `what` if none comes within the bound.

    An AssertionError of the condition counts as "not yet", and is shown when time is up.
    """
    last: object = None
    try:
        async with asyncio.timeout(within.total_seconds()):
            while True:
                try:
                    value = condition()
                    result: T = await value if inspect.isawaitable(value) else value
                    if result:
                        return result
                    last = result
                except AssertionError as error:
                    last = error
                await asyncio.sleep(poll.total_seconds())
    except TimeoutError:
        raise AssertionError(f"not within {within}: {what}; last seen: {last!r}") from None
