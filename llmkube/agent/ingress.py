"""The TLS listener: what the cluster's dial-back verifies is what serves.

TLS 1.3 only, one certificate, swapped between two connections when the MetalNode's UID changes,
without ever closing the listener. Strangers cannot wear it out: handshakes and first requests have
deadlines, connections a cap, and at the cap the longest-waiting stranger makes room. HTTP is
`llmkube.agent.relay`'s.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final

from aiohttp import web

from llmkube.agent.identity import IngressCertificate
from llmkube.agent.relay import PIECE_BYTES, Relay
from llmkube.agent.settings import IngressSettings
from llmkube.log import get_logger

BACKLOG: Final = 128
ACCEPT_BATCH: Final = 32
ACCEPT_PAUSE_SECONDS: Final = 1.0
_ANY: Final = (IPv4Address(0), IPv6Address(0))

log = get_logger(__name__)


def tls_context(certificate: IngressCertificate, key_file: Path) -> ssl.SSLContext:
    """TLS 1.3 with this key and certificate. Raises ssl.SSLError if they do not fit, OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no resumption: every connection proves the key and the certificate
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(certificate.path, key_file)
    return context


@dataclass(slots=True, eq=False)
class _Guest:
    """One connection, from accept to close."""

    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is known, by a good token, or gone."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    known: bool = False
    busy: bool = False
    """A request is being answered."""
    task: asyncio.Task[None] | None = None


class _Server(web.Server):
    """aiohttp's HTTP server, telling the listener whose connection has ended."""

    def __init__(self, listener: Ingress, settings: IngressSettings) -> None:
        super().__init__(
            listener.handle,
            handler_cancellation=True,
            access_log=None,
            logger=logging.getLogger("llmkube.agent.http"),
            auto_decompress=False,
            read_bufsize=PIECE_BYTES,
            keepalive_timeout=settings.keepalive_timeout.total_seconds(),
            lingering_time=settings.close_timeout.total_seconds(),
        )
        self._listener = listener

    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        self._listener.connection_lost(handler)


class Ingress:
    """Listens, shakes hands, and hands connections to the relay."""

    def __init__(
        self,
        port: int,
        bind: Sequence[IPv4Address | IPv6Address],
        relay: Relay,
        settings: IngressSettings,
    ) -> None:
        self._port = port
        self._bind = tuple(bind)
        self._relay = relay
        self._settings = settings
        self._context: ssl.SSLContext | None = None
        self._ready = asyncio.Event()
        self._guests: dict[_Guest, None] = {}  # in order of arrival
        self._by_protocol: dict[web.RequestHandler, _Guest] = {}
        self._draining = asyncio.Event()
        relay.on_admitted = self._admitted

    @property
    def connections(self) -> int:
        """Connections now, handshakes included."""
        return len(self._guests)

    @property
    def known(self) -> int:
        """Those of them that have shown the relay token."""
        return sum(guest.known for guest in self._guests)

    def use(self, context: ssl.SSLContext) -> None:
        """Serve with this certificate from the next connection on. The first one opens the
        listener: before it there is nothing to prove."""
        self._context = context
        self._ready.set()

    async def run(self) -> None:
        """Serve until cancelled, or drained. Raises OSError if the port cannot be had."""
        await self._ready.wait()
        if self._draining.is_set():
            return
        sockets = _listen(self._bind, self._port)
        log.info("ingress listens", addresses=", ".join(map(_show, sockets)))
        try:
            async with self._relay.open(), asyncio.TaskGroup() as group:
                door = _Door(self, _Server(self, self._settings), group)
                for sock in sockets:
                    door.open(sock)
                try:
                    await self._draining.wait()
                finally:
                    for sock in sockets:
                        door.close(sock)
                await self._finish()
        finally:
            for sock in sockets:
                sock.close()

    def drain(self) -> None:
        """Stop listening, let running requests end for a while, then make `run` return."""
        self._draining.set()
        self._ready.set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request of one connection."""
        guest = self._by_protocol.get(request.protocol)
        if guest is None:
            return await self._relay.handle(request)
        guest.busy = True
        try:
            return await self._relay.handle(request)
        finally:
            guest.busy = False
            if self._draining.is_set():
                request.protocol.close()  # after this answer

    async def _finish(self) -> None:
        """Idle connections close now, busy ones after their request (`handle`)."""
        for protocol, guest in list(self._by_protocol.items()):
            if protocol.transport is None:
                _dismiss(guest)  # still shaking hands
            elif not guest.busy:
                protocol.force_close()
        try:
            async with asyncio.timeout(self._settings.drain_timeout.total_seconds()):
                for guest in list(self._guests):
                    await guest.closed.wait()
        except TimeoutError:
            log.info("requests cut off at the end", count=len(self._guests))
        for guest in list(self._guests):
            _dismiss(guest)

    def welcome(self, connection: socket.socket, server: _Server, group: asyncio.TaskGroup) -> None:
        """Take in a new connection, or close it at once if there is no room."""
        if not self._make_room():
            connection.close()
            return
        guest = _Guest()
        self._guests[guest] = None
        guest.task = group.create_task(self._serve(guest, connection, server))

    def _make_room(self) -> bool:
        """May one more connection come? At the cap, the oldest stranger goes."""
        if len(self._guests) < self._settings.max_connections:
            return True
        stranger = next((guest for guest in self._guests if not guest.known), None)
        if stranger is None:
            log.warning("connection refused: all are in use", cap=self._settings.max_connections)
            return False
        self._guests.pop(stranger)
        _dismiss(stranger)
        return True

    async def _serve(self, guest: _Guest, connection: socket.socket, server: _Server) -> None:
        protocol = server()
        self._by_protocol[protocol] = guest  # before a byte can arrive
        try:
            transport = await self._shake_hands(connection, protocol)
            try:
                await self._stay(guest)
            finally:
                transport.abort()  # a polite close waits for a peer that may be gone
        except (OSError, TimeoutError) as error:  # ssl.SSLError is an OSError
            log.debug("handshake failed", why=str(error))
        except Exception:
            log.exception("cannot serve a connection")
        finally:
            guest.closed.set()
            self._guests.pop(guest, None)
            self._by_protocol.pop(protocol, None)

    async def _shake_hands(
        self, connection: socket.socket, protocol: web.RequestHandler
    ) -> asyncio.Transport:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            connection,
            ssl=self._context,
            ssl_handshake_timeout=self._settings.handshake_timeout.total_seconds(),
            ssl_shutdown_timeout=self._settings.close_timeout.total_seconds(),
        )
        transport.set_write_buffer_limits(high=PIECE_BYTES)  # 512 KiB otherwise
        return transport

    async def _stay(self, guest: _Guest) -> None:
        """Until it closes; a stranger only for so long."""
        try:
            async with asyncio.timeout(self._settings.request_timeout.total_seconds()):
                await guest.settled.wait()
        except TimeoutError:
            return
        await guest.closed.wait()

    def _admitted(self, request: web.BaseRequest) -> None:
        guest = self._by_protocol.get(request.protocol)
        if guest is not None:
            guest.known = True
            guest.settled.set()

    def connection_lost(self, protocol: web.RequestHandler) -> None:
        """A connection has ended, whoever ended it."""
        guest = self._by_protocol.get(protocol)
        if guest is not None:
            guest.closed.set()
            guest.settled.set()


@dataclass(slots=True)
class _Door:
    """Accepts connections. (asyncio's sock_accept loses one when it is cancelled in time.)"""

    ingress: Ingress
    server: _Server
    group: asyncio.TaskGroup

    def open(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if listener.fileno() >= 0:
            loop.add_reader(listener, self._accept, listener)

    def close(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(listener)
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # most likely out of descriptors: some will be free again
                log.warning("cannot accept a connection", error=error.strerror)
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(ACCEPT_PAUSE_SECONDS, self.open, listener)
                return
            connection.setblocking(False)
            self.ingress.welcome(connection, self.server, self.group)


def _dismiss(guest: _Guest) -> None:
    if guest.task is not None:
        guest.task.cancel()


def _listen(bind: Sequence[IPv4Address | IPv6Address], port: int) -> list[socket.socket]:
    """Listening sockets. Without `bind`: both families, or the one that this machine has."""
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    for address in bind or _ANY:
        try:
            sockets.append(_listen_on(address, port))
        except OSError as error:
            failures.append(error)
    if not sockets or (bind and failures) or any(e.errno == errno.EADDRINUSE for e in failures):
        for sock in sockets:
            sock.close()
        raise OSError(failures[0].errno, f"cannot listen on port {port}: {failures[0].strerror}")
    return sockets


def _listen_on(address: IPv4Address | IPv6Address, port: int) -> socket.socket:
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.setblocking(False)
        sock.bind((str(address), port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _show(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
