"""The agent when its machine fails it: no disk, no network, a sleep. Real processes, real kernel.

What needs root (a small disk, a network namespace) is skipped without it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.agent.agent import Agent, AgentOptions
from llmkube.agent.httprules import Upstream
from llmkube.agent.settings import AgentSettings, HeartbeatSettings
from llmkube.agent.statedir import StateDir
from llmkube.clock import ZERO, SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.kubeconfig import current_token
from tests.support.agentprocess import Mac, register_mac
from tests.support.ports import free_port
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

# Of this process's own: test runs may share the machine.
LINK, SPACE = f"lka{os.getpid()}", f"llmkube-agent-{os.getpid()}"
OUTSIDE, INSIDE, MOVED = (f"10.231.{os.getpid() % 250}.{host}" for host in (1, 2, 6))


@pytest.fixture
async def mac(crds: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path) -> Mac:
    return await register_mac(crds, admin, namespace, tmp_path)


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield folder
    run("umount", "-l", str(folder))


def fill(folder: Path) -> Path:
    """Take the last byte of a disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return filler


async def test_a_full_disk_costs_the_renewal_and_nothing_else(mac: Mac, small_disk: Path) -> None:
    kubeconfig = small_disk / "kubeconfig"
    shutil.copy(mac.kubeconfig, kubeconfig)
    before = kubeconfig.read_bytes()
    filler = fill(small_disk)
    mac.kubeconfig = kubeconfig
    async with mac.agent() as agent:
        await agent.says("token not renewed", do="make room")
        await mac.beats.go_on()
        assert kubeconfig.read_bytes() == before
        assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "kubeconfig"]
        filler.unlink()
        await agent.says("token renewed", within=timedelta(seconds=120))
        assert current_token(kubeconfig).encode() not in before
        await mac.beats.go_on()


async def test_no_identity_is_made_on_a_full_disk(mac: Mac, small_disk: Path) -> None:
    state = small_disk / "state"
    state.mkdir(mode=0o700)
    (state / "lock").touch(0o600)
    filler = fill(small_disk)
    async with mac.agent("--state-dir", str(state)) as agent:
        assert await agent.process.wait() == 1
        assert "Make room on the disk" in agent.log.read_text()
    assert [path.name for path in state.iterdir()] == ["lock"]
    filler.unlink()
    async with mac.agent("--state-dir", str(state)):
        await mac.beats.go_on()


@pytest.fixture
def network() -> Iterator[None]:
    """A network namespace whose only way out is one virtual cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and iproute2")
    made = subprocess.run(["ip", "netns", "add", SPACE], capture_output=True)
    if made.returncode != 0:
        pytest.skip(f"no network namespaces here: {made.stderr.decode().strip()}")
    try:
        run("ip", "-n", SPACE, "link", "set", "lo", "up")
        plug(INSIDE)
        yield
    finally:
        run("ip", "link", "del", LINK, check=False)
        run("ip", "netns", "del", SPACE, check=False)


def plug(inside: str) -> None:
    """Connect the cable; the machine gets this address."""
    run("ip", "link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", SPACE)
    run("ip", "addr", "add", f"{OUTSIDE}/29", "dev", LINK)
    run("ip", "link", "set", LINK, "up")
    run("ip", "-n", SPACE, "addr", "add", f"{inside}/29", "dev", "eth0")
    run("ip", "-n", SPACE, "link", "set", "eth0", "up")


@asynccontextmanager
async def forwarded(port: int) -> AsyncIterator[int]:
    """Forward a port that the namespace can reach to one on this machine's loopback."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        both = [
            asyncio.ensure_future(pipe(reader, far_writer)),
            asyncio.ensure_future(pipe(far_reader, writer)),
        ]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)
        far_writer.transport.abort()
        writer.transport.abort()

    async with await asyncio.start_server(serve, "0.0.0.0", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.usefixtures("network")
async def test_a_network_that_goes_and_comes_back(mac: Mac) -> None:
    async with forwarded(int(mac.cluster.server.rpartition(":")[2])) as port:
        document = yaml.safe_load(mac.kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        cluster |= {"server": f"https://{OUTSIDE}:{port}", "tls-server-name": "localhost"}
        mac.kubeconfig.write_text(yaml.safe_dump(document))
        async with mac.agent(prefix=("ip", "netns", "exec", SPACE)) as agent:
            await mac.beats.go_on()
            assert await offered(mac) == {(INSIDE, "lan")}
            run("ip", "-n", SPACE, "link", "set", "eth0", "down")
            await agent.says("no heartbeat")
            run("ip", "-n", SPACE, "link", "set", "eth0", "up")
            await agent.says("beating again")
            await mac.beats.go_on()
            run("ip", "link", "del", LINK)
            await agent.says("no heartbeat")
            plug(MOVED)
            await agent.says("beating again")
            await eventually(lambda: moved(mac), "the new address is reported")
            assert agent.process.returncode is None


async def offered(mac: Mac) -> set[tuple[str, str]]:
    """The IPv4 candidates."""
    candidates = (await mac.beats.report()).candidates
    return {(c.address, c.source.value) for c in candidates if "." in c.address}


async def moved(mac: Mac) -> bool:
    return await offered(mac) == {(MOVED, "lan")}


class NappingClock(SystemClock):
    """The machine's clocks, and naps that only the boot clock notices."""

    __slots__ = ("napped",)

    def __init__(self) -> None:
        self.napped = ZERO

    def boottime(self) -> timedelta:
        return super().boottime() + self.napped


async def test_after_a_sleep_it_beats_and_renews_at_once(mac: Mac, tmp_path: Path) -> None:
    clock = NappingClock()
    rhythm = HeartbeatSettings(interval=timedelta(minutes=30), tick=timedelta(milliseconds=50))
    options = AgentOptions(
        kubeconfig=mac.kubeconfig,
        state_dir=tmp_path / "state",
        upstream=Upstream.parse("http://127.0.0.1:1"),
        ingress_port=free_port(),
        settings=replace(AgentSettings(), heartbeat=rhythm),
    )
    first = current_token(mac.kubeconfig)
    with StateDir.open(options.state_dir) as state:
        agent = Agent(options, state, clock)
        async with asyncio.TaskGroup() as group:
            group.create_task(agent.run())
            await eventually(mac.beats.stamp, "the first beat")
            await eventually(lambda: current_token(mac.kubeconfig) != first, "the first renewal")
            second = current_token(mac.kubeconfig)
            stamp = await mac.beats.stamp()
            clock.napped += timedelta(hours=8)

            async def woke() -> bool:
                return await mac.beats.stamp() > stamp

            await eventually(woke, "a beat right after the sleep")
            await eventually(lambda: current_token(mac.kubeconfig) != second, "another renewal")
            agent.stop()
