"""Who this machine is: a key made once, a holder id, and a certificate that names a MetalNode.

The key is the identity: the cluster pins its SubjectPublicKeyInfo, so it must survive restarts,
upgrades and a re-created MetalNode. The certificate only says for which MetalNode (by UID) the key
now speaks; it is reissued with the same key when that UID changes, and kept on disk otherwise,
because a new certificate means a new check by the cluster. Nothing here is ever regenerated
silently: a lost or damaged file is a `StateError`. `llmkube.agent.statedir` does the writing.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmkube.agent.statedir import StateDir, StateError, read_private
from llmkube.log import get_logger

IDENTITY_FILE: Final = "identity.pem"
CERTIFICATE_FILE: Final = "ingress-certificate.pem"

# RFC 5280 4.1.2.5: no well-defined expiration. Nobody judges the dates: the pin is the identity.
_NO_EXPIRY: Final = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
_HOLDER_LINE: Final = re.compile(rb"^# holder: ([0-9a-f-]{36})$", re.MULTILINE)
_HEADER: Final = """\
# The identity of one LLMKube agent. Do not copy it to another machine.
# holder: {holder}
"""
_UNREADABLE: Final = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
)

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """The machine's key and its per-install id, both made once."""

    holder: str
    """The holderIdentity of this agent's Lease, a random UUID."""
    key: ec.EllipticCurvePrivateKey = field(repr=False)
    path: Path
    """The file that holds them, PEM."""

    @property
    def spki(self) -> bytes:
        """SHA-256 of the DER SubjectPublicKeyInfo: the 32 bytes that the cluster pins."""
        return hashlib.sha256(public_der(self.key.public_key())).digest()


@dataclass(frozen=True, slots=True)
class IngressCertificate:
    """A self-signed certificate of the identity's key that names one MetalNode UID."""

    uid: str
    der: bytes
    path: Path


def public_der(key: CertificatePublicKeyTypes) -> bytes:
    """The DER SubjectPublicKeyInfo of a public key."""
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def open_identity(state: StateDir) -> Identity:
    """The identity in `state`; made now if the folder has never held one. Raises StateError."""
    identity = load_identity(state.path)
    if identity is not None:
        return identity
    if read_private(state.path / CERTIFICATE_FILE) is not None:
        raise StateError(
            f"{state.path / IDENTITY_FILE} is gone, but {CERTIFICATE_FILE} beside it shows that it "
            "was there. Put it back from a backup; or move the whole folder away and start the "
            "agent again: it makes a new identity, and the cluster announces the new key"
        )
    state.write(IDENTITY_FILE, _render(str(uuid.uuid4()), ec.generate_private_key(ec.SECP256R1())))
    identity = load_identity(state.path)
    if identity is None:
        raise StateError(f"{state.path / IDENTITY_FILE} vanished as soon as it was written")
    log.info("made a new identity", file=str(identity.path), holder=identity.holder)
    return identity


def load_identity(folder: Path) -> Identity | None:
    """The identity in a folder, None if there is none yet. Raises StateError if it is damaged."""
    content = read_private(folder / IDENTITY_FILE)
    return None if content is None else _parse(content, folder / IDENTITY_FILE)


def load_certificate(folder: Path, identity: Identity) -> IngressCertificate | None:
    """The certificate last issued, None if there is none. Raises StateError if it is damaged."""
    path = folder / CERTIFICATE_FILE
    content = read_private(path)
    if content is None:
        return None
    try:
        certificate = x509.load_pem_x509_certificate(content)
        uid = certificate_uid(certificate)
        if public_der(certificate.public_key()) != public_der(identity.key.public_key()):
            raise ValueError(f"it belongs to another key than the one in {IDENTITY_FILE}")
    except _UNREADABLE as error:
        raise StateError(
            f"{path} is damaged: {error}. Remove that file alone; the agent issues a new "
            "certificate with the same key"
        ) from error
    return IngressCertificate(uid, certificate.public_bytes(serialization.Encoding.DER), path)


def certificate_for(
    state: StateDir, identity: Identity, uid: str, now: datetime
) -> IngressCertificate:
    """The certificate that names `uid`: the stored one, or a new one of the same key.

    Raises StateError if the folder is damaged or full.
    """
    stored = load_certificate(state.path, identity)
    if stored is not None and stored.uid == uid:
        return stored
    certificate = issue(identity, uid, now)
    state.write(CERTIFICATE_FILE, certificate.public_bytes(serialization.Encoding.PEM))
    log.info("issued an ingress certificate", metalnode_uid=uid, replaces=stored and stored.uid)
    return IngressCertificate(
        uid, certificate.public_bytes(serialization.Encoding.DER), state.path / CERTIFICATE_FILE
    )


def issue(identity: Identity, uid: str, now: datetime) -> x509.Certificate:
    """A self-signed server certificate whose only URI SAN is `urn:uuid:<uid>`."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "llmkube-agent")])
    unlike_ca = x509.BasicConstraints(ca=False, path_length=None)
    server_only = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"urn:uuid:{uid}")])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(_NO_EXPIRY)
        .add_extension(names, critical=False)
        .add_extension(unlike_ca, critical=True)
        .add_extension(server_only, critical=False)
        .sign(identity.key, hashes.SHA256())
    )


def certificate_uid(certificate: x509.Certificate) -> str:
    """The MetalNode UID that a certificate names. Raises ValueError or x509.ExtensionNotFound."""
    san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = san.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1 or not uris[0].startswith("urn:uuid:"):
        raise ValueError("it does not carry exactly one URI SAN urn:uuid:<uid>")
    return uris[0].removeprefix("urn:uuid:")


def _render(holder: str, key: ec.EllipticCurvePrivateKey) -> bytes:
    pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return _HEADER.format(holder=holder).encode("ascii") + pem


def _parse(content: bytes, path: Path) -> Identity:
    """One file holds both values, so that there is no state with only one of them."""
    try:
        found = _HOLDER_LINE.search(content)
        if found is None:
            raise ValueError("it has no holder line")
        holder = str(uuid.UUID(found.group(1).decode("ascii")))
        key = serialization.load_pem_private_key(content, password=None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp256r1":
            raise ValueError("its key is not an ECDSA P-256 key")
    except _UNREADABLE as error:
        raise StateError(
            f"{path} is damaged: {error}. Put it back from a backup; or move the whole folder "
            "away and start the agent again: it makes a new identity, and the cluster announces "
            "the new key"
        ) from error
    return Identity(holder, key, path)
