"""Requests to the API server: bounded in time, authenticated, their failures classified.

`Transport.request` sends one call and returns the answer's bytes; `Transport.stream` opens a
watch. It promises: every failure is a class of `llmkube.kube.errors`; no call outlives its
timeout; a 401 is tried once more with re-read credentials; an idempotent call that met a
connection the server had already closed is sent once more, a POST never. There are no other
retries here, and redirects are not followed. Above: `llmkube.kube.client`, the verbs. Below:
`connection` and `http1`; docs/decisions/0001-transport.md says why these are our own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime

import msgspec

from llmkube.clock import ZERO, Clock
from llmkube.kube.connection import Connection, Disconnected, Pool, connect
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ApiError, Unauthorized, Unavailable, from_status
from llmkube.kube.http1 import BadAnswer, Head, decoded
from llmkube.kube.login import Login, Logins
from llmkube.kube.runlimit import RunLimit
from llmkube.metrics import RestMetrics

JSON = "application/json"
ERROR_BODY_LIMIT = 64 * 1024
LATE_ANSWER = timedelta(seconds=1)
"""What is quick takes milliseconds; an API server that needs longer hangs."""

PATIENCE = timedelta(milliseconds=20)
"""Answers that may wait are read together at each beat of this: to wake up for each of them costs
more than all the rest that is done about it."""

_NETWORK_ERRORS = (Disconnected, BadAnswer, OSError)


class Call(msgspec.Struct, frozen=True, gc=False):
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
    patient: bool = False
    """It must be sent now, but nobody waits for the answer, which may lie for `PATIENCE`."""

    @property
    def quick(self) -> bool:
        """Whether nothing but the API server itself can make this take long: no webhook (they
        mostly mind what is created), no long list."""
        return self.method in ("GET", "PUT") and not self.compressed


Gate = Callable[[], None]
LateListener = Callable[[timedelta, timedelta], None]
"""Is told when something was asked, and when that was answered or given up (both monotonic)."""


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
        self._limit = RunLimit(request_timeout)
        self._logins = Logins(access, clock)
        self._pool = Pool()
        self.late_listeners: list[LateListener] = []

    def close(self) -> None:
        """Cut the idle connections."""
        self._pool.close()

    @property
    def access(self) -> Access:
        """The access in force."""
        return self._logins.latest.access

    async def request(self, call: Call, gate: Gate | None = None) -> bytes:
        """Send a call and return the body of its 2xx answer. Raises ApiError.

        `gate` is called right before each time the call is sent (connecting may take a while
        before that), and may raise.
        """
        asked = self._clock.monotonic()
        try:
            with self._limit:
                return await self._attempts(call, gate)
        except TimeoutError as error:
            raise self._unanswered(call) from error
        finally:
            self._note_late(call, asked)

    def _note_late(self, call: Call, asked: timedelta) -> None:
        if call.quick and (now := self._clock.monotonic()) - asked > LATE_ANSWER:
            for listener in self.late_listeners:
                listener(asked, now)

    async def _attempts(self, call: Call, gate: Gate | None) -> bytes:
        login, fresh = await self._logins.current(), False
        for last in (False, True):
            try:
                return await self._send(call, login, gate, fresh=fresh)
            except Unauthorized:
                newer = None if last else await self._logins.after_rejection(login)
                if newer is None:
                    raise
                login = newer
                self._repeating(call, 401)
            except Disconnected as error:
                if last or not (error.stale and call.idempotent):
                    raise self._failed(call, error) from error
                fresh = True
                self._repeating(call, None)
            except _NETWORK_ERRORS as error:
                raise self._failed(call, error) from error
        raise AssertionError("unreachable")

    async def _send(self, call: Call, login: Login, gate: Gate | None, *, fresh: bool) -> bytes:
        started = self._clock.boottime()
        request = self._render(call, login)
        patience = PATIENCE if call.patient else ZERO
        head, body = await self._pool.exchange(
            login.origin, request, fresh=fresh, gate=gate, patience=patience
        )
        self._observe(call, head.status, started)
        body = decoded(head, body)
        if 200 <= head.status < 300:
            return body
        raise self._refused(head, body)

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Connection]:
        """Open a long answer on a connection of its own, which is cut at the end.

        Raises ApiError. The request timeout bounds the time until the headers; the caller bounds
        each `Connection.read`.
        """
        login = await self._logins.current()
        try:
            connection = await self._open(call, login)
        except Unauthorized:
            newer = await self._logins.after_rejection(login)
            if newer is None:
                raise
            connection = await self._open(call, newer)
        try:
            yield connection
        finally:
            connection.abort()

    async def _open(self, call: Call, login: Login) -> Connection:
        started = self._clock.boottime()
        connection = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await connect(login.origin)
                head = await connection.open(self._render(call, login))
                self._observe(call, head.status, started)
                if head.status == 200:
                    opened, connection = connection, None
                    return opened
                body = await _read_some(connection)
        except TimeoutError as error:
            raise self._unanswered(call) from error
        except _NETWORK_ERRORS as error:
            raise self._failed(call, error) from error
        finally:
            if connection is not None:
                connection.abort()
        raise self._refused(head, body)

    def _render(self, call: Call, login: Login) -> bytes:
        encoding = "gzip" if call.compressed else "identity"
        head = (
            f"{call.method} {login.base_path}{call.target} HTTP/1.1\r\n{login.headers}"
            f"User-Agent: {self._user_agent}\r\nAccept: {call.accept}\r\n"
            f"Accept-Encoding: {encoding}\r\n"
        )
        if call.body is None:
            return f"{head}\r\n".encode()
        length = f"Content-Type: {call.content_type}\r\nContent-Length: {len(call.body)}\r\n\r\n"
        return (head + length).encode() + call.body

    def _observe(self, call: Call, status: int, started: timedelta) -> None:
        if self._metrics is not None:
            self._metrics.answered(call.method, status, self._clock.boottime() - started)

    def _repeating(self, call: Call, status: int | None) -> None:
        if self._metrics is not None:
            self._metrics.repeated(call.method, status)

    def _unanswered(self, call: Call) -> ApiError:
        return self._failed(call, f"no answer within {self._timeout:g} s")

    def _failed(self, call: Call, cause: Exception | str) -> ApiError:
        if self._metrics is not None:
            self._metrics.failed(call.method)
        return Unavailable(f"{self.access.server}: {_explain(cause)}")

    def _refused(self, head: Head, body: bytes) -> ApiError:
        if 300 <= head.status < 400:
            return Unavailable(
                f"{self.access.server} answers with a redirect: this is not the URL of an API "
                "server",
                status=head.status,
            )
        retry_after = self._retry_after(head.header("retry-after") or "")
        return from_status(head.status, body[:ERROR_BODY_LIMIT], retry_after)

    def _retry_after(self, text: str) -> timedelta | None:
        if text.isascii() and text.isdigit():
            return timedelta(seconds=min(int(text[:9]), 86_400))
        try:
            instant = parsedate_to_datetime(text)
        except (ValueError, TypeError, IndexError):
            return None
        if instant.tzinfo is None:
            instant = instant.replace(tzinfo=UTC)
        return min(max(instant - self._clock.now().wall, ZERO), timedelta(days=1))


async def _read_some(connection: Connection) -> bytes:
    """The explanation in an answer that refuses, as far as it is of use."""
    body = b""
    while len(body) < ERROR_BODY_LIMIT and (data := await connection.read()):
        body += data
    return body


def _explain(cause: Exception | str) -> str:
    match cause:
        case str():
            return cause
        case ssl.SSLCertVerificationError():
            return (
                f"its certificate is not trusted ({cause.verify_message}): check the "
                "certificate-authority of the kubeconfig"
            )
        case ssl.SSLError():
            return f"no TLS connection ({cause.reason or type(cause).__name__})"
        case OSError():
            return f"cannot connect ({cause.strerror or cause})"
        case BadAnswer():
            return f"it does not answer in HTTP as an API server does ({cause})"
        case _:
            return f"the connection was lost before the answer was complete ({cause})"
