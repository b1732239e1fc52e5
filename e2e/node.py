"""A Kubernetes node: containerd, a bridge CNI and the real kubelet in a machine of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import timedelta
from pathlib import Path

from devcluster import binaries
from devcluster.controlplane import ControlPlane
from devcluster.process import Process, ProcessFailed
from e2e import addresses, cgroups
from e2e.images import PAUSE, Images
from e2e.machine import Machine
from e2e.requirements import CNI_PLUGINS

NAME = "e2e-node"
_READY_WITHIN = timedelta(minutes=2)
_END_WITHIN = timedelta(seconds=20)
_SOCKET = "/run/containerd/containerd.sock"

_CONTAINERD = """\
version = 2
root = "{folder}/containerd"
state = "/run/containerd"
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""

_CNI = {
    "cniVersion": "0.4.0",
    "name": "llmkube-e2e",
    "plugins": [
        {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "ipMasq": False,  # Macs and the control plane see pods by their own addresses
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": str(addresses.PODS)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


class Node:
    """The node. `prepare` its machine before the control plane, `start` it afterwards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = Machine.start(NAME, folder)
        self._cgroup = cgroups.own_name()
        self.kubelet: Process | None = None

    def prepare(self) -> None:
        """Folders that programs insist on become private; forwarding on."""
        for mount in ("/run", "/var/lib", "/var/log"):
            self.machine.run("mount", "-t", "tmpfs", "tmpfs", mount)
        self.machine.run("sysctl", "-q", "-w", "net.ipv4.ip_forward=1")

    async def start(self, cluster: ControlPlane, images: Images) -> None:
        """Start containerd and kubelet, and wait until the node is Ready."""
        self._stand_in_for_kube_proxy(cluster.port)
        await self._start_containerd()
        for role in ("pause", "controller", "verifier"):
            await asyncio.to_thread(self._import, images, role)
        self._start_kubelet(cluster)
        await self._wait_ready(cluster)

    async def stop(self) -> None:
        await self.machine.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_WITHIN.total_seconds()):
                while not await asyncio.to_thread(cgroups.remove, self._cgroup):
                    await asyncio.sleep(0.1)

    def tag(self, image: str, name: str) -> None:
        """Give an imported image the name that a manifest uses."""
        self._ctr("image", "tag", "--force", image, name)

    def _ctr(self, *argv: str | Path) -> str:
        prefix = ["ctr", f"--address={_SOCKET}", "--namespace=k8s.io"]
        return self.machine.run(*prefix, *argv, timeout=timedelta(minutes=2))

    def _import(self, images: Images, role: str) -> None:
        self._ctr("image", "import", images.archive(role))

    def _stand_in_for_kube_proxy(self, port: int) -> None:
        """The one service that pods here use: the API server's."""
        rule = ["-d", addresses.API_SERVICE, "-p", "tcp", "--dport", "443", "-j", "DNAT"]
        target = ["--to-destination", f"{addresses.CONTROL_PLANE}:{port}"]
        self.machine.run("iptables", "-t", "nat", "-A", "PREROUTING", *rule, *target)

    async def _start_containerd(self) -> None:
        (self.folder / "cni").mkdir()
        (self.folder / "cni" / "10-bridge.conflist").write_text(json.dumps(_CNI))
        config = self.folder / "containerd.toml"
        config.write_text(
            _CONTAINERD.format(folder=self.folder, socket=_SOCKET, pause=PAUSE, cni=CNI_PLUGINS)
        )
        process = self.machine.spawn("containerd", ["containerd", f"--config={config}"])
        async with asyncio.timeout(_READY_WITHIN.total_seconds()):
            while True:
                process.check_alive()
                with contextlib.suppress(ProcessFailed):
                    await asyncio.to_thread(self._ctr, "version")
                    return
                await asyncio.sleep(0.2)

    def _start_kubelet(self, cluster: ControlPlane) -> None:
        cgroups.make(self._cgroup)
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config(cluster)))
        self.kubelet = self.machine.spawn(
            "kubelet",
            [
                binaries.node()["kubelet"],
                f"--config={config}",
                f"--kubeconfig={cluster.admin_kubeconfig}",
                f"--hostname-override={NAME}",
                f"--node-ip={addresses.NODE}",
                f"--root-dir={self.folder / 'kubelet'}",
                f"--cert-dir={self.folder / 'kubelet-pki'}",
            ],
        )

    def _kubelet_config(self, cluster: ControlPlane) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"x509": {"clientCAFile": str(cluster.folder / "ca.crt")}},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._cgroup}",
            "containerRuntimeEndpoint": f"unix://{_SOCKET}",
            "enforceNodeAllocatable": [],
            "evictionHard": {"nodefs.available": "1%", "memory.available": "50Mi"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "nodeStatusReportFrequency": "10s",
            "podLogsDir": str(self.folder / "pod-logs"),
            "syncFrequency": "10s",
        }

    async def _wait_ready(self, cluster: ControlPlane) -> None:
        assert self.kubelet is not None
        async with asyncio.timeout(_READY_WITHIN.total_seconds()):
            while True:
                self.kubelet.check_alive()
                done = await cluster.kubectl(
                    "wait", "--for=condition=Ready", f"node/{NAME}", "--timeout=2s", check=False
                )
                if done.returncode == 0:
                    return
                await asyncio.sleep(0.5)
