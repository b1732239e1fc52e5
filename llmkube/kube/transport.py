"""HTTP to the API server: one pooled aiohttp session, bounded in time, errors classified.

`Transport.request` sends one call and returns the answer's bytes; `Transport.stream` opens a
watch. It promises: every failure is a class of `llmkube.kube.errors`; no call outlives its
timeout; a 401 is tried once more with re-read credentials; an idempotent call that met a
connection the server had already closed is sent once more, a POST never. There are no other
retries here. Next: `llmkube.kube.client`, the verbs on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from typing import Self

import aiohttp
from yarl import URL

from llmkube.clock import ZERO, Clock
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ApiError, Unauthorized, Unavailable, from_status
from llmkube.kube.login import Login, Logins
from llmkube.metrics import RestMetrics

JSON = "application/json"
CONNECT_TIMEOUT = timedelta(seconds=10)
KEEP_ALIVE = timedelta(seconds=55)
"""Idle connections are dropped before usual load balancers (60 s) do it without telling."""
ERROR_BODY_LIMIT = 64 * 1024

_NETWORK_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
_STALE = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: everything but the server and the credentials.

    `target` is path and query, percent-encoded. `idempotent`: sending it twice does no more than
    sending it once.
    """

    method: str
    target: str
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    idempotent: bool = True
    compressed: bool = False
    """Ask for gzip: worth it for lists, never for watches."""

    def headers(self) -> dict[str, str]:
        encoding = "gzip" if self.compressed else "identity"
        headers = {"Accept": self.accept, "Accept-Encoding": encoding}
        if self.body is not None:
            headers["Content-Type"] = self.content_type
        return headers


Gate = Callable[[], None]


class Transport:
    """The session; an async context manager. Construction raises ConfigError."""

    def __init__(
        self,
        access: Access,
        *,
        clock: Clock,
        metrics: RestMetrics | None,
        user_agent: str,
        request_timeout: timedelta,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._user_agent = user_agent
        self._timeout = request_timeout.total_seconds()
        self._logins = Logins(access, clock)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # callers are bounded; a full pool would only hide that behind a wait
                keepalive_timeout=KEEP_ALIVE.total_seconds(),
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": self._user_agent},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT.total_seconds()),
            trust_env=False,  # a proxy is part of the Access, looked up once
        )
        # aiohttp would repeat PUT and DELETE itself, past the write gate.
        self._session._retry_connection = False
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def access(self) -> Access:
        """The access in force."""
        return self._logins.latest.access

    async def request(self, call: Call, gate: Gate | None = None) -> bytes:
        """Send a call and return the body of its 2xx answer. Raises ApiError.

        `gate` is called right before each time the call is sent, and may raise.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return await self._attempts(call, gate)
        except TimeoutError as error:
            raise self._failed(call, f"no answer within {self._timeout:g} s") from error

    async def _attempts(self, call: Call, gate: Gate | None) -> bytes:
        login = await self._logins.current()
        for first in (True, False):
            if gate is not None:
                gate()
            try:
                return await self._send(call, login)
            except Unauthorized:
                newer = await self._logins.after_rejection(login) if first else None
                if newer is None:
                    raise
                login = newer
                self._repeating(call, 401)
            except _STALE as error:
                if not (first and call.idempotent) or isinstance(
                    error, aiohttp.ClientConnectorError
                ):
                    raise self._failed(call, error) from error
                self._repeating(call, None)
            except _NETWORK_ERRORS as error:
                raise self._failed(call, error) from error
        raise AssertionError("unreachable")

    async def _send(self, call: Call, login: Login) -> bytes:
        started = self._clock.now().mono
        async with self._open(call, login) as response:
            body = await response.read()
            self._observe(call, response.status, started, len(body))
            if 200 <= response.status < 300:
                return body
            raise self._refused(response, body)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a long answer, and cut its connection at the end. Raises ApiError.

        The request timeout bounds the time until the headers; the caller bounds each read.
        """
        login = await self._logins.current()
        try:
            response = await self._open_stream(call, login)
        except Unauthorized:
            newer = await self._logins.after_rejection(login)
            if newer is None:
                raise
            response = await self._open_stream(call, newer)
        try:
            yield response
        finally:
            _abort(response)

    async def _open_stream(self, call: Call, login: Login) -> aiohttp.ClientResponse:
        started = self._clock.now().mono
        response = None
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._open(call, login)
                self._observe(call, response.status, started, None)
                if response.status == 200:
                    return response
                error = self._refused(response, await response.content.read(ERROR_BODY_LIMIT))
        except _NETWORK_ERRORS as cause:
            error = self._failed(call, cause)
            error.__cause__ = cause
        except BaseException:
            if response is not None:
                _abort(response)
            raise
        if response is not None:
            _abort(response)
        raise error

    def _open(self, call: Call, login: Login) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "the client is used outside its `async with`"
        return self._session.request(
            call.method,
            URL(login.access.server + call.target, encoded=True),
            data=call.body,
            headers={**call.headers(), **login.headers},
            allow_redirects=False,
            ssl=login.ssl_context or True,
            server_hostname=login.access.trust.server_name,
            proxy=login.access.proxy,
        )

    def _observe(self, call: Call, status: int, started: timedelta, received: int | None) -> None:
        if self._metrics is not None:
            elapsed = self._clock.now().mono - started
            sent = len(call.body) if call.body is not None else 0
            self._metrics.answered(call.method, status, elapsed, sent, received)

    def _repeating(self, call: Call, status: int | None) -> None:
        if self._metrics is not None:
            self._metrics.repeated(call.method, status)

    def _failed(self, call: Call, cause: Exception | str) -> ApiError:
        if self._metrics is not None:
            self._metrics.failed(call.method)
        return Unavailable(f"{self.access.server}: {_explain(cause)}")

    def _refused(self, response: aiohttp.ClientResponse, body: bytes) -> ApiError:
        if 300 <= response.status < 400:
            return Unavailable(
                f"{self.access.server} answers with a redirect: this is not the URL of an API "
                "server",
                status=response.status,
            )
        retry_after = self._retry_after(response.headers)
        return from_status(response.status, body[:ERROR_BODY_LIMIT], retry_after)

    def _retry_after(self, headers: Mapping[str, str]) -> timedelta | None:
        text = headers.get("Retry-After", "").strip()
        if text.isascii() and text.isdigit():
            return timedelta(seconds=min(int(text[:9]), 86_400))
        try:
            instant = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError):
            return None
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        return min(max(instant - self._clock.now().wall, ZERO), timedelta(days=1))


def _abort(response: aiohttp.ClientResponse) -> None:
    """Cut the connection: an orderly TLS close would wait for a peer that may be gone."""
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()


def _explain(cause: Exception | str) -> str:
    match cause:
        case str():
            return cause
        case aiohttp.ClientConnectorCertificateError():
            return (
                f"its certificate is not trusted ({cause.certificate_error}): check the "
                "certificate-authority of the kubeconfig"
            )
        case aiohttp.ClientConnectorDNSError():
            return f"the host name cannot be resolved ({cause.os_error})"
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_TIMEOUT.total_seconds():g} s"
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ClientConnectorError():
            return f"cannot connect ({cause.os_error})"
        case aiohttp.ServerDisconnectedError():
            return "the connection was closed before the answer came"
        case _:
            return f"the connection broke ({type(cause).__name__}: {cause})"
