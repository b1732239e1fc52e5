"""TLS peers to dial: well-behaved ingresses and every kind of odd one, on real sockets.

Each peer listens on one loopback address in threads of its own and is gone with its `with` block.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
FOREVER = timedelta(days=36500)


def ec_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def rsa_key() -> PrivateKey:
    return rsa.generate_private_key(65537, 2048)


def ed25519_key() -> PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


@dataclass(frozen=True)
class Credential:
    """A key with a self-signed certificate."""

    key: PrivateKey
    certificate: x509.Certificate

    @property
    def der(self) -> bytes:
        return self.certificate.public_bytes(Encoding.DER)

    @property
    def spki(self) -> bytes:
        public = self.key.public_key()
        return hashlib.sha256(
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).digest()

    def server_context(self, chain: bytes = b"") -> ssl.SSLContext:
        """A server's context; `chain` is PEM sent after the certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "pair.pem"
            key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            path.write_bytes(self.certificate.public_bytes(Encoding.PEM) + chain + key)
            context.load_cert_chain(path)
        return context


def issue(
    key: PrivateKey | None = None,
    *,
    uid: str | None = None,
    start: datetime = EPOCH,
    end: datetime = EPOCH + FOREVER,
    padding: int = 0,
) -> Credential:
    """A self-signed certificate naming `uid`; `padding` bytes make it as large as wanted."""
    key = key or ec_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llmkube test")])
    urn = x509.UniformResourceIdentifier(f"urn:uuid:{uid or uuid.uuid4()}")
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([urn]), critical=False)
    )
    if padding:
        extension = x509.UnrecognizedExtension(
            x509.ObjectIdentifier("1.3.6.1.4.1.99999.1"), bytes(padding)
        )
        builder = builder.add_extension(extension, critical=False)
    digest = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return Credential(key, builder.sign(key, digest))


@dataclass
class Seen:
    """What a peer saw of its callers."""

    connections: int = 0
    handshakes: int = 0
    clean_ends: int = 0
    server_names: list[str | None] = field(default_factory=list)
    application_data: list[bytes] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    served: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


Handler = Callable[[socket.socket, Seen, threading.Event], None]


@dataclass
class Peer:
    address: str
    port: int
    seen: Seen


@contextlib.contextmanager
def listening(handler: Handler, address: str = "127.0.0.1", port: int = 0) -> Iterator[Peer]:
    """Serve `handler`, one thread per connection, until the block ends."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, port), family=family, backlog=64)
    server.settimeout(0.1)
    seen, stop = Seen(), threading.Event()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(20)
            try:
                handler(connection, seen, stop)
            except OSError as error:
                seen.errors.append(str(error))
        seen.served.release()

    def accept() -> None:
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            seen.connections += 1
            thread = threading.Thread(target=serve, args=(connection,))
            threads.append(thread)
            thread.start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield Peer(address, server.getsockname()[1], seen)
    finally:
        stop.set()
        acceptor.join()
        for thread in threads:
            thread.join()
        server.close()


@contextlib.contextmanager
def deaf(address: str = "127.0.0.1", port: int = 0) -> Iterator[Peer]:
    """A port whose accept queue is full, so that a SYN gets no answer (Linux)."""
    server = socket.create_server((address, port), backlog=0)
    port = server.getsockname()[1]
    with contextlib.ExitStack() as fillers:
        for _ in range(4):
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((address, port))
        try:
            yield Peer(address, port, Seen())
        finally:
            server.close()


def closed_port(address: str = "127.0.0.1") -> int:
    """A port on which nothing listens."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


# Handlers ----------------------------------------------------------------------------------------
def tls(context: ssl.SSLContext) -> Handler:
    """Finish the handshake, then read until the caller says goodbye."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        context.sni_callback = lambda _sock, name, _context: seen.server_names.append(name)
        with context.wrap_socket(connection, server_side=True) as secure:
            seen.handshakes += 1
            while data := secure.recv(65536):
                seen.application_data.append(data)
            seen.clean_ends += 1

    return handle


def plain(answer: bytes) -> Handler:
    """Answer anything with these bytes."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        connection.recv(65536)
        connection.sendall(answer)

    return handle


def silent(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
    """Accept and say nothing."""
    stop.wait(20)


def hang_up(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
    """Close after the ClientHello."""
    connection.recv(65536)


def reset(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
    """Reset after the ClientHello."""
    connection.recv(65536)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _server_flight(context: ssl.SSLContext, connection: socket.socket) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(connection.recv(65536))
    with contextlib.suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


def dripping(context: ssl.SSLContext, interval: timedelta) -> Handler:
    """A true server flight, one byte per `interval`."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        for byte in _server_flight(context, connection):
            connection.sendall(bytes([byte]))
            if stop.wait(interval.total_seconds()):
                return

    return handle


def cut_short(context: ssl.SSLContext, *, keep: int, then: Handler) -> Handler:
    """The first `keep` bytes of a true server flight, then something else."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        connection.sendall(_server_flight(context, connection)[:keep])
        then(connection, seen, stop)

    return handle


def corrupted(context: ssl.SSLContext) -> Handler:
    """A true server flight with one bit of its end turned over (a forged proof of the key)."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        flight = bytearray(_server_flight(context, connection))
        flight[-20] ^= 1
        connection.sendall(flight)
        stop.wait(20)

    return handle


def flooding(header: bytes) -> Handler:
    """`header`, and then zeros for as long as anyone reads."""

    def handle(connection: socket.socket, seen: Seen, stop: threading.Event) -> None:
        connection.sendall(header)
        while not stop.is_set():
            connection.sendall(bytes(65536))

    return handle
