"""The agent's parts under test: an ingress in this process, and odd LLM servers behind it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import aiohttp
from aiohttp import web

from llmkube.agent.gate import Gate, TokenGate
from llmkube.agent.httprules import Upstream
from llmkube.agent.identity import Identity, certificate_for, open_identity
from llmkube.agent.ingress import Ingress, tls_context
from llmkube.agent.relay import Relay
from llmkube.agent.settings import IngressSettings
from llmkube.agent.statedir import StateDir
from llmkube.clock import SystemClock
from tests.support.ports import free_port

UID = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
TOKEN = "a relay token of a test, long enough"
LOOPBACK = IPv4Address("127.0.0.1")


@dataclass
class RunningIngress:
    """An ingress that serves, and what a test needs to talk to it."""

    port: int
    identity: Identity
    state: StateDir
    ingress: Ingress
    token_file: Path

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def use(self, uid: str) -> bytes:
        """Serve a certificate naming `uid`; returns its DER."""
        certificate = certificate_for(self.state, self.identity, uid, SystemClock().now().wall)
        self.ingress.use(tls_context(certificate, self.identity.path))
        return certificate.der

    async def connect(
        self, context: ssl.SSLContext | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw TLS connection."""
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context or trusting_context()
        )

    async def ask(self, raw: bytes) -> bytes:
        """Send raw bytes and read until the ingress closes."""
        reader, writer = await self.connect()
        try:
            writer.write(raw)
            async with asyncio.timeout(30):
                return await reader.read()
        finally:
            writer.transport.abort()

    @asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A client that presents the relay token."""
        async with aiohttp.ClientSession(
            self.url,
            connector=aiohttp.TCPConnector(ssl=trusting_context()),
            headers={"X-LLMKube-Relay-Token": TOKEN},
            auto_decompress=False,
        ) as session:
            yield session


def trusting_context() -> ssl.SSLContext:
    """A client's context that takes any certificate: who serves is not what is tested."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@asynccontextmanager
async def running_ingress(
    folder: Path,
    upstream: str,
    settings: IngressSettings | None = None,
    gate: Gate | None = None,
) -> AsyncIterator[RunningIngress]:
    """An ingress in this process, with the relay token TOKEN unless a gate is given."""
    settings = settings or IngressSettings()
    token_file = folder / "relay-token"
    token_file.write_text(TOKEN + "\n")
    token_file.chmod(0o600)
    port = free_port()
    with StateDir.open(folder / "state") as state:
        relay = Relay(
            Upstream.parse(upstream), gate or TokenGate(token_file), settings, SystemClock()
        )
        ingress = Ingress(port, (LOOPBACK,), relay, settings)
        running = RunningIngress(port, open_identity(state), state, ingress, token_file)
        running.use(UID)
        task = asyncio.create_task(ingress.run())
        try:
            await listening(port)
            yield running
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def listening(port: int) -> None:
    """Until something accepts connections on the port."""
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.transport.abort()
                return


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_upstream(handler: Handler) -> AsyncIterator[str]:
    """A well-behaved HTTP server with one handler for everything; yields its URL."""
    app = web.Application(client_max_size=2**40)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(
        app, auto_decompress=False, handler_cancellation=True, shutdown_timeout=0.1
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_upstream(conversation: Conversation) -> AsyncIterator[str]:
    """A server that speaks bytes; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await conversation(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
