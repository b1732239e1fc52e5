"""One TLS 1.3 handshake against a pinned key, without I/O.

The pin is the identity: no authority, no host name and no date is judged. What is promised:

* `REACHABLE` means that the peer sent exactly the reported certificate, that it holds the key
  (OpenSSL checks CertificateVerify and Finished before a handshake counts as done), and that
  the key is the pinned one.
* Towards any other peer our own Finished is withheld: TLS completes only against the reported
  key and certificate. No application data is ever sent, and no host name (SNI).
* At most MAX_RECEIVED bytes are taken from a peer. An agent's own flight is below 8 KiB.
* A peer that asks for a client certificate gets an empty one. Whether it then hangs up is not
  waited for: it has proved its key, and our agent asks for none.

Next: `dialback.py`, which moves the bytes.
"""

from __future__ import annotations

import hashlib
import ssl
from contextlib import suppress
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llmkube.verifier.protocol import Outcome

MAX_RECEIVED = 64 * 1024
"""Bytes taken from one peer before it is given up."""

_NO_TLS13 = ("UNSUPPORTED_PROTOCOL", "ALERT_PROTOCOL_VERSION", "VERSION_TOO_LOW")
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_TOO_SMALL",
    "RECORD_LAYER_FAILURE",
    "UNEXPECTED_MESSAGE",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found at one address."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Identity:
    """The key and the certificate that must answer."""

    spki: bytes
    certificate: bytes

    def __post_init__(self) -> None:
        if spki_hash(self.certificate) != self.spki:
            raise ValueError("the reported certificate does not carry the pinned key")

    def compare(self, certificate: bytes) -> Finding:
        """Judge the certificate (DER) of a peer that has proved to hold its key."""
        if certificate == self.certificate:
            return Finding(Outcome.REACHABLE)
        try:
            same_key = spki_hash(certificate) == self.spki
        except ValueError:
            return Finding(Outcome.ERROR, "the peer's certificate cannot be read")
        if same_key:
            return Finding(
                Outcome.CERTIFICATE_MISMATCH, "the pinned key with another certificate answered"
            )
        return Finding(Outcome.PIN_MISMATCH, "another key answered")


def spki_hash(certificate: bytes) -> bytes:
    """SHA-256 of the DER SubjectPublicKeyInfo. Raises ValueError for what cannot be read."""
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
        return hashlib.sha256(
            key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).digest()
    except (x509.InvalidVersion, UnsupportedAlgorithm) as error:  # no ValueErrors, these two
        raise ValueError(str(error)) from error


def client_context() -> ssl.SSLContext:
    """TLS 1.3 or nothing; trust is decided by `Identity`, not by authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class Handshake:
    """Feed it what the peer sends; it says what to send back, and in the end the `finding`."""

    __slots__ = ("_identity", "_incoming", "_outgoing", "_received", "_tls", "finding")

    def __init__(self, context: ssl.SSLContext, identity: Identity) -> None:
        self._identity = identity
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=False)
        self._received = 0
        self.finding: Finding | None = None

    def start(self) -> bytes:
        """The ClientHello."""
        return self._advance()

    def receive(self, data: bytes) -> bytes:
        """Take what the peer sent; the bytes to answer with, empty if none."""
        self._received += len(data)
        if self._received > MAX_RECEIVED:
            self.finding = Finding(
                Outcome.ERROR, f"more than {MAX_RECEIVED} bytes within the handshake"
            )
            return b""
        self._incoming.write(data)
        return self._advance()

    def _advance(self) -> bytes:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return self._outgoing.read()
        except ssl.SSLError as error:
            self.finding = Finding(Outcome.ERROR, _words(error))
            return b""
        self.finding = self._identity.compare(self._tls.getpeercert(binary_form=True) or b"")
        if self.finding.outcome is not Outcome.REACHABLE:
            return b""
        return self._goodbye()

    def _goodbye(self) -> bytes:
        """Our Finished, and at once the close_notify that spares the peer an error in its log."""
        with suppress(ssl.SSLError):  # it wants the peer's close_notify, which nobody waits for
            self._tls.unwrap()
        return self._outgoing.read()


def _words(error: ssl.SSLError) -> str:
    reason = error.reason or type(error).__name__
    if any(mark in reason for mark in _NO_TLS13):
        return "the peer does not speak TLS 1.3"
    if any(mark in reason for mark in _NOT_TLS):
        return "the peer does not speak TLS"
    if "ALERT" in reason:
        return f"the peer refused the handshake ({reason.lower()})"
    return f"the TLS handshake failed ({reason.lower()})"
