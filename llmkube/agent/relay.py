"""One request through the ingress: the gate, the rules, then the LLM server and back.

Bodies stream both ways with back-pressure: a slow reader on either side holds up the other, and
nothing is kept but a few buffers. A client that goes away takes its request to the LLM server with
it (tokens cost energy). An answer that breaks off in the middle is broken off towards the client,
too, never ended politely. `llmkube.agent.ingress` is the TLS listener in front.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from llmkube.agent.gate import TOKEN_HEADER, Gate
from llmkube.agent.httprules import (
    Refusal,
    Upstream,
    is_ready_probe,
    refuse,
    request_headers,
    response_headers,
    wants_websocket,
)
from llmkube.agent.settings import IngressSettings
from llmkube.agent.websocket import relay_websocket
from llmkube.clock import Clock
from llmkube.log import get_logger

SERVER: Final = "llmkube-agent"
PIECE_BYTES: Final = 64 * 1024
"""At most this much is written at a time: TLS buffers grow to the largest piece they ever met."""
_UPSTREAM_HEADER_LIMIT: Final = 64 * 1024
_AUTOMATIC: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_REFUSAL_LOG_INTERVAL: Final = timedelta(minutes=1)

log = get_logger(__name__)


class Relay:
    """Answers requests; an async context manager that holds the session to the LLM server.

    `on_admitted` is told of each request with a good token, before it is passed on.
    """

    def __init__(
        self,
        upstream: Upstream,
        gate: Gate,
        settings: IngressSettings,
        clock: Clock,
    ) -> None:
        self._upstream = upstream
        self._gate = gate
        self._settings = settings
        self.on_admitted: Callable[[web.BaseRequest], None] = lambda _: None
        self.on_answered: Callable[[int], None] = lambda _: None
        """Told of the status of each answer."""
        self._strangers = _StrangerLog(clock)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """The session to the LLM server, for as long as requests are answered."""
        connector = aiohttp.TCPConnector(
            limit=0,  # the ingress caps its connections
            force_close=True,  # a fresh loopback connection is cheap, and shares no state
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            auto_decompress=False,
            trust_env=False,
            timeout=aiohttp.ClientTimeout(
                total=None,
                connect=self._settings.connect_timeout.total_seconds(),
                sock_read=self._settings.upstream_silence.total_seconds(),
            ),
            read_bufsize=PIECE_BYTES,
            max_line_size=_UPSTREAM_HEADER_LIMIT,
            max_field_size=_UPSTREAM_HEADER_LIMIT,
        ) as session:
            self._session = session
            try:
                yield
            finally:
                self._session = None

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        response = await self._answer(request)
        self.on_answered(response.status)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        target = request.raw_path
        if is_ready_probe(request.method, target):
            return _own_answer(Refusal(200, "ok"))
        if not self._gate.admits(request.headers.getall(TOKEN_HEADER, [])):
            self._strangers.saw(request.remote or "")
            return _own_answer(Refusal(401, f"missing or wrong {TOKEN_HEADER}"))
        self.on_admitted(request)
        refusal = refuse(request.method, target, request.headers)
        if refusal is not None:
            return _own_answer(refusal)
        if self._session is None:
            return _own_answer(Refusal(503, "the agent is stopping"))
        return await self._forward(request, self._session)

    async def _forward(
        self, request: web.BaseRequest, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        headers = request_headers(request.headers, self._upstream, request.remote or "unknown")
        if wants_websocket(request.method, request.headers):
            url = self._upstream.url(request.raw_path, "ws")
            return await relay_websocket(request, session, url, headers)
        exchange = _Exchange(request, self._settings)
        try:
            async with session.request(
                request.method,
                URL(self._upstream.url(request.raw_path), encoded=True),
                headers=headers,
                data=await exchange.body(headers),
                allow_redirects=False,
            ) as answer:
                return await exchange.pass_on(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._broken(request, exchange, error)

    def _broken(
        self, request: web.BaseRequest, exchange: _Exchange, error: Exception
    ) -> web.StreamResponse:
        response = exchange.response
        if response is not None and response.prepared:
            log.info("an answer broke off", why=_explain(error))
            if request.transport is not None:
                request.transport.abort()  # the client must not take the part for the whole
            return response
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            text = f"the LLM server at {self._upstream} does not answer: start it, or correct "
            log.warning("the LLM server does not answer", upstream=str(self._upstream))
            return _own_answer(Refusal(502, text + "the agent's --upstream"))
        status = 504 if isinstance(error, TimeoutError) else 502
        return _own_answer(
            Refusal(status, f"the exchange with the LLM server broke: {_explain(error)}")
        )


class _Exchange:
    """Both bodies of one request."""

    def __init__(self, request: web.BaseRequest, settings: IngressSettings) -> None:
        self._request = request
        self._stall = settings.client_stall.total_seconds()
        self.response: web.StreamResponse | None = None

    async def body(self, headers: CIMultiDict[str]) -> AsyncIterator[bytes] | None:
        """The request's body, if it has one; completes `headers` with its length, if known."""
        length = self._request.headers.get("Content-Length")
        if length is not None:
            headers["Content-Length"] = length
        if not self._request.can_read_body:
            return None
        if "Expect" in self._request.headers:
            await self._request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout(self._stall):
                chunk = await self._request.content.readany()
            if not chunk:
                return
            yield chunk

    async def pass_on(self, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """Stream the upstream's answer to the client."""
        self.response = response = web.StreamResponse(
            status=answer.status, reason=answer.reason, headers=response_headers(answer.headers)
        )
        response.headers.setdefault("Server", SERVER)
        await response.prepare(self._request)
        async for chunk in answer.content.iter_chunked(PIECE_BYTES):
            async with asyncio.timeout(self._stall):
                await response.write(chunk)
        async with asyncio.timeout(self._stall):
            await response.write_eof()
        return response


def _own_answer(answer: Refusal) -> web.Response:
    """Our own words, after which the connection ends: whoever is refused starts anew."""
    response = web.Response(
        status=answer.status,
        text=answer.text + "\n",
        headers={"Server": SERVER, "Cache-Control": "no-store"},
    )
    response.force_close()
    return response


def _explain(error: Exception) -> str:
    return str(error) or type(error).__name__


class _StrangerLog:
    """Says that somebody knocks without the token: at once, then at most once a minute."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._quiet_until = timedelta(0)

    def saw(self, peer: str) -> None:
        self._count += 1
        now = self._clock.monotonic()
        if now < self._quiet_until:
            return
        log.warning("requests without the relay token refused", count=self._count, last_peer=peer)
        self._count = 0
        self._quiet_until = now + _REFUSAL_LOG_INTERVAL
