"""The credentials in force: re-read when their files change, and at once after a 401.

Tokens in pods and on Macs are replaced on disk while the process runs, and exec plugins hand out
short-lived ones. `Logins` keeps the newest: it looks at the files once a minute (on the clock that
runs through sleep: a laptop's token ages there, too), reloads before a credential expires, and lets
a request that met a 401 ask for a newer one. Reloads never overlap, and a failed one keeps what
there is. The user is `llmkube.kube.transport`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

from llmkube.clock import ZERO, Clock
from llmkube.kube.connection import Origin
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ConfigError
from llmkube.kube.filesignature import FileSignature, file_signature
from llmkube.log import get_logger

CHECK_EVERY = timedelta(minutes=1)
RENEW_BEFORE_EXPIRY = timedelta(seconds=30)
SHORTEST_PAUSE = timedelta(seconds=2)
"""Between two reloads, however short-lived the credential or busy the 401s."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Login:
    """One access, made ready for requests."""

    access: Access
    origin: Origin
    base_path: str
    """What the server's URL has before the API's own paths, usually nothing."""
    headers: str = field(repr=False)
    """Host and Authorization, as they are sent."""

    @staticmethod
    def of(access: Access, previous: Login | None = None) -> Login:
        """Make an access ready; the origin is kept while it still fits, because pooled
        connections belong to it. Raises ConfigError."""
        parts = urlsplit(access.server)
        headers = f"Host: {parts.netloc}\r\n"
        if access.credential.authorization is not None:
            headers += f"Authorization: {_header_value(access)}\r\n"
        if previous is not None and _same_origin(previous.access, access):
            return Login(access, previous.origin, parts.path, headers)
        context = access.ssl_context() if parts.scheme == "https" else None
        origin = Origin.of(access.server, context, access.trust.server_name, access.proxy)
        return Login(access, origin, parts.path, headers)


def _header_value(access: Access) -> str:
    value = access.credential.authorization or ""
    if not value.isascii() or not value.isprintable():
        raise ConfigError(f"{access.origin}: the credential holds characters that none has")
    return value


def _same_origin(one: Access, other: Access) -> bool:
    def key(access: Access) -> tuple[object, ...]:
        return access.server, access.trust, access.credential.certificate, access.proxy

    return key(one) == key(other)


class Logins:
    """The newest `Login`. Construction raises ConfigError if the access cannot be used."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._clock = clock
        self._reloading = asyncio.Lock()
        self._login = Login.of(access)
        self._signature = _signature(access.files)
        self._check_at = self._next_check()
        self._reloaded_at = clock.boottime() - SHORTEST_PAUSE

    @property
    def latest(self) -> Login:
        """The newest login, without looking whether there is a newer one."""
        return self._login

    async def current(self) -> Login:
        """The login for the next request."""
        if self._clock.boottime() < self._check_at:
            return self._login
        async with self._reloading:
            if self._clock.boottime() >= self._check_at:
                if self._expires_soon() or _signature(self._files()) != self._signature:
                    await self._reload()
                self._check_at = self._next_check()
        return self._login

    async def after_rejection(self, rejected: Login) -> Login | None:
        """A newer login than the one that met a 401, or None if there is none."""
        async with self._reloading:
            rested = self._clock.boottime() - self._reloaded_at
            if self._login is rejected and rested >= SHORTEST_PAUSE:
                await self._reload()
        newer = self._login
        return newer if newer.access.credential != rejected.access.credential else None

    async def _reload(self) -> None:
        self._reloaded_at = self._clock.boottime()
        signature = _signature(self._files())
        try:
            self._login = Login.of(await self._login.access.reload(), self._login)
        except ConfigError as error:
            log.warning("credentials not re-read, keeping those in use", why=str(error))
            return
        self._signature = signature

    def _files(self) -> tuple[Path, ...]:
        return self._login.access.files

    def _expires_soon(self) -> bool:
        left = self._left()
        return left is not None and left <= ZERO

    def _next_check(self) -> timedelta:
        left = self._left()
        pause = CHECK_EVERY if left is None else min(CHECK_EVERY, left)
        return self._clock.boottime() + max(pause, SHORTEST_PAUSE)

    def _left(self) -> timedelta | None:
        """Until the credential should be renewed; None if it does not say when it ends."""
        expires_at = self._login.access.credential.expires_at
        if expires_at is None:
            return None
        return expires_at - RENEW_BEFORE_EXPIRY - self._clock.now().wall


def _signature(files: tuple[Path, ...]) -> tuple[FileSignature, ...]:
    return tuple(file_signature(file) for file in files)
