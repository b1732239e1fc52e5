"""Hundreds of megabytes through the agent's ingress, as a real process, in a few of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.support.agentprocess import client, serving_agent
from tests.support.agents import http_upstream
from tests.support.wait import eventually

MIB = 1024 * 1024
BODY = 300 * MIB
ROOM = 40 * MIB
"""What the process may grow by: interpreter noise and a few buffers per connection."""


async def mirror(request: web.Request) -> web.StreamResponse:
    """Counts what it gets, or sends BODY bytes."""
    if request.method == "POST":
        return web.Response(text=str(await total(request.content)))
    response = web.StreamResponse(headers={"Content-Length": str(BODY)})
    await response.prepare(request)
    async for piece in pieces():
        await response.write(piece)
    return response


async def total(stream: aiohttp.StreamReader) -> int:
    return sum([len(chunk) async for chunk in stream.iter_any()])


async def pieces() -> AsyncIterator[bytes]:
    block = bytes(MIB)
    for _ in range(BODY // MIB):
        yield block


async def upload(session: aiohttp.ClientSession) -> int:
    async with session.post("/", data=pieces()) as answer:
        return int(await answer.text())


async def download(session: aiohttp.ClientSession) -> int:
    async with session.get("/") as answer:
        return await total(answer.content)


async def warm(session: aiohttp.ClientSession) -> None:
    """One small exchange, so that what is loaded on first use is loaded."""
    async with session.post("/", data=b"x" * MIB) as answer:
        assert await answer.text() == str(MIB)


async def test_large_bodies_pass_in_bounded_memory(tmp_path: Path) -> None:
    async with (
        http_upstream(mirror) as upstream,
        serving_agent(tmp_path, upstream) as agent,
        client(agent) as session,
    ):
        await warm(session)
        before = agent.resident_bytes()
        assert await asyncio.gather(upload(session), download(session)) == [BODY, BODY]
        assert agent.resident_bytes() - before < ROOM


@pytest.mark.parametrize("clients", [20])
async def test_clients_that_read_nothing_cost_buffers_only(tmp_path: Path, clients: int) -> None:
    async with (
        http_upstream(mirror) as upstream,
        serving_agent(tmp_path, upstream) as agent,
        client(agent) as session,
        AsyncExitStack() as stack,
    ):
        await warm(session)
        before = agent.resident_bytes()
        for _ in range(clients):
            await stack.enter_async_context(session.get("/"))
        seen = [0]

        async def settled() -> bool:
            seen.append(agent.resident_bytes())
            await asyncio.sleep(0.5)
            return abs(seen[-1] - seen[-2]) < MIB // 4

        await eventually(settled, "its memory settles")
        assert agent.resident_bytes() - before < ROOM
        async with session.post("/", data=b"still here") as answer:
            assert await answer.text() == "10"
