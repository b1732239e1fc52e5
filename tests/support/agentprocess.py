"""The agent as a real process, as a user runs it, and its Mac's registration by the real CLI."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp

from devcluster.controlplane import ControlPlane
from llmkube.agent.identity import (
    CERTIFICATE_FILE,
    certificate_for,
    load_certificate,
    load_identity,
    open_identity,
)
from llmkube.agent.statedir import StateDir
from llmkube.api.names import REPORT_ANNOTATION
from llmkube.api.report import AgentReport, parse_report
from llmkube.kube.client import KubeClient
from llmkube.kube.kubeconfig import write_kubeconfig
from llmkube.kube.resources import LEASES, METALNODES
from tests.support.agents import TOKEN, UID, listening, trusting_context
from tests.support.ports import free_port
from tests.support.wait import eventually

ROOT = Path(__file__).resolve().parents[2]
GENEROUS = timedelta(seconds=60)
NAME = "mac-1"


async def llmkube(*args: str | Path, check: bool = True) -> str:
    """Run the `llmkube` command; its standard output."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "llmkube",
        *map(str, args),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert not check or child.returncode == 0, err.decode()
    return out.decode()


async def create_token(
    admin: Path, namespace: str, name: str, file: Path, *options: str, verb: str = "create"
) -> None:
    """`llmkube metal token create` (or rotate), as the admin would."""
    where = ("--kubeconfig", admin, "-n", namespace, "--output-file", file)
    await llmkube("metal", "token", verb, name, *where, "--overwrite", *options)


@dataclass
class AgentProcess:
    """A running agent."""

    process: asyncio.subprocess.Process
    port: int
    state: Path
    log: Path
    seen: int = field(default=0)

    def lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines() if line]

    async def says(self, event: str, *, within: timedelta = GENEROUS, **values: str) -> None:
        """Wait for a log line with that event, after those that were waited for before.

        A value is something that the line's field contains.
        """

        def found() -> bool:
            for number, line in enumerate(self.lines()[self.seen :], self.seen + 1):
                fits = all(text in str(line.get(key)) for key, text in values.items())
                if event in line["event"] and fits:
                    self.seen = number
                    return True
            return False

        try:
            await eventually(found, f"the agent says {event!r} {values}", within=within)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log.read_text()}") from None

    async def said(self, event: str) -> None:
        """Wait for a log line with that event, whatever came in between."""
        await eventually(
            lambda: any(event in line["event"] for line in self.lines()), f"it says {event!r}"
        )

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and wait; its exit code."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(GENEROUS.total_seconds()):
            return await self.process.wait()

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    async def served_certificate(self) -> bytes:
        """The DER certificate that the ingress shows now."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trusting_context())
        shown: ssl.SSLObject = writer.get_extra_info("ssl_object")
        der = shown.getpeercert(binary_form=True)
        writer.transport.abort()
        assert der is not None
        return der

    def pin(self) -> bytes:
        identity = load_identity(self.state)
        assert identity is not None
        return identity.spki

    def certificate_uid(self) -> str | None:
        identity = load_identity(self.state)
        if identity is None or not (self.state / CERTIFICATE_FILE).exists():
            return None
        certificate = load_certificate(self.state, identity)
        return certificate.uid if certificate else None


@asynccontextmanager
async def running_agent(
    folder: Path,
    kubeconfig: Path,
    *options: str,
    upstream: str = "http://127.0.0.1:1",
    port: int | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[AgentProcess]:
    """`llmkube agent` with its state and log in `folder`; killed at the end if it still runs."""
    folder.mkdir(exist_ok=True)
    port = port or free_port()
    state, log = folder / "state", folder / "agent.log"
    arguments = (
        *("--kubeconfig", kubeconfig, "--state-dir", state, "--upstream", upstream),
        *("--ingress-port", port, "--log-format", "json", "--heartbeat-interval", "1s"),
    )
    seen = len(log.read_text().splitlines()) if log.exists() else 0
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "llmkube",
            "agent",
            *map(str, arguments),
            *options,
            cwd=ROOT,
            stdout=sink,
            stderr=sink,
            env={**os.environ, "PYTHONWARNINGS": "default"},
        )
    agent = AgentProcess(process, port, state, log, seen)
    try:
        yield agent
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@dataclass
class Beats:
    """The Lease of one Mac, as the admin sees it."""

    admin: KubeClient
    namespace: str
    lease: str

    async def read(self) -> dict[str, Any]:
        return await self.admin.get(LEASES, self.lease, self.namespace)

    async def stamp(self) -> str:
        return str((await self.read()).get("spec", {}).get("renewTime", ""))

    async def go_on(self, *, within: timedelta = GENEROUS) -> None:
        """Until the Lease has been renewed once more."""
        before = await self.stamp()

        async def renewed() -> bool:
            return await self.stamp() > before

        await eventually(renewed, "the Lease is renewed", within=within)

    async def report(self) -> AgentReport:
        lease = await self.read()
        return parse_report(lease["metadata"]["annotations"][REPORT_ANNOTATION])


def claims(token: str) -> dict[str, Any]:
    """The payload of a JSON web token."""
    payload = token.split(".")[1]
    decoded: dict[str, Any] = json.loads(
        base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4))
    )
    return decoded


@dataclass
class Mac:
    """A registered Mac: its credential file, and its Lease."""

    cluster: ControlPlane
    admin: KubeClient
    namespace: str
    folder: Path
    kubeconfig: Path
    beats: Beats

    async def uid(self) -> str:
        node = await self.admin.get(METALNODES, NAME, self.namespace)
        return str(node["metadata"]["uid"])

    async def new_credential(self, file: Path | None = None, verb: str = "create") -> Path:
        file = file or self.kubeconfig
        await create_token(self.cluster.admin_kubeconfig, self.namespace, NAME, file, verb=verb)
        return file

    @asynccontextmanager
    async def agent(self, *options: str, **more: object) -> AsyncIterator[AgentProcess]:
        async with running_agent(
            self.folder / "agent",
            self.kubeconfig,
            *options,
            **more,  # type: ignore[arg-type]
        ) as agent:
            yield agent


async def register_mac(
    cluster: ControlPlane, admin: KubeClient, namespace: str, folder: Path
) -> Mac:
    """A Mac registered with the real `llmkube metal token create`."""
    beats = Beats(admin, namespace, f"llmkube-metal-{NAME}")
    mac = Mac(cluster, admin, namespace, folder, folder / "mac.kubeconfig", beats)
    await mac.new_credential()
    return mac


@asynccontextmanager
async def serving_agent(folder: Path, upstream: str) -> AsyncIterator[AgentProcess]:
    """An agent whose API server is away, serving with the certificate of an earlier run."""
    with StateDir.open(folder / "state") as state:
        certificate_for(state, open_identity(state), UID, datetime.now(UTC))
    token_file = folder / "relay-token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    kubeconfig = folder / "kubeconfig"
    write_kubeconfig(
        kubeconfig,
        server="https://127.0.0.1:1",
        ca_pem=None,
        namespace="default",
        user="mac",
        token="opaque",
    )
    options = ("--name", "mac", "--relay-token-file", str(token_file))
    async with running_agent(folder, kubeconfig, *options, upstream=upstream) as agent:
        await agent.says("ingress listens")
        await listening(agent.port)
        yield agent


@asynccontextmanager
async def client(agent: AgentProcess) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"https://127.0.0.1:{agent.port}",
        connector=aiohttp.TCPConnector(ssl=trusting_context(), limit=0),
        headers={"X-LLMKube-Relay-Token": TOKEN},
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        yield session
