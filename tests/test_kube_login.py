"""Credentials that change while the process runs: files rotate, plugins hand out short ones."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from devcluster.controlplane import ControlPlane
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import Unauthorized
from llmkube.kube.resources import NAMESPACES
from tests.support.accounts import create_account
from tests.support.clock import FakeClock
from tests.support.faultproxy import FaultProxy

pytestmark = pytest.mark.cluster

MINUTE = timedelta(seconds=61)
Tokens = Callable[[str], Awaitable[str]]


@pytest.fixture
async def tokens(admin: KubeClient, namespace: str) -> Tokens:
    """A factory of tokens: each name is an account of its own."""

    async def make(name: str) -> str:
        await create_account(admin, namespace, name)
        return (await admin.request_token(name, namespace, ttl=timedelta(minutes=10))).token

    return make


@pytest.fixture
async def proxy(control_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(control_plane) as running:
        yield running


class Setup:
    """A kubeconfig whose user can be changed, and a client that uses it on a fake clock."""

    def __init__(self, folder: Path, server: str, ca_pem: bytes) -> None:
        self.clock = FakeClock()
        self.folder = folder
        self.path = folder / "config"
        (folder / "ca.pem").write_bytes(ca_pem)
        self._server = server

    def write(self, user: dict) -> None:
        document = {
            "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
            "clusters": [
                {
                    "name": "x",
                    "cluster": {"server": self._server, "certificate-authority": "ca.pem"},
                }
            ],
            "users": [{"name": "x", "user": user}],
        }
        self.path.write_text(yaml.safe_dump(document))

    async def connect(self, stack: AsyncExitStack) -> KubeClient:
        access = await load_access(self.path)
        return await stack.enter_async_context(KubeClient(access, clock=self.clock))


@pytest.fixture
def setup(tmp_path: Path, control_plane: ControlPlane) -> Setup:
    return Setup(tmp_path, control_plane.server, control_plane.ca_pem)


async def who(client: KubeClient) -> str:
    return (await client.whoami()).username.rpartition(":")[2]


async def test_a_token_file_is_read_again_each_minute(setup: Setup, tokens: Tokens) -> None:
    file = setup.folder / "token"
    file.write_text(await tokens("old"))
    setup.write({"tokenFile": "token"})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        assert await who(client) == "old"
        file.write_text(await tokens("new"))
        assert await who(client) == "old"
        setup.clock.advance(MINUTE)
        assert await who(client) == "new"


async def test_a_mounted_token_is_a_link_that_is_swapped(setup: Setup, tokens: Tokens) -> None:
    for version in ("one", "two"):
        (setup.folder / version).mkdir()
        (setup.folder / version / "token").write_text(await tokens(version))
    data = setup.folder / "..data"
    data.symlink_to("one")
    setup.write({"tokenFile": "..data/token"})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        assert await who(client) == "one"
        swapped = setup.folder / "swap"
        swapped.symlink_to("two")
        swapped.replace(data)
        setup.clock.advance(MINUTE)
        assert await who(client) == "two"


async def test_a_401_reads_the_kubeconfig_again_at_once(setup: Setup, tokens: Tokens) -> None:
    setup.write({"token": "revoked"})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        with pytest.raises(Unauthorized):
            await client.whoami()
        setup.write({"token": await tokens("rotated")})
        setup.clock.advance(timedelta(seconds=3))
        assert await who(client) == "rotated"


async def test_a_401_of_a_watch_reads_it_again_too(
    setup: Setup, control_plane: ControlPlane
) -> None:
    setup.write({"token": "revoked"})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        admin = {
            "client-certificate": str(control_plane.folder / "admin.crt"),
            "client-key": str(control_plane.folder / "admin.key"),
        }
        setup.write(admin)
        async with client.watch(NAMESPACES, resource_version="0") as stream:
            assert await stream.read()


async def test_without_a_newer_credential_a_401_is_not_repeated(
    tmp_path: Path, proxy: FaultProxy
) -> None:
    setup = Setup(tmp_path, proxy.server, proxy.ca_pem)
    setup.write({"token": "revoked"})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        for _ in range(3):
            with pytest.raises(Unauthorized):
                await client.list(NAMESPACES)
    assert proxy.count() == 3


async def test_a_client_certificate_may_change(
    setup: Setup, control_plane: ControlPlane, tokens: Tokens
) -> None:
    setup.write({"token": await tokens("someone")})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        assert await who(client) == "someone"
        setup.write(
            {
                "client-certificate": str(control_plane.folder / "admin.crt"),
                "client-key": str(control_plane.folder / "admin.key"),
            }
        )
        setup.clock.advance(MINUTE)
        assert await who(client) == "admin"


async def test_a_broken_file_keeps_the_credential_in_use_and_tells(
    setup: Setup, tokens: Tokens
) -> None:
    token = await tokens("steady")
    setup.write({"token": token})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)
        setup.path.write_text("users: [{name: x, user: {token: half")
        setup.clock.advance(MINUTE)
        with capture_logs() as logs:
            assert await who(client) == "steady"
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "not valid YAML" in logs[0]["why"]
    assert token not in str(logs)
    assert "half" not in str(logs)


async def test_a_plugin_runs_again_before_its_token_expires(setup: Setup, tokens: Tokens) -> None:
    tokens_file = setup.folder / "tokens"
    tokens_file.write_text("\n".join([await tokens("first"), await tokens("second")]))
    script = setup.folder / "plugin"
    script.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib\n"
        f"folder = pathlib.Path({str(setup.folder)!r})\n"
        "runs = folder / 'runs'\n"
        "done = len(runs.read_text()) if runs.exists() else 0\n"
        "runs.write_text('x' * (done + 1))\n"
        "token = (folder / 'tokens').read_text().split()[done]\n"
        "ends = '2026-01-01T00:05:00Z' if done == 0 else '2026-01-01T01:00:00Z'\n"
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1',"
        " 'kind': 'ExecCredential',"
        " 'status': {'token': token, 'expirationTimestamp': ends}}))\n"
    )
    script.chmod(0o700)
    section = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin"}
    setup.write({"exec": section})
    async with AsyncExitStack() as stack:
        client = await setup.connect(stack)  # the fake clock begins at 00:00
        assert await who(client) == "first"
        setup.clock.advance(timedelta(minutes=4))
        assert await who(client) == "first"
        setup.clock.advance(timedelta(seconds=35))
        assert await who(client) == "second"
        setup.clock.advance(timedelta(minutes=10))
        assert await who(client) == "second"
    assert (setup.folder / "runs").read_text() == "xx"
