"""The real `llmkube edge` process between two real API servers, through every trouble.

The datacenter is the session's control plane, with the shipped rights and admission policies; the
edge's own cluster is another one, which these tests may stop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from llmkube.cli.credentials import TokenOptions, write
from llmkube.cli.fleet_registration import (
    FleetOptions,
    register_site,
    rotate_site,
    unregister_site,
)
from llmkube.cli.ownership import find
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError
from llmkube.kube.kubeconfig import current_token
from llmkube.kube.resources import (
    CRDS,
    FEDERATEDCLUSTERS,
    INFERENCESERVICES,
    MODELS,
    NODES,
    Resource,
)
from llmkube.rules.phase import PhaseSettings
from tests.support.command import Running, run_llmkube, running_llmkube
from tests.support.faultproxy import Drop, FaultProxy
from tests.support.hubs import running_hub
from tests.support.ports import free_port
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

RBAC = Path(__file__).parent.parent / "config" / "edge" / "rbac.yaml"
INTERVAL = timedelta(seconds=5)
MICRO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


# The edge's own cluster ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Site:
    """The edge's own cluster: one account with the shipped rights, one without any."""

    cluster: ControlPlane
    edge: Path
    nobody: Path


@pytest.fixture(scope="module")
def local() -> Iterator[Site]:
    with asyncio.Runner() as runner:
        starting = ControlPlane.start()
        cluster = runner.run(starting.__aenter__())
        try:
            yield runner.run(prepare(cluster))
        finally:
            runner.run(starting.__aexit__(None, None, None))


async def prepare(cluster: ControlPlane) -> Site:
    await cluster.kubectl("create", "namespace", SYSTEM_NAMESPACE)
    await cluster.kubectl("-n", SYSTEM_NAMESPACE, "apply", "-f", str(RBAC))
    async with opened(cluster.admin_kubeconfig) as admin:
        for number, ready in ((1, "True"), (2, "False")):
            await make_node(admin, f"node-{number}", ready)
    return Site(
        cluster,
        await cluster.service_account_kubeconfig(SYSTEM_NAMESPACE, "llmkube-edge"),
        await cluster.service_account_kubeconfig("default", "default"),
    )


@asynccontextmanager
async def opened(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    async with KubeClient(await load_access(kubeconfig), clock=SystemClock()) as client:
        yield client


async def make_node(admin: KubeClient, name: str, ready: str) -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    await admin.create(NODES, node)
    gpus = {"nvidia.com/gpu": "4", "amd.com/gpu": "1", "cpu": "8"}
    status = {
        "capacity": gpus,
        "allocatable": gpus,
        "conditions": [{"type": "Ready", "status": ready}],
    }
    await admin.merge_patch(NODES, name, None, {"status": status}, subresource="status")
    # The API server taints a new node as not ready, which is not our "unschedulable".


async def install_inference_kinds(admin: KubeClient) -> None:
    for resource in (MODELS, INFERENCESERVICES):
        schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        version = {
            "name": resource.version,
            "served": True,
            "storage": True,
            "schema": {"openAPIV3Schema": schema},
        }
        name = f"{resource.plural}.{resource.group}"
        spec = {
            "group": resource.group,
            "scope": "Namespaced",
            "names": {
                "plural": resource.plural,
                "singular": resource.kind.lower(),
                "kind": resource.kind,
                "listKind": f"{resource.kind}List",
            },
            "versions": [version],
        }
        await admin.create(
            CRDS,
            {
                "apiVersion": CRDS.api_version,
                "kind": CRDS.kind,
                "metadata": {"name": name},
                "spec": spec,
            },
        )
    for resource in (MODELS, INFERENCESERVICES):
        await eventually(lambda r=resource: served(admin, r), f"{resource.kind} is served")


async def served(admin: KubeClient, resource: Resource) -> bool:
    try:
        await admin.list(resource)
    except ApiError:
        return False
    return True


async def make_inference_objects(admin: KubeClient) -> None:
    for resource, phases in (
        (MODELS, ("Ready", "Downloading")),
        (INFERENCESERVICES, ("Ready", "Ready", "Failed", "Creating")),
    ):
        for number, phase in enumerate(phases):
            body = {
                "apiVersion": resource.api_version,
                "kind": resource.kind,
                "metadata": {"name": f"object-{number}"},
                "status": {"phase": phase},
            }
            await admin.create(resource, body, "default")


# The edge --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Registered:
    """A site in the datacenter, and its credential."""

    name: str
    file: Path
    admin: KubeClient

    async def object(self) -> dict[str, Any]:
        return await self.admin.get(FEDERATEDCLUSTERS, self.name)

    async def status(self) -> dict[str, Any]:
        return (await self.object()).get("status") or {}

    async def stamp(self) -> str:
        return str((await self.status()).get("lastHeartbeatTime", ""))

    async def next_push(
        self, within: timedelta = timedelta(seconds=30), *, after: str | None = None
    ) -> dict[str, Any]:
        """The status of the first push from now on, or after the one with that stamp."""
        before = await self.stamp() if after is None else after

        async def moved() -> dict[str, Any] | None:
            status = await self.status()
            return status if status.get("lastHeartbeatTime", "") != before else None

        found = await eventually(moved, "a push", within=within)
        assert found is not None
        return found


@pytest.fixture
async def site(
    admin: KubeClient, unique: Callable[[str], str], tmp_path: Path
) -> AsyncIterator[Registered]:
    name = unique("edge")
    credentials = await register_site(admin, FleetOptions(name, heartbeat_interval=INTERVAL))
    write(credentials, tmp_path / "datacenter.kubeconfig")
    yield Registered(name, tmp_path / "datacenter.kubeconfig", admin)
    if await find(admin, FEDERATEDCLUSTERS, name) is not None:
        await unregister_site(admin, name, None)


@asynccontextmanager
async def edge(
    site: Registered, local_kubeconfig: Path, tmp_path: Path, *more: str
) -> AsyncIterator[Running]:
    arguments = [
        *("edge", "--cluster-name", site.name, "--datacenter-kubeconfig", str(site.file)),
        *("--kubeconfig", str(local_kubeconfig)),
        *("--metrics-bind-address", "0", "--health-probe-bind-address", "0", *more),
    ]
    async with running_llmkube(arguments, log=tmp_path / "edge.log") as running:
        yield running
        assert "Traceback" not in running.text
        assert "eyJ" not in running.text


async def answer(port: int, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as got:
                return got.status, got.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    return await asyncio.to_thread(ask)


# Tests; those before the kinds exist come first -------------------------------------------------


async def phases_seen(sites: Sequence[Registered], during: timedelta) -> set[str]:
    """Every phase that any of the sites had meanwhile."""
    seen = set()
    with suppress(TimeoutError):
        async with asyncio.timeout(during.total_seconds()):
            while True:
                seen |= {str((await site.status()).get("phase")) for site in sites}
                await asyncio.sleep(0.2)
    return seen


@pytest.mark.parametrize(
    "arguments",
    [
        ("fleet", "register", "a-site"),
        ("fleet", "status"),
        ("fleet", "unregister", "a-site"),
        ("metal", "token", "create", "mac-1"),
        ("metal", "token", "list"),
        ("metal", "list"),
        ("metal", "describe", "mac-1"),
        ("metal", "verify", "mac-1"),
    ],
    ids=" ".join,
)
async def test_a_cluster_without_our_kinds_is_told_apart_from_a_missing_object(
    arguments: tuple[str, ...], local: Site, tmp_path: Path
) -> None:
    kubeconfig = local.cluster.admin_kubeconfig
    ran = await run_llmkube(*arguments, kubeconfig=kubeconfig, cwd=tmp_path)
    assert (ran.code, ran.out) == (3, "")
    assert "kubectl apply --server-side -k config/crd" in ran.err
    assert ran.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
async def test_edges_with_partial_sources_stay_connected_and_a_killed_one_comes_back(
    admin: KubeClient,
    client_for: Callable[[str, str], Awaitable[KubeClient]],
    local: Site,
    tmp_path: Path,
) -> None:
    """With the hub as its own account: one edge without our kinds, one that may list nothing."""
    hub = await client_for(SYSTEM_NAMESPACE, CONTROLLER_ACCOUNT)
    sites = []
    for name in ("no-kinds", "no-rights"):
        file = tmp_path / name
        options = FleetOptions(name, heartbeat_interval=INTERVAL)
        write(await register_site(admin, options), file)
        sites.append(Registered(name, file, admin))

    async def all_are(phase: str, *which: Registered) -> bool:
        return all([(await site.status()).get("phase") == phase for site in which])

    async with (
        running_hub(hub, settings=PhaseSettings()),
        edge(sites[1], local.nobody, tmp_path),
    ):
        async with edge(sites[0], local.edge, tmp_path) as running:
            await eventually(lambda: all_are("Connected", *sites), "both are Connected")
            assert await phases_seen(sites, 4 * INTERVAL) == {"Connected"}
            await running.stop(signal.SIGKILL)
            within = timedelta(seconds=60)
            await eventually(lambda: all_are("Stale", sites[0]), "Stale", within=within)
        async with edge(sites[0], local.edge, tmp_path):
            await eventually(lambda: all_are("Connected", *sites), "back on the next push")
    for site in sites:
        await unregister_site(admin, site.name, None)


async def test_without_models_and_services_the_rest_is_pushed_and_they_come_when_installed(
    site: Registered, local: Site, tmp_path: Path
) -> None:
    async with edge(site, local.edge, tmp_path) as running:
        status = await site.next_push()
        assert MICRO.fullmatch(status["lastHeartbeatTime"])
        assert status["observedVersion"] == "v0.1.0"
        assert status["capacity"] == {"nodes": 2, "gpusTotal": 10, "gpusAllocatable": 5}
        assert "inference" not in status
        assert "phase" not in status
        managers = {
            entry["manager"]
            for entry in (await site.object())["metadata"]["managedFields"]
            if entry.get("subresource") == "status"
        }
        assert managers == {"llmkube-edge"}

        async with opened(local.cluster.admin_kubeconfig) as there:
            await install_inference_kinds(there)
            await make_inference_objects(there)
        expected = {"models": 2, "servicesTotal": 4, "servicesReady": 2, "servicesFailed": 1}

        async def counted() -> bool:
            return (await site.status()).get("inference") == expected

        await eventually(counted, "Models and InferenceServices are counted")
        assert await running.stop() == 0


async def test_without_the_right_to_list_anything_the_heartbeat_goes_out(
    site: Registered, local: Site, tmp_path: Path
) -> None:
    async with edge(site, local.nobody, tmp_path):
        for _ in range(2):
            status = await site.next_push()
            assert set(status) == {"lastHeartbeatTime", "observedVersion"}


@pytest.mark.slow
async def test_while_its_own_cluster_is_away_the_last_good_values_are_repeated(
    site: Registered, local: Site, tmp_path: Path
) -> None:
    """Also by an edge that was restarted meanwhile: it asks the datacenter what it said last."""
    async with edge(site, local.edge, tmp_path) as running:
        before = await site.next_push()
        await local.cluster.stop_apiserver()
        try:
            for _ in range(2):
                during = await site.next_push()
            assert during["capacity"] == before["capacity"]
            assert during["inference"] == before["inference"]
            await running.stop(signal.SIGKILL)
            async with edge(site, local.edge, tmp_path):
                after = await site.next_push()
                assert after["capacity"] == before["capacity"]
                assert after["inference"] == before["inference"]
        finally:
            await local.cluster.start_apiserver()


async def test_killed_and_started_again_it_pushes_at_once(
    site: Registered, local: Site, tmp_path: Path
) -> None:
    async with edge(site, local.edge, tmp_path) as running:
        await site.next_push()
        await running.stop(signal.SIGKILL)
    body = {"spec": {"heartbeatIntervalSeconds": 3600}}
    await site.admin.merge_patch(FEDERATEDCLUSTERS, site.name, None, body)
    async with edge(site, local.edge, tmp_path) as running:
        await site.next_push()
        assert await running.stop(signal.SIGINT) == 0


@pytest.mark.slow
async def test_a_changed_interval_is_followed(
    site: Registered, local: Site, tmp_path: Path
) -> None:
    body: dict[str, Any] = {"spec": {"heartbeatIntervalSeconds": 3600}}
    await site.admin.merge_patch(FEDERATEDCLUSTERS, site.name, None, body)
    async with edge(site, local.edge, tmp_path) as running:
        stamp = (await site.next_push())["lastHeartbeatTime"]
        await asyncio.sleep(2 * INTERVAL.total_seconds())
        assert await site.stamp() == stamp
        await running.stop()
    body["spec"]["heartbeatIntervalSeconds"] = 5
    await site.admin.merge_patch(FEDERATEDCLUSTERS, site.name, None, body)
    async with edge(site, local.edge, tmp_path):
        for _ in range(3):
            await site.next_push()


async def test_it_outlives_an_outage_of_the_datacenter(
    admin: KubeClient,
    control_plane: ControlPlane,
    site: Registered,
    local: Site,
    tmp_path: Path,
) -> None:
    """Refused, broken and half-open connections; then it is heard again within the interval."""
    async with FaultProxy.start(control_plane) as proxy:
        token = TokenOptions(
            server=proxy.server, certificate_authority=proxy.ca_pem.decode(), ttl=timedelta(hours=1)
        )
        write(await register_site(admin, FleetOptions(site.name, token=token)), site.file)
        async with edge(site, local.edge, tmp_path) as running:
            await site.next_push()
            with proxy.playing(Drop()):
                proxy.cut_connections()
                await eventually(lambda: "no push" in running.text, "the failure is logged")
                stamp = await site.stamp()
            assert await site.stamp() == stamp
            await site.next_push()
            with proxy.frozen():
                await asyncio.sleep(2 * INTERVAL.total_seconds())
            await site.next_push()
            assert running.process.returncode is None
            assert running.text.count("no push") <= 4


@pytest.mark.slow
async def test_a_rotated_credential_is_picked_up_without_a_restart(
    admin: KubeClient, site: Registered, local: Site, tmp_path: Path
) -> None:
    async with edge(site, local.edge, tmp_path) as running:
        await site.next_push()
        credentials = await rotate_site(admin, FleetOptions(site.name))
        await eventually(
            lambda: "fleet rotate" in running.text,
            "the dead token is told",
            within=timedelta(seconds=40),
        )
        write(credentials, site.file)
        await site.next_push(timedelta(seconds=60))


async def test_it_renews_its_token_in_place(site: Registered, local: Site, tmp_path: Path) -> None:
    first = current_token(site.file)
    before = yaml.safe_load(site.file.read_text())
    async with edge(site, local.edge, tmp_path):
        await eventually(lambda: current_token(site.file) != first, "the token is renewed")
        await site.next_push()
    after = yaml.safe_load(site.file.read_text())
    assert after["clusters"] == before["clusters"]
    assert site.file.stat().st_mode & 0o777 == 0o600


async def test_from_a_mounted_secret_it_works_on_a_copy_and_follows_the_original(
    admin: KubeClient, site: Registered, local: Site, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    original = site.file.read_bytes()
    async with edge(site, local.edge, tmp_path, "--state-dir", str(state)):
        await site.next_push()
        first = current_token(site.file)
        await eventually(lambda: current_token(state / "kubeconfig") != first, "renewed")
        assert site.file.read_bytes() == original
        write(await rotate_site(admin, FleetOptions(site.name)), site.file)
        origin = hashlib.sha256(site.file.read_bytes()).hexdigest()
        await eventually(
            lambda: (state / "kubeconfig.origin").read_text() == origin,
            "the new original is taken over",
        )
        await site.next_push(timedelta(seconds=60))


async def test_a_field_that_kubectl_wrote_goes_when_the_edge_leaves_it_out(
    control_plane: ControlPlane, site: Registered, local: Site, tmp_path: Path
) -> None:
    capacity = {"nodes": 99, "gpusTotal": 99, "gpusAllocatable": 99}
    patch = json.dumps({"status": {"capacity": capacity, "phase": "Connected"}})
    await control_plane.kubectl(
        *("patch", "federatedcluster", site.name, "--subresource=status", "--type=merge"),
        *("-p", patch),
    )
    async with edge(site, local.nobody, tmp_path):

        async def gone() -> bool:
            status = await site.status()
            return "capacity" not in status and "lastHeartbeatTime" in status

        await eventually(gone, "the stranger's numbers are gone")
        assert (await site.status())["phase"] == "Connected"


async def test_health_and_metrics(site: Registered, local: Site, tmp_path: Path) -> None:
    health, metrics = free_port(), free_port()
    more = (
        *("--health-probe-bind-address", f"127.0.0.1:{health}"),
        *("--metrics-bind-address", f"127.0.0.1:{metrics}"),
    )
    async with edge(site, local.edge, tmp_path, *more):
        await site.next_push()

        async def ready() -> bool:
            return await answer(health, "/readyz") == (200, "ok")

        await eventually(ready, "ready after the first push")
        assert await answer(health, "/healthz") == (200, "ok")
        _, text = await answer(metrics, "/metrics")
        assert re.search(r'llmkube_edge_pushes_total\{result="success"\} [1-9]', text)
        assert 'llmkube_edge_source_up{source="nodes"} 1.0' in text
        assert "rest_client_requests_total" in text
        await unregister_site(site.admin, site.name, None)

        async def told() -> bool:
            code, text = await answer(health, "/readyz?verbose")
            return code == 500 and "fleet" in text

        await eventually(told, "not ready says what to do", within=timedelta(seconds=60))
        assert await answer(health, "/healthz") == (200, "ok")
