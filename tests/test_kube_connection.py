"""Ways to the API server: through an HTTP proxy, under another name, and what is left behind."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube import connection, errors
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.connection import Origin
from llmkube.kube.credentials import Access
from llmkube.kube.login import Login
from llmkube.kube.resources import NAMESPACES
from tests.support.faultproxy import FaultProxy
from tests.support.wait import eventually


@dataclass
class ConnectProxy:
    """An HTTP proxy that only knows CONNECT, as corporate ones do."""

    status: str = "200 Connection established"
    port: int = 0
    heads: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        writer.write(f"HTTP/1.1 {self.status}\r\nVia: tests\r\n\r\n".encode())
        if not self.status.startswith("200"):
            writer.close()
            return
        host, port = head.split()[1].rsplit(":", 1)
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, there_writer), pump(there_reader, writer))


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def connect_proxy(status: str = "200 OK") -> AsyncIterator[ConnectProxy]:
    proxy = ConnectProxy(status)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()


@pytest.fixture
async def access(control_plane: ControlPlane) -> Access:
    return await load_access(control_plane.admin_kubeconfig)


def client(access: Access) -> KubeClient:
    return KubeClient(access, clock=SystemClock())


@pytest.mark.cluster
async def test_through_a_proxy(access: Access) -> None:
    async with connect_proxy() as proxy:
        url = f"http://me:pass%20word@127.0.0.1:{proxy.port}"
        async with client(replace(access, proxy=url)) as through:
            assert await through.list(NAMESPACES)
            async with through.watch(NAMESPACES, resource_version="0") as stream:
                assert await stream.read()
        head = proxy.heads[0]
        assert head.startswith(f"CONNECT {access.server.removeprefix('https://')} HTTP/1.1\r\n")
        assert base64.b64encode(b"me:pass word").decode() in head
        assert "Bearer" not in head, "the proxy must not see our credentials"


@pytest.mark.cluster
async def test_a_proxy_that_refuses_is_named(access: Access) -> None:
    async with (
        connect_proxy("407 Proxy Authentication Required") as proxy,
        client(replace(access, proxy=f"http://127.0.0.1:{proxy.port}")) as through,
    ):
        with pytest.raises(errors.Unavailable, match="proxy refuses to connect: status 407"):
            await through.list(NAMESPACES)


@pytest.mark.cluster
@pytest.mark.parametrize(("name", "trusted"), [("kubernetes.default.svc", True), ("x.y", False)])
async def test_the_certificate_is_checked_against_the_name_that_is_told(
    access: Access, name: str, trusted: bool
) -> None:
    named = replace(access, trust=replace(access.trust, server_name=name))
    async with client(named) as under_name:
        if trusted:
            assert await under_name.list(NAMESPACES)
        else:
            with pytest.raises(errors.Unavailable, match="not trusted"):
                await under_name.list(NAMESPACES)


@pytest.mark.cluster
async def test_a_system_that_does_not_know_the_authority_refuses(access: Access) -> None:
    async with client(replace(access, trust=replace(access.trust, ca_pem=None))) as strict:
        with pytest.raises(errors.Unavailable, match="not trusted"):
            await strict.list(NAMESPACES)
    lax = replace(access, trust=replace(access.trust, ca_pem=None, verify=False))
    async with client(lax) as unverified:
        assert await unverified.list(NAMESPACES)


@pytest.mark.cluster
async def test_a_closed_client_leaves_no_connection(control_plane: ControlPlane) -> None:
    async with FaultProxy.start(control_plane) as proxy:
        async with client(await load_access(proxy.admin_kubeconfig)) as short_lived:
            await asyncio.gather(*(short_lived.list(NAMESPACES) for _ in range(5)))
            async with short_lived.watch(NAMESPACES):
                pass
        await eventually(lambda: not proxy._connections, "all connections are gone")


@pytest.mark.cluster
async def test_an_idle_connection_is_not_used_for_too_long(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load balancers forget idle connections without telling either side."""
    monkeypatch.setattr(connection, "IDLE_LIMIT", timedelta(0))
    async with (
        FaultProxy.start(control_plane) as proxy,
        client(await load_access(proxy.admin_kubeconfig)) as rested,
    ):
        await rested.list(NAMESPACES)
        first = set(proxy._connections)
        await rested.list(NAMESPACES)
        await eventually(lambda: first.isdisjoint(proxy._connections), "the first one is gone")


@pytest.mark.parametrize(
    ("server", "proxy", "hop"),
    [
        ("https://h", None, ("h", 443)),
        ("http://h", None, ("h", 80)),
        ("https://[fd00::1]:6443/base", None, ("fd00::1", 6443)),
        ("https://h", "http://u:p@proxy:3128", ("proxy", 3128)),
        ("https://h", "http://proxy", ("proxy", 80)),
    ],
)
def test_where_the_first_hop_goes(server: str, proxy: str | None, hop: tuple[str, int]) -> None:
    assert Origin.of(server, None, None, proxy).first_hop() == hop


@pytest.mark.cluster
async def test_a_path_before_the_apis_own_is_kept(access: Access) -> None:
    based = replace(access, server="https://rancher.example:8443/k8s/clusters/c-1")
    login = Login.of(based)
    assert login.base_path == "/k8s/clusters/c-1"
    assert login.headers.startswith("Host: rancher.example:8443\r\n")
