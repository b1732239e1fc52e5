"""Everything together: control plane, scheduler, node, and the Macs' networks around it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from devcluster import binaries, reaper
from devcluster.controlplane import ControlPlane, Options
from devcluster.process import Process
from e2e import addresses
from e2e.images import Images
from e2e.machine import Machine, link
from e2e.node import Node


@dataclass(slots=True)
class Site:
    """A running cluster with one node. Create it with `running`."""

    folder: Path
    cluster: ControlPlane
    node: Node
    stack: AsyncExitStack
    macs: dict[str, Machine] = field(default_factory=dict)

    async def mac(self, name: str, *, extra: tuple[str, ...] = ()) -> Machine:
        """A machine on a subnet of its own behind the node; `extra` addresses lead nowhere."""
        number = len(self.macs) + 1
        machine = Machine.start(name, self.folder / name)
        self.stack.push_async_callback(machine.stop)
        gateway = f"10.213.{number}.1"
        link(self.node.machine, machine, f"mac{number}", (f"{gateway}/24", f"{address(number)}/24"))
        machine.run("ip", "route", "add", "default", "via", gateway)
        for one in extra:
            machine.run("ip", "address", "add", one, "dev", f"mac{number}")
        self.macs[name] = machine
        return machine


def address(number: int) -> str:
    """The address of the Mac that joined as number `number`, from 1."""
    return f"10.213.{number}.10"


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
            options = Options(
                address=addresses.CONTROL_PLANE,
                folder=folder / "cluster",
                service_cidr=str(addresses.SERVICES),
                # Nobody here takes the not-ready taint away again: it is the cloud's business.
                apiserver_args=("--disable-admission-plugins=TaintNodesByCondition",),
            )
            cluster = await stack.enter_async_context(ControlPlane.start(options))
            scheduler = _scheduler(cluster)
            stack.push_async_callback(scheduler.stop)
            await node.start(cluster, images)
            yield Site(folder, cluster, node, stack)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        reaper.forget_folder(folder)


def _connect(node: Node) -> None:
    """A cable to this machine, and the way back to pods and Macs. It all goes with the node."""
    node.prepare()
    own, far = f"{addresses.CONTROL_PLANE}/30", f"{addresses.NODE}/30"
    link(None, node.machine, "uplink", (own, far))
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


GRACE = timedelta(minutes=2)
"""How long a proof waits for something that takes seconds on an idle machine."""
