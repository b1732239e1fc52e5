"""A ServiceAccount token in a kubeconfig that renews itself, shared by the agent and the edge.

The token is replaced at the start, after the machine woke, when somebody put another one into the
file, and at half of its life, with one that lives as long as the present one was meant to (at most
30 days). Half of a life is measured on the clock that runs through sleep, from the moment of
renewal: the machine's date may be wrong. The file is rewritten atomically; the client notices by
itself (`llmkube.kube.login`). Nothing here ends a program: a full disk, a lost network or a
revoked account are logged with what to do, and tried again while the old token lasts and after.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import random
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from llmkube.clock import ZERO, Clock
from llmkube.kube.client import IssuedToken, KubeClient
from llmkube.kube.errors import ApiError, ConfigError, Forbidden, NotFound, Unauthorized
from llmkube.kube.kubeconfig import current_token, replace_token
from llmkube.log import get_logger

FIRST_RETRY = timedelta(seconds=5)
LONGEST_RETRY = timedelta(minutes=10)
SHORTEST_LIFE = timedelta(minutes=10)
"""The least that the TokenRequest API takes."""
LONGEST_LIFE = timedelta(days=30)
"""The most that the shipped admission policy lets an account issue to itself: an admin may have
issued a longer one."""
LOOK_EVERY = timedelta(minutes=1)
"""Timers stand still while a Mac sleeps, so the deadline is looked at again this often."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenClaims:
    """What a ServiceAccount token says about itself. Its signature is the API server's affair."""

    account: str
    namespace: str
    issued_at: datetime
    expires_at: datetime

    @property
    def life(self) -> timedelta:
        return self.expires_at - self.issued_at


def read_claims(token: str) -> TokenClaims | None:
    """The claims of a bound ServiceAccount token; None if it is anything else."""
    try:
        payload = token.split(".")[1]
        claims: Any = msgspec.json.decode(
            base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
        )
        owner = claims["kubernetes.io"]
        return TokenClaims(
            account=str(owner["serviceaccount"]["name"]),
            namespace=str(owner["namespace"]),
            issued_at=datetime.fromtimestamp(claims["iat"], UTC),
            expires_at=datetime.fromtimestamp(claims["exp"], UTC),
        )
    except (LookupError, TypeError, ValueError, OverflowError, OSError, binascii.Error):
        return None


def renewed_life(life: timedelta) -> timedelta:
    """How long the next token should live: as long as this one, within what is allowed."""
    return min(max(life, SHORTEST_LIFE), LONGEST_LIFE)


class TokenRenewer:
    """Keeps the token of one kubeconfig fresh.

    `client` uses that kubeconfig. `wake` is for a program that noticed that its machine slept.
    """

    def __init__(
        self,
        client: KubeClient,
        clock: Clock,
        kubeconfig: Path,
        *,
        first_retry: timedelta = FIRST_RETRY,
        longest_retry: timedelta = LONGEST_RETRY,
        look_every: timedelta = LOOK_EVERY,
    ) -> None:
        self._client = client
        self._clock = clock
        self._kubeconfig = kubeconfig
        self._first_retry = first_retry
        self._longest_retry = longest_retry
        self._look_every = look_every
        self._woken = asyncio.Event()
        self._renew_at = ZERO
        self._written = ""
        """The token that we left in the file."""

    def wake(self) -> None:
        """Renew now: the machine slept, and nobody knows how long the token still has."""
        self._woken.set()

    async def run(self) -> None:
        """Renew until cancelled."""
        pause = self._first_retry
        while True:
            self._woken.clear()
            if await self.renew():
                pause = self._first_retry
                await self._until_half_life()
            else:
                await self._sleep(pause * random.uniform(0.8, 1.2))  # noqa: S311
                pause = min(pause * 2, self._longest_retry)

    async def renew(self) -> bool:
        """Put a new token into the file; False, with a log line that says what to do, if that
        failed. A kubeconfig without a ServiceAccount's token has nothing to renew: True."""
        try:
            old = await asyncio.to_thread(current_token, self._kubeconfig)
            claims = read_claims(old)
            if claims is None:
                log.debug("no ServiceAccount's token to renew", file=self._file)
                self._written = old
                self._renew_at = self._clock.boottime() + self._longest_retry
                return True
            asked = self._clock.boottime()  # its life begins no earlier
            issued = await self._client.request_token(
                claims.account, claims.namespace, ttl=renewed_life(claims.life)
            )
            await asyncio.to_thread(replace_token, self._kubeconfig, issued.token, replacing=old)
        except (ApiError, ConfigError, OSError) as error:
            log.warning("token not renewed", file=self._file, why=str(error), do=_advice(error))
            return False
        self._written = issued.token
        self._renew_at = asked + self._life(issued, claims) / 2
        log.info("token renewed", file=self._file, expires_at=issued.expires_at.isoformat())
        return True

    @property
    def _file(self) -> str:
        return str(self._kubeconfig)

    @staticmethod
    def _life(issued: IssuedToken, before: TokenClaims) -> timedelta:
        """How long the new token lives: its own word, for the server may have shortened it."""
        claims = read_claims(issued.token)
        return claims.life if claims is not None else before.life

    async def _until_half_life(self) -> None:
        while not self._woken.is_set():
            left = self._renew_at - self._clock.boottime()
            if left <= ZERO or await self._replaced():
                return
            await self._sleep(min(left, self._look_every))

    async def _replaced(self) -> bool:
        """Holds the file another token than ours? Its life is not the one we count on."""
        with suppress(ConfigError):
            return await asyncio.to_thread(current_token, self._kubeconfig) != self._written
        return False  # unreadable: most likely being written

    async def _sleep(self, pause: timedelta) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause.total_seconds()):
                await self._woken.wait()


def _advice(error: Exception) -> str:
    match error:
        case Unauthorized():
            return "the token has expired or was revoked: put a new kubeconfig in its place"
        case Forbidden() | NotFound():
            return "the account may not renew its token: create or rotate it again"
        case OSError():
            return "make room, and make the file's folder writable to this program"
        case ConfigError():
            return "correct the file; it is read again"
        case _:
            return "nothing: it is tried again"
