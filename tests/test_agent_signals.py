"""SIGTERM to a real agent with requests in flight: the first waits for them, a second does not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from tests.support.agentprocess import AgentProcess, client, serving_agent
from tests.support.agents import http_upstream
from tests.support.wait import eventually


class Upstream:
    """An LLM server that answers when it is told to, with the size of what it got."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.go_on = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        self.started.set()
        await self.go_on.wait()
        return web.Response(text=str(len(await request.read())))


async def closed(agent: AgentProcess) -> bool:
    """Nobody new gets in."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", agent.port)
    except ConnectionError:
        return True
    writer.transport.abort()
    return False


async def test_a_running_upload_ends_well(tmp_path: Path) -> None:
    upstream, rest = Upstream(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        await rest.wait()
        yield b"x" * 500_000

    async def exchange(session: aiohttp.ClientSession) -> str:
        async with session.post("/", data=pieces()) as answer:
            return await answer.text()

    async with (
        http_upstream(upstream.handle) as url,
        serving_agent(tmp_path, url) as agent,
        client(agent) as session,
        asyncio.TaskGroup() as group,
    ):
        running = group.create_task(exchange(session))
        await upstream.started.wait()
        agent.process.send_signal(signal.SIGTERM)
        await eventually(lambda: closed(agent), "the port is closed")
        upstream.go_on.set()
        rest.set()
        assert await running == "501000"
        async with asyncio.timeout(60):
            assert await agent.process.wait() == 0
    assert "Traceback" not in agent.log.read_text()


async def test_idle_connections_do_not_hold_it_up(tmp_path: Path) -> None:
    upstream = Upstream()
    upstream.go_on.set()
    async with (
        http_upstream(upstream.handle) as url,
        serving_agent(tmp_path, url) as agent,
        client(agent) as session,
    ):
        async with session.get("/") as answer:
            assert await answer.text() == "0"
        _, silent = await asyncio.open_connection("127.0.0.1", agent.port)  # no handshake
        assert await agent.stop() == 0
        silent.transport.abort()
    assert "requests cut off" not in agent.log.read_text()


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    upstream = Upstream()
    async with (
        http_upstream(upstream.handle) as url,
        serving_agent(tmp_path, url) as agent,
        client(agent) as session,
    ):
        running = asyncio.ensure_future(session.get("/"))
        await upstream.started.wait()
        agent.process.send_signal(signal.SIGTERM)
        await eventually(lambda: closed(agent), "the port is closed")
        assert agent.process.returncode is None
        assert await agent.stop() == 130
        await asyncio.gather(running, return_exceptions=True)
    assert "agent stopped" not in agent.log.read_text()
    assert "Traceback" not in agent.log.read_text()
