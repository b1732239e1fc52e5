"""Reports and certificates as agents make them, and as they should not."""

from __future__ import annotations

import hashlib
import json
import uuid
from base64 import b64encode
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey

UID = "0b0e8cbb-6a0c-4d0f-8a53-2a1f5d3c9e10"


@lru_cache
def shared_key() -> ec.EllipticCurvePrivateKey:
    """One key for all tests that do not care which."""
    return ec.generate_private_key(ec.SECP256R1())


def make_certificate(
    uris: Sequence[str] = (f"urn:uuid:{UID}",),
    *,
    key: PrivateKey | None = None,
    dns: Sequence[str] = (),
    filler: int = 0,
) -> bytes:
    """The DER of a self-signed certificate with these URI SANs; `filler` bytes make it larger."""
    key = key or shared_key()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llmkube-agent")])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=365))
    )
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    names += [x509.DNSName(host) for host in dns]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    if filler:
        extension = x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3.4"), bytes(filler))
        builder = builder.add_extension(extension, critical=False)
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    if isinstance(key, ec.EllipticCurvePrivateKey):  # the same bytes each time
        signed = builder.sign(key, algorithm, ecdsa_deterministic=True)
    else:
        signed = builder.sign(key, algorithm)
    return signed.public_bytes(Encoding.DER)


def pin_text(key: PrivateKey | None = None) -> str:
    """The pin of a key, as a report carries it."""
    spki = (
        (key or shared_key())
        .public_key()
        .public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    )
    return b64encode(hashlib.sha256(spki).digest()).decode()


def report_document(**changes: Any) -> dict[str, Any]:
    """A valid report as a JSON object, with changes to its top level; `...` removes a key."""
    document: dict[str, Any] = {
        "version": 1,
        "agentVersion": "v0.1.0",
        "ingressPort": 9443,
        "ingressSPKI": pin_text(),
        "ingressCertificate": b64encode(make_certificate()).decode(),
        "candidates": [
            {"address": "100.101.2.3", "source": "tailnet"},
            {"address": "192.168.1.20", "source": "lan"},
        ],
        "capacity": {
            "chip": "Apple M5 Max",
            "gpuCores": 40,
            "memoryBytes": 137438953472,
            "metalVersion": "Metal 4",
        },
    }
    document |= changes
    return {key: value for key, value in document.items() if value is not ...}


def report_text(**changes: Any) -> str:
    return json.dumps(report_document(**changes))


def report_for(uid: str | uuid.UUID, **changes: Any) -> str:
    """A valid report whose certificate names that UID."""
    certificate = b64encode(make_certificate([f"urn:uuid:{uid}"])).decode()
    return report_text(**{"ingressCertificate": certificate, **changes})
