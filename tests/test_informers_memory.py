"""The collector is off while caches fill, and does not walk them afterwards."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from datetime import timedelta

import pytest

from llmkube.informers.informer import NotSynced
from llmkube.informers.memory import freeze_after_sync
from tests.support.virtualtime import virtual


@pytest.fixture(autouse=True)
def thaw() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


@virtual
async def test_what_the_sync_brought_is_frozen() -> None:
    cache: list[list[int]] = []

    async def sync() -> None:
        await asyncio.sleep(1)
        assert not gc.isenabled()
        cache.extend([n] for n in range(10_000))

    before = gc.get_freeze_count()
    await freeze_after_sync([sync])
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 10_000
    assert len(gc.get_objects()) < 10_000


@virtual
async def test_it_does_not_wait_for_ever_for_what_does_not_come() -> None:
    never = asyncio.Event()

    async def fails() -> None:
        raise NotSynced("forbidden")

    async def hangs() -> None:
        await never.wait()

    await freeze_after_sync([fails, hangs], limit=timedelta(seconds=60))
    assert asyncio.get_running_loop().time() == pytest.approx(60)
    assert gc.isenabled()


@virtual
async def test_a_stop_meanwhile_switches_the_collector_on_again() -> None:
    task = asyncio.ensure_future(freeze_after_sync([asyncio.Event().wait]))  # type: ignore[list-item]
    await asyncio.sleep(1)
    assert not gc.isenabled()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert gc.isenabled()
