"""The pin: which key a Mac's TLS ingress must show.

A pin is the SHA-256 digest of the DER SubjectPublicKeyInfo, as in RFC 7469; a Mac *is* its pin.
Neighbour: `report`, where a Mac claims one.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from binascii import a2b_base64
from dataclasses import dataclass
from typing import Self

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import Certificate

DIGEST_BYTES = 32


def strict_base64(text: str) -> bytes:
    """Decode standard base64 (RFC 4648 §4) in its one canonical spelling. Raises ValueError."""
    raw = a2b_base64(text.encode("ascii"), strict_mode=True)
    if b64encode(raw).decode() != text:  # stray bits behind the last byte
        raise ValueError("not canonical base64")
    return raw


@dataclass(frozen=True, slots=True)
class SpkiPin:
    """32 bytes that name a public key. Its text form is standard base64, 44 characters."""

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a pin has {DIGEST_BYTES} bytes, this has {len(self.digest)}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From strict standard base64. Raises ValueError."""
        return cls(strict_base64(text))

    @classmethod
    def of(cls, certificate: Certificate) -> Self:
        """The pin of a certificate's key. Raises what cryptography raises for unusable keys."""
        spki = certificate.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
        return cls(hashlib.sha256(spki).digest())

    def __str__(self) -> str:
        return b64encode(self.digest).decode()
