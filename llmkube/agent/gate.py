"""Who may use the LLM behind the ingress: holders of the relay token.

A gate looks at the values of one header and says yes or no, in time that does not depend on how
much of a guess is right. It fails closed: no file, an unreadable or empty one, two headers instead
of one: no. Only the admin's explicit --insecure-no-auth opens it. The ingress asks it before it
does anything for a request; `llmkube.agent.relay` is the one who asks.
"""

from __future__ import annotations

import hmac
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from llmkube.kube.filesignature import FileSignature, file_signature
from llmkube.log import get_logger

TOKEN_HEADER: Final = "X-LLMKube-Relay-Token"  # noqa: S105 (the header's name)
MAX_TOKEN_BYTES: Final = 4096
SHORT_TOKEN_BYTES: Final = 16

log = get_logger(__name__)


class Gate(Protocol):
    """Decides on the values of TOKEN_HEADER in one request."""

    def admits(self, presented: Sequence[str]) -> bool: ...


@dataclass(frozen=True, slots=True)
class OpenGate:
    """--insecure-no-auth: everybody who reaches the port may use the LLM."""

    def admits(self, presented: Sequence[str]) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ClosedGate:
    """No token file: nobody may."""

    def admits(self, presented: Sequence[str]) -> bool:
        return False


@dataclass(slots=True)
class TokenGate:
    """Those may who present the content of a file, which is read again when it changes."""

    path: Path
    _token: bytes | None = field(default=None, init=False, repr=False)
    _signature: FileSignature | None = field(default=None, init=False)

    def admits(self, presented: Sequence[str]) -> bool:
        token = self._current()
        if token is None or len(presented) != 1:
            return False
        return hmac.compare_digest(presented[0].encode("utf-8", "surrogateescape"), token)

    def usable(self) -> bool:
        """Is there a token to present?"""
        return self._current() is not None

    def _current(self) -> bytes | None:
        signature = file_signature(self.path)
        if signature != self._signature:
            self._token = self._read()
            self._signature = signature
        return self._token

    def _read(self) -> bytes | None:
        try:
            mode = self.path.stat().st_mode
            if not stat.S_ISREG(mode):  # opening a pipe would wait for a writer
                self._unusable("it is not a regular file")
                return None
            with self.path.open("rb") as file:
                content = file.read(MAX_TOKEN_BYTES + 1)
        except OSError as error:
            self._unusable(error.strerror or type(error).__name__)
            return None
        token = content.strip()
        if not token:
            self._unusable("it is empty")
            return None
        if len(content) > MAX_TOKEN_BYTES:
            self._unusable(f"it has more than {MAX_TOKEN_BYTES} bytes")
            return None
        if mode & 0o077:
            log.warning("others can read the relay token: chmod 600 it", file=str(self.path))
        if len(token) < SHORT_TOKEN_BYTES:
            log.warning("the relay token is short enough to guess", file=str(self.path))
        log.info("relay token read", file=str(self.path))
        return token

    def _unusable(self, why: str) -> None:
        log.error(
            "no usable relay token, every request is refused: put one line with the token there",
            file=str(self.path),
            why=why,
        )


def make_gate(token_file: Path | None, *, insecure: bool) -> Gate:
    """The gate that the flags ask for; says so in the log where that is unusual."""
    if insecure:
        log.warning(
            "--insecure-no-auth: everybody who reaches the ingress port can use the LLM. "
            "Give --relay-token-file instead"
        )
        return OpenGate()
    if token_file is None:
        log.warning(
            "no --relay-token-file: the ingress proves this machine's identity, but refuses "
            "every request to the LLM with 401"
        )
        return ClosedGate()
    gate = TokenGate(token_file)
    gate.usable()  # reads it now, so that the log tells at the start what is wrong with it
    return gate
