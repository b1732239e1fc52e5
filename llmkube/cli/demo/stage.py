"""Everything that the demo puts up, and takes down again.

The programs are the ones that users run, as processes of their own: the controller with the rights
of config/rbac and nothing else, agents and edges with the credentials that `metal token create` and
`fleet register` make. Only the LLM behind the agents is a stand-in.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.cli.credentials import Credentials, write
from llmkube.cli.demo import hostile
from llmkube.cli.demo.installation import Installation, checkout
from llmkube.cli.fleet_registration import FleetOptions, register_site, unregister_site
from llmkube.cli.metal_credentials import (
    MetalTokenOptions,
    create_metal_token,
    revoke_metal_token,
)
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import NotFound
from llmkube.kube.resources import NAMESPACES

if TYPE_CHECKING:
    from devcluster.process import Process

NAMESPACE = "llmkube-demo"
MACS = ("studio", "mini", "macbook")
SITES = ("berlin", "osaka")
PUSH_INTERVAL = timedelta(seconds=5)
LOOPBACK = "127.0.0.0/8"

TUNING: Mapping[str, Any] = {
    "heartbeat": {"write_interval": "5s", "mirror_after": "5s"},
    "checks": {
        "spacing": "3s",
        "backoff": "3s",
        "backoff_cap": "15s",
        "intake": "3s",
        "trouble": "5s",
    },
}
"""The demo shows in seconds what takes minutes in production."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for. `kubeconfig` None: a local control plane of our own."""

    kubeconfig: Path | None = None
    context: str | None = None
    verifier_image: str | None = None
    audit_log: Path | None = None


@dataclass(slots=True)
class Stage:
    """The demo's cluster, programs and files. Create with `set_up`."""

    folder: Path
    installation: Installation
    client: KubeClient
    upstream: int
    settings: Settings
    tasks: asyncio.TaskGroup
    thief: asyncio.Task[None] | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)

    # Programs -----------------------------------------------------------------------------------

    async def start_controller(self) -> None:
        """The controller, under its own ServiceAccount."""
        config = self.folder / "controller.json"
        config.write_text(json.dumps(TUNING))
        kubeconfig = await self.installation.account_kubeconfig(
            SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT
        )
        flags = [
            f"--kubeconfig={kubeconfig}",
            f"--config={config}",
            "--leader-elect",
            "--metrics-bind-address=127.0.0.1:0",
            "--health-probe-bind-address=127.0.0.1:0",
        ]
        if self.settings.kubeconfig is None:
            flags.append(f"--allow-cidr={LOOPBACK}")
        if self.settings.verifier_image:
            flags.append(f"--verifier-image={self.settings.verifier_image}")
        self._start("controller", "controller", *flags)

    async def register_mac(self, name: str) -> None:
        """A MetalNode and a fresh credential file, as `llmkube metal token create` makes them."""
        options = MetalTokenOptions(name, NAMESPACE)
        await self._write(await create_metal_token(self.client, options), name)
        self.ports.setdefault(name, _free_port())

    async def revoke_mac(self, name: str) -> None:
        await revoke_metal_token(self.client, name, NAMESPACE)

    def start_agent(self, name: str) -> None:
        """The agent of one Mac, with its TLS ingress in front of the pretended LLM."""
        state = self.folder / f"{name}.state"
        relay_token = self.folder / f"{name}.relay-token"
        if not relay_token.exists():
            relay_token.touch(mode=0o600)
            relay_token.write_text(os.urandom(16).hex())
        host = ["--host-ip=127.0.0.1"] if self.settings.kubeconfig is None else []
        self._start(
            name,
            "agent",
            f"--kubeconfig={self.kubeconfig_of(name)}",
            f"--upstream=http://127.0.0.1:{self.upstream}",
            f"--relay-token-file={relay_token}",
            f"--ingress-port={self.ports[name]}",
            f"--state-dir={state}",
            "--heartbeat-interval=2s",
            "--lease-duration=15s",
            *host,
        )

    def forget_key(self, name: str) -> None:
        """Lose the Mac's identity on disk, as a re-installation does."""
        shutil.rmtree(self.folder / f"{name}.state")

    async def register_site(self, name: str) -> None:
        """A FederatedCluster and its credential, as `llmkube fleet register` makes them."""
        options = FleetOptions(
            name, display_name=name.capitalize(), heartbeat_interval=PUSH_INTERVAL
        )
        await self._write(await register_site(self.client, options), name)

    async def start_edge(self, name: str) -> None:
        """The edge of one site; both sites count this very cluster's nodes as theirs."""
        local = await self.installation.account_kubeconfig(SYSTEM_NAMESPACE, "llmkube-edge")
        self._start(
            name,
            "edge",
            f"--cluster-name={name}",
            f"--datacenter-kubeconfig={self.kubeconfig_of(name)}",
            f"--kubeconfig={local}",
            "--metrics-bind-address=0",
            "--health-probe-bind-address=0",
        )

    async def start_thief(self, name: str, lies: hostile.Lies) -> None:
        """Put a hostile agent in the place of that Mac's own. Raises ApiError."""
        await self.stop_thief()
        if name in self.processes:
            await self.stop(name)
        kubeconfig = self.kubeconfig_of(name)
        await hostile.lie(kubeconfig, name, NAMESPACE, lies)
        lying = hostile.keep_lying(kubeconfig, name, NAMESPACE, lies)
        self.thief = self.tasks.create_task(lying, name="thief")

    async def stop_thief(self) -> None:
        if self.thief is not None:
            self.thief.cancel()
            self.thief = None

    async def kill(self, name: str) -> None:
        """SIGKILL: a crash, a power cut."""
        await self.processes.pop(name).kill()

    async def stop(self, name: str) -> None:
        """SIGTERM: a clean end."""
        await self.processes.pop(name).stop()

    def kubeconfig_of(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"

    async def _write(self, credentials: Credentials, name: str) -> None:
        await asyncio.to_thread(write, credentials, self.kubeconfig_of(name))

    def _start(self, name: str, *command: str) -> None:
        from devcluster.process import Process

        log = self.folder / f"{name}.log"
        argv = [sys.executable, "-m", "llmkube", *command, "--log-format=json"]
        self.processes[name] = Process.start(name, argv, log=log)

    def check_alive(self) -> None:
        """Raise ProcessFailed, with its last words, if one of the programs ended by itself."""
        for name, process in list(self.processes.items()):
            if process.returncode is not None:
                del self.processes[name]
                process.check_alive()

    # Up and down --------------------------------------------------------------------------------

    async def open(self) -> None:
        """Register and start everything."""
        body = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": NAMESPACE,
                "labels": {"pod-security.kubernetes.io/enforce": "restricted"},
            },
        }
        await self.client.apply(NAMESPACES, body, field_manager="llmkube-demo")
        await self.start_controller()
        for name in MACS:
            await self.register_mac(name)
            self.start_agent(name)
        for name in SITES:
            await self.register_site(name)
            await self.start_edge(name)

    async def close(self) -> None:
        """Stop everything; in a cluster that is not ours, remove what we made there, too."""
        await self.stop_thief()
        await asyncio.gather(*(process.stop() for process in self.processes.values()))
        self.processes.clear()
        if self.settings.kubeconfig is not None:
            for name in SITES:
                await unregister_site(self.client, name, None)
            try:
                await self.client.delete(NAMESPACES, NAMESPACE)
            except NotFound:
                return


@asynccontextmanager
async def set_up(settings: Settings) -> AsyncIterator[Stage]:
    """Everything installed and running while the block runs. Raises ConfigError, ProcessFailed."""
    checkout()
    from devcluster import reaper

    async with AsyncExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="llmkube-demo-"))
        reaper.watch_folder(folder)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        installation = await stack.enter_async_context(
            Installation.open(
                folder,
                settings.kubeconfig,
                context=settings.context,
                audit_log=settings.audit_log,
            )
        )
        await installation.install()
        access = await load_access(installation.kubeconfig, settings.context)
        client = await stack.enter_async_context(KubeClient(access, clock=SystemClock()))
        upstream = await stack.enter_async_context(_pretended_llm())
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        stage = Stage(folder, installation, client, upstream, settings, tasks)
        stack.push_async_callback(stage.close)
        await stage.open()
        yield stage


@asynccontextmanager
async def _pretended_llm() -> AsyncIterator[int]:
    """An HTTP server in the place of llama.cpp; yields its port."""

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"choices": [{"message": {"content": "Hello from a Mac."}}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
