"""Macs: machines on their own subnets with the real agent, joined by a token file."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from devcluster.process import Process, ProcessFailed
from e2e.machine import Machine
from e2e.site import Site

ROOT = Path(__file__).resolve().parent.parent
INGRESS_PORT = 9443
NAMESPACE = "macs"
TAILNET = "100.101.2.3"
"""An address of the laptop that the pod network has no way to."""


@dataclass(slots=True)
class Mac:
    """A joined Mac."""

    name: str
    namespace: str
    machine: Machine
    kubeconfig: Path
    agent: Process


async def llmkube(site: Site, *argv: str) -> str:
    """Run the command line as the admin; what it printed. Raises ProcessFailed."""
    env = {**os.environ, "KUBECONFIG": str(site.cluster.admin_kubeconfig)}
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "llmkube", *argv],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode:
        raise ProcessFailed(f"llmkube {' '.join(argv)}: {done.stderr}")
    return done.stdout + done.stderr


async def join(
    site: Site, name: str, namespace: str, *options: str, tailnet: str | None = None
) -> Mac:
    """Make a machine, a credential (`options` go to `metal token create`), and start the agent."""
    machine = await asyncio.to_thread(site.mac, name, tailnet=tailnet)
    kubeconfig = machine.folder / "kubeconfig"
    await llmkube(
        site, "metal", "token", "create", name, "-n", namespace, "-o", str(kubeconfig), *options
    )
    return Mac(name, namespace, machine, kubeconfig, start_agent(machine, kubeconfig))


def start_agent(machine: Machine, kubeconfig: Path) -> Process:
    """The agent, as launchd or systemd would start it."""
    command = [sys.executable, "-m", "llmkube", "agent", "--upstream=http://127.0.0.1:8080"]
    command += [f"--kubeconfig={kubeconfig}", f"--state-dir={machine.folder / 'state'}"]
    command += [f"--ingress-port={INGRESS_PORT}", "--heartbeat-interval=5s"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(machine.folder)}
    return machine.spawn("agent", command, env=env)


def drop_incoming(mac: Mac) -> None:
    """A firewall in front of the ingress that says nothing at all."""
    rule = ["-p", "tcp", "--dport", str(INGRESS_PORT), "-j", "DROP"]
    mac.machine.run("iptables", "-A", "INPUT", *rule)
