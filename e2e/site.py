"""Everything together: control plane, scheduler, node, and the Macs' networks around it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from devcluster import binaries, reaper
from devcluster.controlplane import ControlPlane, Options
from devcluster.process import Process
from e2e import addresses
from e2e.images import Images
from e2e.machine import End, Machine, link
from e2e.node import Node


@dataclass(slots=True)
class Site:
    """A running cluster with one node. Create it with `running`."""

    folder: Path
    cluster: ControlPlane
    node: Node
    stack: AsyncExitStack
    macs: dict[str, Machine] = field(default_factory=dict)

    def mac(self, name: str, *, tailnet: str | None = None) -> Machine:
        """A machine on a subnet of its own behind the node.

        `tailnet` is a further address that nobody else has a way to, like a tailnet's.
        """
        number = len(self.macs) + 1
        machine = Machine.start(name, self.folder / name)
        self.stack.push_async_callback(machine.stop)
        gateway = addresses.gateway(number)
        link(
            End(self.node.machine, f"mac{number}", f"{gateway}/24"),
            End(machine, "eth0", f"{addresses.mac(number)}/24"),
        )
        machine.run("ip", "route", "add", "default", "via", gateway)
        if tailnet:
            # A cable that ends in the same machine: up, and nobody beyond it.
            link(
                End(machine, "tailscale0", f"{tailnet}/32"),
                End(machine, "derp0", "169.254.100.1/32"),
            )
        self.macs[name] = machine
        return machine

    def address(self, name: str) -> str:
        """The address on the LAN of the Mac of that name."""
        return addresses.mac(1 + list(self.macs).index(name))


@asynccontextmanager
async def running(images: Images) -> AsyncIterator[Site]:
    """Start it all, and take it all away again."""
    folder = Path(tempfile.mkdtemp(prefix="llmkube-e2e-"))
    reaper.watch_folder(folder)
    try:
        async with AsyncExitStack() as stack:
            node = Node(folder / "node")
            stack.push_async_callback(node.stop)
            await asyncio.to_thread(_connect, node)
            options = _options(folder / "cluster")
            cluster = await stack.enter_async_context(ControlPlane.start(options))
            scheduler = _scheduler(cluster)
            stack.push_async_callback(scheduler.stop)
            await node.start(cluster, images)
            yield Site(folder, cluster, node, stack)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        reaper.forget_folder(folder)


def _options(folder: Path) -> Options:
    return Options(
        address=addresses.CONTROL_PLANE,
        folder=folder,
        service_cidr=str(addresses.SERVICES),
        apiserver_args=(
            # No node lifecycle controller is here to take the not-ready taint away again.
            "--disable-admission-plugins=TaintNodesByCondition",
            # For `kubectl logs`: how to find the kubelet, and who asks.
            "--kubelet-preferred-address-types=InternalIP",
            f"--kubelet-client-certificate={folder / 'admin.crt'}",
            f"--kubelet-client-key={folder / 'admin.key'}",
        ),
    )


def _connect(node: Node) -> None:
    """A cable to this machine, and the way back to pods and Macs. It all goes with the node."""
    node.prepare()
    link(
        End(None, "llmkube-e2e", f"{addresses.CONTROL_PLANE}/30"),
        End(node.machine, "uplink", f"{addresses.NODE}/30"),
    )
    for network in addresses.NETWORKS:
        subprocess.run(
            ["ip", "route", "add", str(network), "via", addresses.NODE], check=True, timeout=10
        )


def _scheduler(cluster: ControlPlane) -> Process:
    return Process.start(
        "kube-scheduler",
        [
            binaries.node()["kube-scheduler"],
            f"--kubeconfig={cluster.admin_kubeconfig}",
            "--leader-elect=false",
            "--secure-port=0",
        ],
        log=cluster.folder / "kube-scheduler.log",
    )
