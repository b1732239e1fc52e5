"""What a client shows the API server, and how it checks the server: the parts of `Access`.

Values only. Reading them from a kubeconfig is `llmkube.kube.contexts`, from a pod's files
`llmkube.kube.config`; using them is `llmkube.kube.transport`. Nothing here prints a secret: the
fields that hold one are left out of `repr`.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from llmkube.kube.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClientCertificate:
    """A client certificate chain and its unencrypted key, PEM."""

    chain_pem: bytes
    key_pem: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Credential:
    """How requests are authenticated; neither field set means anonymously.

    `authorization` is the whole header value ("Bearer …"). `expires_at` is None where the
    source does not tell.
    """

    authorization: str | None = field(default=None, repr=False)
    certificate: ClientCertificate | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ServerTrust:
    """How the API server's certificate is checked. `ca_pem` None: the system's authorities."""

    ca_pem: bytes | None = None
    server_name: str | None = None
    """The name expected in the certificate, if it is not the URL's host."""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Access:
    """Everything needed to talk to one API server as one identity, at one moment.

    `origin` says where it came from, for messages. `files` are what it was read from: when one
    of them changes, or the server answers 401, `reload` gives the next `Access`.
    """

    server: str
    """Base URL without a trailing slash."""
    namespace: str
    origin: str
    trust: ServerTrust
    credential: Credential
    files: tuple[Path, ...]
    reload: Callable[[], Awaitable[Access]] = field(repr=False, compare=False)
    """Raises ConfigError."""
    proxy: str | None = field(default=None, repr=False)

    @property
    def ca_pem(self) -> bytes | None:
        """The authorities that sign the API server's certificate, PEM."""
        return self.trust.ca_pem

    def ssl_context(self) -> ssl.SSLContext:
        """A new TLS context for this trust and client certificate. Raises ConfigError."""
        return ssl_context(self.trust, self.credential.certificate, self.origin)


def ssl_context(
    trust: ServerTrust, certificate: ClientCertificate | None, origin: str
) -> ssl.SSLContext:
    """A TLS context that trusts as told and shows the certificate. Raises ConfigError."""
    try:
        cadata = trust.ca_pem.decode("ascii") if trust.ca_pem is not None else None
        context = ssl.create_default_context(cadata=cadata)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{origin}: the certificate authority is not a list of PEM certificates; "
            "put the cluster's CA bundle there"
        ) from error
    context.set_alpn_protocols(["http/1.1"])
    # Python 3.13 turned this on; the CAs of many clusters lack the extensions it asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not trust.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate is not None:
        _load_certificate(context, certificate, origin)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: ClientCertificate, origin: str) -> None:
    """OpenSSL takes files only, so they live in a private folder for this one call."""
    with tempfile.TemporaryDirectory(prefix="llmkube-") as folder:
        chain, key = Path(folder, "chain.pem"), Path(folder, "key.pem")
        for path, pem in ((chain, certificate.chain_pem), (key, certificate.key_pem)):
            path.touch(mode=0o600)
            path.write_bytes(pem)
        try:
            # An encrypted key would otherwise ask at the terminal.
            context.load_cert_chain(chain, key, password=lambda: b"")
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{origin}: the client certificate and key do not fit or are not PEM "
                f"({_reason(error)}); encrypted keys are not supported"
            ) from error


def _reason(error: Exception) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else None) or type(error).__name__
