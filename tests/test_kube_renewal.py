"""Tokens that renew themselves, against the real TokenRequest API."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.kubeconfig import current_token, write_kubeconfig
from llmkube.kube.renewal import TokenRenewer, read_claims
from tests.support.accounts import create_account, grant
from tests.support.background import background
from tests.support.clock import FakeClock
from tests.support.wait import eventually

LIFE = timedelta(hours=2)


@dataclass
class Machine:
    """A machine with a kubeconfig, a client that uses it, and a renewer on a fake clock."""

    path: Path
    client: KubeClient
    clock: FakeClock
    renewer: TokenRenewer
    used: str = ""

    def token(self) -> str:
        return current_token(self.path)

    async def renewed(self) -> str:
        """Wait for a token that is not the last one that was waited for."""
        before = self.used
        await eventually(lambda: self.token() != before, "the file holds another token")
        self.used = self.token()
        return self.used


@asynccontextmanager
async def open_machine(path: Path) -> AsyncIterator[Machine]:
    async with KubeClient(await load_access(path), clock=SystemClock()) as client:
        clock = FakeClock()
        renewer = TokenRenewer(
            client,
            clock,
            path,
            first_retry=timedelta(milliseconds=50),
            longest_retry=timedelta(milliseconds=200),
            look_every=timedelta(milliseconds=50),
        )
        yield Machine(path, client, clock, renewer, current_token(path))


@pytest.fixture
async def machine(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> AsyncIterator[Machine]:
    await create_account(admin, namespace, "mac")
    rule = {
        "apiGroups": [""],
        "resources": ["serviceaccounts/token"],
        "resourceNames": ["mac"],
        "verbs": ["create"],
    }
    await grant(admin, namespace, "mac", [rule])
    issued = await admin.request_token("mac", namespace, ttl=LIFE)
    path = tmp_path / "kubeconfig"
    write_kubeconfig(
        path,
        server=control_plane.server,
        ca_pem=control_plane.ca_pem,
        namespace=namespace,
        user="mac",
        token=issued.token,
    )
    async with open_machine(path) as opened:
        yield opened


@pytest.mark.cluster
async def test_it_renews_at_the_start_and_at_half_of_the_life(
    machine: Machine, namespace: str
) -> None:
    async with background(machine.renewer.run()):
        claims = read_claims(await machine.renewed())
        assert claims is not None
        assert (claims.namespace, claims.account) == (namespace, "mac")
        assert claims.life == LIFE, "the next one lives as long"
        first = machine.used
        machine.clock.advance(LIFE / 2 - timedelta(minutes=1))
        await asyncio.sleep(0.3)
        assert machine.token() == first
        machine.clock.suspend(timedelta(minutes=2))  # also when that passes in its sleep
        await machine.renewed()
    assert (await machine.client.whoami()).username.endswith(":mac")


@pytest.mark.cluster
async def test_it_renews_when_the_machine_wakes(machine: Machine) -> None:
    async with background(machine.renewer.run()):
        await machine.renewed()
        machine.renewer.wake()
        await machine.renewed()


@pytest.mark.cluster
async def test_a_wrong_date_changes_nothing(machine: Machine) -> None:
    machine.clock.step_wall(timedelta(days=-400))
    async with background(machine.renewer.run()):
        first = await machine.renewed()
        machine.clock.step_wall(timedelta(days=800))
        await asyncio.sleep(0.3)
        assert machine.token() == first


@pytest.mark.cluster
async def test_a_full_disk_keeps_the_old_token_and_is_tried_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = machine.token()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with capture_logs() as logs:
        assert not await machine.renewer.renew()
    assert machine.token() == old
    assert os.listdir(machine.path.parent) == ["kubeconfig"]
    (entry,) = logs
    assert "No space left" in entry["why"]
    assert "make room" in entry["do"]
    assert old not in str(logs)
    async with background(machine.renewer.run()):
        await asyncio.sleep(0.1)
        monkeypatch.undo()
        await machine.renewed()


@pytest.mark.cluster
async def test_a_rotated_file_is_not_overwritten(
    machine: Machine, admin: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin puts a new kubeconfig in place while a renewal is under way."""
    rotated = (await admin.request_token("mac", namespace, ttl=LIFE)).token
    asked = machine.client.request_token

    async def slow(*args: object, **options: object) -> object:
        issued = await asked(*args, **options)  # type: ignore[arg-type]
        machine.path.write_text(machine.path.read_text().replace(machine.used, rotated))
        return issued

    monkeypatch.setattr(machine.client, "request_token", slow)
    with capture_logs() as logs:
        assert not await machine.renewer.renew()
    assert machine.token() == rotated
    assert "another token" in logs[0]["why"]


@pytest.mark.cluster
async def test_a_revoked_account_is_told_and_does_not_end_the_program(
    machine: Machine, control_plane: ControlPlane, namespace: str
) -> None:
    await control_plane.kubectl("delete", "rolebinding", "mac-granted", "-n", namespace)

    async def refused() -> bool:
        with capture_logs() as logs:
            done = await machine.renewer.renew()
        return not done and "create or rotate it again" in logs[0]["do"]

    await eventually(refused, "the loss of the right is seen")
    kept = machine.token()
    task = asyncio.ensure_future(machine.renewer.run())
    await asyncio.sleep(0.3)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert machine.token() == kept


@pytest.mark.cluster
async def test_a_kubeconfig_of_another_kind_has_nothing_to_renew(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    path = tmp_path / "k"
    write_kubeconfig(
        path,
        server=control_plane.server,
        ca_pem=control_plane.ca_pem,
        namespace="default",
        user="someone",
        token="an-opaque-token",
    )
    before = path.read_bytes()
    async with open_machine(path) as machine:
        assert await machine.renewer.renew()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "token", ["", "a", "a.b.c", "a.e30.c", "a.W10.c", "..", "a.eyJpYXQiOiJ4In0.c"]
)
def test_what_is_no_service_accounts_token_has_no_claims(token: str) -> None:
    assert read_claims(token) is None
