"""A proxy in front of the real API server that misbehaves on demand.

It terminates TLS with its own authority, records every request, and plays faults on those that
match a pattern. A pattern is a regular expression that is searched in "METHOD path?query", for
example `WATCHES`, or "GET .*/leases":

    async with FaultProxy.start(control_plane) as proxy:
        client = KubeClient(await load_access(proxy.admin_kubeconfig), ...)
        with proxy.playing(Answer(429, headers={"Retry-After": "1"}), WATCHES):
            ...
        proxy.cut(WATCHES)          # what is open now breaks
        assert proxy.count(WATCHES) < 10

`admin_kubeconfig` is a cluster-admin; for another identity give `server` and `ca_pem` to
`ControlPlane.service_account_kubeconfig`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from devcluster import pki
from devcluster.controlplane import ControlPlane
from tests.support.http1 import Head, chunk, read_body, read_head

WATCHES = r"^GET .*[?&]watch=(1|true)"
LISTS = r"^GET (?!.*[?&]watch=)"
WRITES = r"^(POST|PUT|PATCH|DELETE) "
EVERYTHING = ""

_ADMIN = "Bearer fault-proxy-admin"
_LIMIT = 2**26  # of a line or head; bodies have none


# Faults -----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Answer:
    """The proxy answers itself; the API server never sees the request."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drop:
    """The request is read, and the connection breaks (RST) without an answer."""


@dataclass(frozen=True, slots=True)
class Swallow:
    """Half-open: the request is read, and nothing ever comes back, not even a FIN."""


@dataclass(frozen=True, slots=True)
class EmptyStream:
    """200, and an orderly end at once."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The answer comes in pieces of `size` bytes, one each `every`."""

    size: int
    every: timedelta


@dataclass(frozen=True, slots=True)
class Preface:
    """Something is put in front of the real answer's body."""

    data: bytes


@dataclass(frozen=True, slots=True)
class LoseAnswer:
    """The API server acts on the request, and the connection breaks before the answer."""


Fault = Answer | Drop | Swallow | EmptyStream | Slow | Preface | LoseAnswer


def status_body(code: int, reason: str, message: str = "made up by the fault proxy") -> bytes:
    """A metav1.Status as the API server would send it."""
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return json.dumps(status | {"code": code, "reason": reason, "message": message}).encode()


def event_line(kind: str, obj: Any) -> bytes:
    """One line of a watch stream."""
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


EXPIRED = Answer(410, status_body(410, "Expired"))
EXPIRED_LINE = event_line("ERROR", json.loads(status_body(410, "Expired")))


# The proxy --------------------------------------------------------------------------------------
@dataclass(slots=True)
class Request:
    """One request that came in. `status` is what the client was answered, 0 if nothing yet."""

    method: str
    target: str
    at: float
    accept: str = ""
    status: int = 0

    @property
    def text(self) -> str:
        return f"{self.method} {self.target}"


@dataclass(eq=False, slots=True)
class _Exchange:
    """A request whose answer is under way."""

    request: Request
    writer: asyncio.StreamWriter
    flowing: asyncio.Event
    streaming: bool = False


class FaultProxy:
    """See the module. Create it with `FaultProxy.start`."""

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.requests: list[Request] = []
        self._cluster = cluster
        self._folder = folder
        self._faults: list[tuple[re.Pattern[str], Fault]] = []
        self._frozen: list[re.Pattern[str]] = []
        self._exchanges: set[_Exchange] = set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._authority = pki.Authority("fault-proxy")
        self._port = 0

    @staticmethod
    @asynccontextmanager
    async def start(cluster: ControlPlane) -> AsyncIterator[FaultProxy]:
        with tempfile.TemporaryDirectory(prefix="faultproxy-") as folder:
            proxy = FaultProxy(cluster, Path(folder))
            server = await asyncio.start_server(
                proxy._serve, "127.0.0.1", 0, ssl=proxy._server_tls(), limit=_LIMIT
            )
            proxy._port = server.sockets[0].getsockname()[1]
            proxy._write_kubeconfig()
            try:
                yield proxy
            finally:
                server.close()
                proxy.cut_connections()
                await asyncio.sleep(0)

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    @property
    def ca_pem(self) -> bytes:
        return self._authority.pem

    @property
    def admin_kubeconfig(self) -> Path:
        return self._folder / "admin.kubeconfig"

    # Faults -------------------------------------------------------------------------------------

    @contextmanager
    def playing(self, fault: Fault, pattern: str = EVERYTHING) -> Iterator[None]:
        """Play the fault on every matching request that comes in within the block."""
        entry = (re.compile(pattern), fault)
        self._faults.append(entry)
        try:
            yield
        finally:
            self._faults.remove(entry)

    @contextmanager
    def frozen(self, pattern: str = EVERYTHING) -> Iterator[None]:
        """Half-open: what is open, and what is opened, delivers nothing more within the block."""
        frozen = re.compile(pattern)
        self._frozen.append(frozen)
        self._set_flow()
        try:
            yield
        finally:
            self._frozen.remove(frozen)
            self._set_flow()

    def cut(self, pattern: str = EVERYTHING) -> int:
        """Break the connections of the matching requests under way (RST); return how many."""
        found = self._open(pattern)
        for exchange in found:
            exchange.writer.transport.abort()
        return len(found)

    def cut_connections(self) -> None:
        """Break every connection, idle ones included."""
        for writer in list(self._connections):
            writer.transport.abort()

    def inject(self, data: bytes, pattern: str = WATCHES) -> int:
        """Put bytes into the matching streams that are open now; return into how many."""
        found = [exchange for exchange in self._open(pattern) if exchange.streaming]
        for exchange in found:
            exchange.writer.write(chunk(data))
        return len(found)

    # Counting -----------------------------------------------------------------------------------

    def count(self, pattern: str = EVERYTHING) -> int:
        """Matching requests since the start, or since `forget`."""
        return sum(1 for request in self.requests if re.search(pattern, request.text))

    def open_count(self, pattern: str = EVERYTHING) -> int:
        """Matching requests whose answer is under way."""
        return len(self._open(pattern))

    def forget(self) -> None:
        """Start counting anew."""
        self.requests.clear()

    def _open(self, pattern: str) -> list[_Exchange]:
        return [e for e in self._exchanges if re.search(pattern, e.request.text)]

    # Serving ------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = _Upstream(self._cluster)
        closed = asyncio.ensure_future(writer.wait_closed())
        self._connections.add(writer)
        try:
            while (head := await read_head(reader)) is not None:
                body = b"".join([piece async for piece in read_body(reader, head)])
                method, target, _ = head.start.split(" ", 2)
                at, accept = asyncio.get_running_loop().time(), head.get("accept") or ""
                request = Request(method, target, at, accept)
                self.requests.append(request)
                exchange = _Exchange(request, writer, asyncio.Event())
                self._exchanges.add(exchange)
                self._set_flow()
                try:
                    await _unless(closed, self._exchange(exchange, head, body, upstream))
                finally:
                    self._exchanges.discard(exchange)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._connections.discard(writer)
            upstream.close()
            writer.close()
            closed.cancel()
            await asyncio.gather(closed, return_exceptions=True)

    async def _exchange(
        self, exchange: _Exchange, head: Head, body: bytes, upstream: _Upstream
    ) -> None:
        fault = self._fault(exchange.request)
        match fault:
            case Answer(status, content, headers):
                await self._answer(exchange, status, content, headers)
            case EmptyStream():
                await self._answer_empty(exchange)
            case Drop():
                raise ConnectionResetError
            case Swallow():
                await asyncio.Event().wait()
            case _:
                await self._forward(exchange, head, body, upstream, fault)

    def _fault(self, request: Request) -> Fault | None:
        return next((f for p, f in reversed(self._faults) if p.search(request.text)), None)

    def _set_flow(self) -> None:
        for exchange in self._exchanges:
            if any(p.search(exchange.request.text) for p in self._frozen):
                exchange.flowing.clear()
            else:
                exchange.flowing.set()

    async def _answer(
        self, exchange: _Exchange, status: int, body: bytes, headers: Mapping[str, str]
    ) -> None:
        kind = "application/json" if body.startswith(b"{") else "text/plain"
        fixed = (("content-type", kind), ("content-length", str(len(body))))
        head = Head(f"HTTP/1.1 {status} Made up", (*fixed, *headers.items()))
        await exchange.flowing.wait()
        exchange.request.status = status
        exchange.writer.write(head.encode() + body)
        await exchange.writer.drain()

    async def _answer_empty(self, exchange: _Exchange) -> None:
        headers = (("content-type", "application/json"), ("transfer-encoding", "chunked"))
        await exchange.flowing.wait()
        exchange.request.status = 200
        exchange.writer.write(Head("HTTP/1.1 200 OK", headers).encode() + chunk(b""))
        await exchange.writer.drain()

    async def _forward(
        self,
        exchange: _Exchange,
        head: Head,
        body: bytes,
        upstream: _Upstream,
        fault: Fault | None,
    ) -> None:
        answer, reader = await upstream.request(head, body)
        if isinstance(fault, LoseAnswer):
            raise ConnectionResetError
        await exchange.flowing.wait()
        exchange.request.status = answer.status
        writer = exchange.writer
        reframed = answer.without("content-length", "transfer-encoding")
        writer.write(reframed.with_header("transfer-encoding", "chunked").encode())
        exchange.streaming = True
        async with contextlib.aclosing(self._body(answer, reader, fault)) as pieces:
            async for piece in pieces:
                await exchange.flowing.wait()
                writer.write(chunk(piece))
                await writer.drain()
        exchange.streaming = False
        await exchange.flowing.wait()
        writer.write(chunk(b""))
        await writer.drain()

    async def _body(
        self, answer: Head, reader: asyncio.StreamReader, fault: Fault | None
    ) -> AsyncIterator[bytes]:
        if isinstance(fault, Preface):
            yield fault.data
        async for piece in read_body(reader, answer):
            if isinstance(fault, Slow):
                for start in range(0, len(piece), fault.size):
                    await asyncio.sleep(fault.every.total_seconds())
                    yield piece[start : start + fault.size]
            else:
                yield piece

    # Credentials --------------------------------------------------------------------------------

    def _server_tls(self) -> ssl.SSLContext:
        certificate, key = self._authority.issue("127.0.0.1", hosts=["127.0.0.1", "localhost"])
        chain, private = self._folder / "proxy.crt", self._folder / "proxy.key"
        chain.write_bytes(certificate)
        pki.write_private(private, key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(chain, private)
        return context

    def _write_kubeconfig(self) -> None:
        ca = self._folder / "ca.crt"
        ca.write_bytes(self.ca_pem)
        cluster = {"server": self.server, "certificate-authority": str(ca)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": _ADMIN.removeprefix("Bearer ")}}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "admin"}}],
        }
        pki.write_private(self.admin_kubeconfig, json.dumps(document).encode())


async def _unless(closed: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but stop when the client goes away."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, closed}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError("the client is gone")
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Upstream:
    """One connection to the API server for one client connection, opened again when it breaks."""

    def __init__(self, cluster: ControlPlane) -> None:
        self._cluster = cluster
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    async def request(self, head: Head, body: bytes) -> tuple[Head, asyncio.StreamReader]:
        """Send the request; return the answer's head, and where its body comes from."""
        head = head.without("transfer-encoding", "connection")
        if body:
            head = head.with_header("content-length", str(len(body)))
        admin = head.get("authorization") == _ADMIN
        if admin:
            head = head.without("authorization")
        for _ in range(2):  # a kept connection may have been closed meanwhile: once more
            if self._writer is None or self._reader is None:
                await self._connect(admin)
            assert self._writer is not None
            assert self._reader is not None
            self._writer.write(head.encode() + body)
            await self._writer.drain()
            answer = await read_head(self._reader)
            if answer is not None:
                return answer, self._reader
            self.close()
        raise ConnectionResetError("the API server closed the connection")

    async def _connect(self, admin: bool) -> None:
        tls = ssl.create_default_context(cadata=self._cluster.ca_pem.decode())
        if admin:
            folder = self._cluster.folder
            tls.load_cert_chain(folder / "admin.crt", folder / "admin.key")
        host, port = self._cluster.options.address, self._cluster.port
        self._reader, self._writer = await asyncio.open_connection(
            host, port, ssl=tls, limit=_LIMIT
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None
