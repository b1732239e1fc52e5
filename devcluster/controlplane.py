"""etcd, kube-apiserver and kube-controller-manager as child processes, with TLS and RBAC.

`async with ControlPlane.start() as cluster:` takes about three seconds and yields a real API
server on a free loopback port, with an admin kubeconfig, ServiceAccount tokens, garbage collection
and namespace deletion. Read `binaries` for where the programs come from and `kubelet` for what
runs the pods.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from devcluster import binaries, kubectl, pki, reaper
from devcluster.process import Process, ProcessFailed

_READY_WITHIN = timedelta(seconds=90)
_STARTS = 3
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}

_CONTROLLERS = (
    "clusterrole-aggregation-controller",
    "deployment-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "pod-garbage-collector-controller",
    "replicaset-controller",
    "resourcequota-controller",
    "root-ca-certificate-publisher-controller",
    "serviceaccount-controller",
    "serviceaccount-token-controller",
    "validatingadmissionpolicy-status-controller",
)


@dataclass(frozen=True, slots=True)
class Options:
    """How to start a control plane.

    `address` is where the API server listens, `hosts` further names in its certificate; `audit`
    writes every request to `ControlPlane.audit_log`; `folder` keeps the data (a temporary folder,
    removed at the end, if None).
    """

    address: str = "127.0.0.1"
    hosts: Sequence[str] = ()
    audit: bool = False
    folder: Path | None = None
    apiserver_args: Sequence[str] = ()
    etcd_args: Sequence[str] = ()
    service_cidr: str = "10.96.0.0/16"


@dataclass(slots=True)
class ControlPlane:
    """A running control plane. Create it with `ControlPlane.start`."""

    options: Options
    folder: Path
    programs: dict[str, Path]
    port: int = 0
    etcd_port: int = 0
    ca_pem: bytes = b""
    _processes: dict[str, Process] = field(default_factory=dict)

    @staticmethod
    @asynccontextmanager
    async def start(options: Options | None = None) -> AsyncIterator[ControlPlane]:
        """Start everything, yield it ready, and stop it in the right order whatever happens."""
        options = options or Options()
        programs = await asyncio.to_thread(binaries.control_plane)
        folder = options.folder or Path(tempfile.mkdtemp(prefix="llmkube-cluster-"))
        folder.mkdir(parents=True, exist_ok=True)
        if options.folder is None:
            reaper.watch_folder(folder)
        cluster = ControlPlane(options, folder, programs)
        try:
            cluster._write_keys()
            await cluster._start_all()
            yield cluster
        finally:
            await cluster.stop()
            if options.folder is None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                reaper.forget_folder(folder)

    # What a caller needs ------------------------------------------------------------------------

    @property
    def server(self) -> str:
        """The API server's URL."""
        return f"https://{self.options.address}:{self.port}"

    @property
    def admin_kubeconfig(self) -> Path:
        """A kubeconfig of a cluster-admin (group system:masters)."""
        return self.folder / "admin.kubeconfig"

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    async def kubectl(
        self,
        *args: str,
        stdin: str | None = None,
        check: bool = True,
        kubeconfig: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl, as admin unless another kubeconfig is given.

        Raises ProcessFailed with kubectl's own words if it fails and `check` is set.
        """
        return await kubectl.run(
            kubeconfig or self.admin_kubeconfig,
            *args,
            stdin=stdin,
            check=check,
            cache=self.folder / "kubectl",
        )

    async def service_account_kubeconfig(
        self, namespace: str, name: str, *, server: str | None = None, ca_pem: bytes | None = None
    ) -> Path:
        """A kubeconfig with a fresh one-hour token of that account.

        `server` and `ca_pem` point it at something in between, such as a fault proxy.
        """
        token = await self.kubectl("create", "token", name, "-n", namespace, "--duration=1h")
        path = self.folder / f"{namespace}-{name}-{os.urandom(4).hex()}.kubeconfig"
        user = {"token": token.stdout.strip()}
        document = _kubeconfig(server or self.server, ca_pem or self.ca_pem, user, namespace)
        return pki.write_private(path, document)

    # Disturbances that tests play ---------------------------------------------------------------

    async def stop_apiserver(self) -> None:
        """Stop the API server; the rest goes on."""
        await self._stop("kube-apiserver")

    async def start_apiserver(self) -> None:
        """Start the API server again at the same port and wait until it is ready."""
        self._start("kube-apiserver", self._apiserver_command())
        await self._wait_ready()

    def pause_apiserver(self) -> None:
        """Freeze it: connections are accepted by the kernel, and nothing answers."""
        self._processes["kube-apiserver"].signal(signal.SIGSTOP)

    def resume_apiserver(self) -> None:
        self._processes["kube-apiserver"].signal(signal.SIGCONT)

    async def etcd_compact(self) -> int:
        """Compact etcd to its present revision and return that revision."""
        revision = await asyncio.to_thread(self._etcd_revision)
        await asyncio.to_thread(
            self._etcd, "/v3/kv/compaction", {"revision": revision, "physical": True}
        )
        return revision

    # Starting and stopping ----------------------------------------------------------------------

    async def _start_all(self) -> None:
        for attempt in range(1, _STARTS + 1):
            self.port, self.etcd_port, peer_port = _free_ports(3)
            try:
                self._start("etcd", self._etcd_command(peer_port))
                await self._wait_for_etcd()
                self._start("kube-apiserver", self._apiserver_command())
                await self._wait_ready()
                break
            except ProcessFailed as error:
                # Somebody else may have taken a port between our look and the bind.
                if attempt == _STARTS or "address already in use" not in str(error):
                    raise
                await self.stop()
        self._write_admin_kubeconfig()
        if "kube-controller-manager" in self.programs:
            self._start("kube-controller-manager", self._controller_manager_command())
            await self._wait_for_default_account()

    async def stop(self) -> None:
        """Clients first, etcd last: without etcd the API server takes minutes to exit."""
        for name in ("kube-controller-manager", "kube-apiserver", "etcd"):
            await self._stop(name)

    def _start(self, name: str, command: Sequence[str | Path]) -> None:
        log = self.folder / f"{name}.log"
        self._processes[name] = Process.start(name, command, log=log)

    async def _stop(self, name: str) -> None:
        if process := self._processes.pop(name, None):
            # The API server waits on SIGTERM for watches that nobody closes: not longer than this.
            await process.stop(grace=timedelta(seconds=3))

    def _write_keys(self) -> None:
        authority = pki.Authority("llmkube-devcluster")
        self.ca_pem = authority.pem
        (self.folder / "ca.crt").write_bytes(authority.pem)
        hosts = ["127.0.0.1", "localhost", self.options.address, *self.options.hosts]
        hosts += ["kubernetes.default.svc", _first_host(self.options.service_cidr)]
        certificate, key = authority.issue("kube-apiserver", hosts=sorted(set(hosts)))
        (self.folder / "apiserver.crt").write_bytes(certificate)
        pki.write_private(self.folder / "apiserver.key", key)
        admin, admin_key = authority.issue("admin", organization="system:masters")
        (self.folder / "admin.crt").write_bytes(admin)
        pki.write_private(self.folder / "admin.key", admin_key)
        signing_key = pki.private_pem(ec.generate_private_key(ec.SECP256R1()))
        pki.write_private(self.folder / "service-account.key", signing_key)
        (self.folder / "audit-policy.json").write_text(json.dumps(_AUDIT_POLICY))

    def _write_admin_kubeconfig(self) -> None:
        user = {
            "client-certificate": str(self.folder / "admin.crt"),
            "client-key": str(self.folder / "admin.key"),
        }
        pki.write_private(
            self.admin_kubeconfig, _kubeconfig(self.server, self.ca_pem, user, "default")
        )

    def _etcd_command(self, peer_port: int) -> list[str | Path]:
        client, peer = f"http://127.0.0.1:{self.etcd_port}", f"http://127.0.0.1:{peer_port}"
        return [
            self.programs["etcd"],
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            *self.options.etcd_args,
        ]

    def _apiserver_command(self) -> list[str | Path]:
        folder = self.folder
        command: list[str | Path] = [
            self.programs["kube-apiserver"],
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.options.address}",
            f"--secure-port={self.port}",
            f"--cert-dir={folder}",
            f"--tls-cert-file={folder / 'apiserver.crt'}",
            f"--tls-private-key-file={folder / 'apiserver.key'}",
            f"--client-ca-file={folder / 'ca.crt'}",
            "--authorization-mode=Node,RBAC",
            # As on every real cluster: what forbids privileged pods is admission, not this flag.
            "--allow-privileged=true",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'service-account.key'}",
            f"--service-account-signing-key-file={folder / 'service-account.key'}",
            f"--service-cluster-ip-range={self.options.service_cidr}",
            # Clients go away with their connection; a test that restarts us must not wait for them.
            "--shutdown-delay-duration=0s",
        ]
        if self.options.audit:
            command += [
                f"--audit-policy-file={folder / 'audit-policy.json'}",
                f"--audit-log-path={self.audit_log}",
            ]
        return [*command, *self.options.apiserver_args]

    def _controller_manager_command(self) -> list[str | Path]:
        return [
            self.programs["kube-controller-manager"],
            f"--kubeconfig={self.admin_kubeconfig}",
            f"--root-ca-file={self.folder / 'ca.crt'}",
            f"--service-account-private-key-file={self.folder / 'service-account.key'}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            "--secure-port=0",
            f"--controllers={','.join(_CONTROLLERS)}",
            "--kube-api-qps=500",
            "--kube-api-burst=1000",
        ]

    async def _wait_for_etcd(self) -> None:
        await self._until("etcd", self._etcd_revision)

    async def _wait_ready(self) -> None:
        await self._until("kube-apiserver", lambda: self._https("/readyz"))

    async def _wait_for_default_account(self) -> None:
        await self._until(
            "kube-controller-manager",
            lambda: self._https("/api/v1/namespaces/default/serviceaccounts/default"),
        )

    async def _until(self, name: str, probe: Callable[[], object]) -> None:
        """Wait until `probe` stops raising OSError; fail at once if the program ends."""
        try:
            async with asyncio.timeout(_READY_WITHIN.total_seconds()):
                while True:
                    self._processes[name].check_alive()
                    try:
                        await asyncio.to_thread(probe)
                        return
                    except OSError:
                        await asyncio.sleep(0.05)
        except TimeoutError:
            tail = self._processes[name].tail()
            raise ProcessFailed(f"{name} is not ready after {_READY_WITHIN}:\n{tail}") from None

    def _https(self, path: str) -> bytes:
        context = ssl.create_default_context(cadata=self.ca_pem.decode())
        context.load_cert_chain(self.folder / "admin.crt", self.folder / "admin.key")
        with urllib.request.urlopen(self.server + path, timeout=5, context=context) as answer:
            return bytes(answer.read())

    def _etcd(self, path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.etcd_port}{path}", data=json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return dict(json.load(answer))

    def _etcd_revision(self) -> int:
        answer = self._etcd("/v3/kv/range", {"key": "Lw==", "limit": 1})
        return int(answer["header"]["revision"])


def _kubeconfig(server: str, ca_pem: bytes, user: dict[str, str], namespace: str) -> bytes:
    ca = base64.b64encode(ca_pem).decode()
    context = {"cluster": "llmkube", "user": "user", "namespace": namespace}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "llmkube",
        "clusters": [
            {"name": "llmkube", "cluster": {"server": server, "certificate-authority-data": ca}}
        ],
        "users": [{"name": "user", "user": user}],
        "contexts": [{"name": "llmkube", "context": context}],
    }
    return json.dumps(document, indent=1).encode()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _first_host(cidr: str) -> str:
    return str(ipaddress.ip_network(cidr)[1])
