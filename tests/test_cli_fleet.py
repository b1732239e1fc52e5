"""`llmkube fleet …` on the real API server: registration, its credential's rights, and status."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.api.names import EDGE_ACCOUNT_PREFIX, SYSTEM_NAMESPACE, FieldManager
from llmkube.api.times import format_micro_time
from llmkube.cli.credentials import TokenOptions, write
from llmkube.cli.errors import CliError, NameTaken
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
from llmkube.kube.errors import Forbidden, Unauthorized
from llmkube.kube.kubeconfig import current_token
from llmkube.kube.renewal import TokenRenewer, read_claims
from llmkube.kube.resources import (
    CLUSTERROLEBINDINGS,
    CLUSTERROLES,
    CONFIGMAPS,
    CRDS,
    FEDERATEDCLUSTERS,
    LEASES,
    METALNODES,
    NAMESPACES,
    NODES,
    PODS,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
    Resource,
)
from tests.support.command import COMMAND, environment, run_llmkube, running_llmkube
from tests.support.interruption import StopAfter, Stopped
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("shipped")]

Unique = Callable[[str], str]
SECRETS = Resource("", "v1", "secrets", "Secret")
NAMESPACED = (SERVICEACCOUNTS, ROLES, ROLEBINDINGS)
CLUSTER_WIDE = (CLUSTERROLES, CLUSTERROLEBINDINGS)


@pytest.fixture
async def site(unique: Unique, admin: KubeClient) -> AsyncIterator[str]:
    """A fresh site name; whatever was registered under it is deleted afterwards."""
    name = unique("site")
    yield name
    if await find(admin, FEDERATEDCLUSTERS, name) is not None:
        await unregister_site(admin, name, None)


async def made_for(admin: KubeClient, name: str, namespace: str = SYSTEM_NAMESPACE) -> set[str]:
    account = EDGE_ACCOUNT_PREFIX + name
    places = [(r, namespace) for r in NAMESPACED] + [(r, None) for r in CLUSTER_WIDE]
    return {r.kind for r, where in places if await find(admin, r, account, where)}


ALL_KINDS = {r.kind for r in (*NAMESPACED, *CLUSTER_WIDE)}


def push_body(name: str, **status: Any) -> dict[str, Any]:
    stamp = format_micro_time(datetime.now(UTC))
    return {
        "apiVersion": FEDERATEDCLUSTERS.api_version,
        "kind": "FederatedCluster",
        "metadata": {"name": name},
        "status": {"lastHeartbeatTime": stamp, **status},
    }


# Registration ----------------------------------------------------------------------------------


async def test_the_command_makes_everything_and_writes_a_safe_file(
    control_plane: ControlPlane, admin: KubeClient, site: str, tmp_path: Path
) -> None:
    here = {"kubeconfig": control_plane.admin_kubeconfig, "cwd": tmp_path}
    options = ("--display-name", "Hall 3", "--tier", "eu", "--heartbeat-interval", "5s")
    ran = await run_llmkube("fleet", "register", site, *options, **here)
    assert ran.code == 0, ran.all
    found = await admin.get(FEDERATEDCLUSTERS, site)
    spec = {"displayName": "Hall 3", "dataResidencyTier": "eu", "heartbeatIntervalSeconds": 5}
    assert found["spec"] == spec
    assert await made_for(admin, site) == ALL_KINDS
    file = tmp_path / f"{site}.kubeconfig"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = yaml.safe_load(file.read_text())["users"][0]["user"]["token"]
    assert token not in ran.all

    async with KubeClient(await load_access(file), clock=SystemClock()) as edge:
        await edge.apply(
            FEDERATEDCLUSTERS,
            push_body(site, observedVersion="v9"),
            field_manager=FieldManager.EDGE,
            subresource="status",
        )
    again = await run_llmkube("fleet", "register", site, "--tier", "", **here)
    assert again.code == 0, again.all
    del spec["dataResidencyTier"]
    assert (await admin.get(FEDERATEDCLUSTERS, site))["spec"] == spec


async def test_interrupted_after_any_write_and_run_again_it_is_complete(
    control_plane: ControlPlane, admin: KubeClient, unique: Unique
) -> None:
    access = await load_access(control_plane.admin_kubeconfig)
    for stop_after in range(1, 7):
        asked = FleetOptions(unique("site"), heartbeat_interval=timedelta(seconds=7))
        async with KubeClient(access, clock=SystemClock()) as client:
            client.write_gate = StopAfter(stop_after)
            with pytest.raises(Stopped):
                await register_site(client, asked)
        await register_site(admin, FleetOptions(asked.name))
        assert await made_for(admin, asked.name) == ALL_KINDS
        spec = (await admin.get(FEDERATEDCLUSTERS, asked.name))["spec"]
        assert spec == {"heartbeatIntervalSeconds": 7}
        await unregister_site(admin, asked.name, None)


async def test_unregistering_interrupted_anywhere_and_run_again_leaves_nothing(
    control_plane: ControlPlane, admin: KubeClient, unique: Unique
) -> None:
    access = await load_access(control_plane.admin_kubeconfig)
    for stop_after in range(1, 6):
        asked = FleetOptions(unique("site"))
        await register_site(admin, asked)
        async with KubeClient(access, clock=SystemClock()) as client:
            client.write_gate = StopAfter(stop_after)
            with pytest.raises(Stopped):
                await unregister_site(client, asked.name, None)
        await unregister_site(admin, asked.name, None)
        assert await find(admin, FEDERATEDCLUSTERS, asked.name) is None
        assert await made_for(admin, asked.name) == set()
        with pytest.raises(CliError, match="there is no FederatedCluster"):
            await unregister_site(admin, asked.name, None)


@pytest.mark.parametrize("resource", [*NAMESPACED[:2], *CLUSTER_WIDE[:1]], ids=lambda r: r.kind)
async def test_a_name_taken_by_something_else_is_refused_and_nothing_is_made(
    resource: Resource, admin: KubeClient, site: str
) -> None:
    account = EDGE_ACCOUNT_PREFIX + site
    metadata = {"name": account}
    namespace = SYSTEM_NAMESPACE if resource.namespaced else None
    body = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": metadata}
    before = await admin.create(resource, body, namespace)
    with pytest.raises(NameTaken, match=account):
        await register_site(admin, FleetOptions(site))
    assert await find(admin, FEDERATEDCLUSTERS, site) is None
    assert await made_for(admin, site) == {resource.kind}
    assert await admin.get(resource, account, namespace) == before
    await admin.delete(resource, account, namespace)


async def test_the_account_lives_where_it_was_registered(
    admin: KubeClient, site: str, namespace: str, unique: Unique
) -> None:
    await register_site(admin, FleetOptions(site, namespace))
    assert await made_for(admin, site, namespace) == ALL_KINDS
    credentials = await register_site(admin, FleetOptions(site))
    assert credentials.namespace == namespace
    with pytest.raises(CliError, match=f"registered in namespace {namespace}"):
        await register_site(admin, FleetOptions(site, SYSTEM_NAMESPACE))
    missing = unique("nowhere")
    with pytest.raises(CliError, match="create namespace"):
        await register_site(admin, FleetOptions(unique("site"), missing))
    assert await find(admin, NAMESPACES, missing) is None


async def test_rotate_ends_the_old_token(admin: KubeClient, site: str, tmp_path: Path) -> None:
    file = tmp_path / "edge.kubeconfig"
    write(await register_site(admin, FleetOptions(site)), file)
    async with KubeClient(await load_access(file), clock=SystemClock()) as edge:
        await edge.get(FEDERATEDCLUSTERS, site)
        fresh = await rotate_site(admin, FleetOptions(site))

        async def accepted() -> bool:
            try:
                await edge.get(FEDERATEDCLUSTERS, site)
            except Unauthorized:
                return False
            return True

        async def refused() -> bool:
            return not await accepted()

        await eventually(refused, "the old token is dead", within=timedelta(seconds=20))
        write(fresh, file)
        await eventually(accepted, "the new file is picked up", within=timedelta(seconds=20))


# The credential --------------------------------------------------------------------------------

Attempt = Callable[[KubeClient, str, str], Awaitable[Any]]


def status_patch(name: str) -> Attempt:
    body = {"status": {"observedVersion": "v9"}}
    return lambda c, site, _: c.merge_patch(
        FEDERATEDCLUSTERS, name or site, None, body, subresource="status"
    )


def getting(resource: Resource, name: str, namespace: str | None = None) -> Attempt:
    return lambda c, _, other: c.get(resource, name.format(other=other), namespace)


def listing(resource: Resource, namespace: str | None = None) -> Attempt:
    return lambda c, *_: c.list(resource, namespace)


async def watching(client: KubeClient, site: str, _other: str) -> None:
    async with client.watch(FEDERATEDCLUSTERS, field_selector=f"metadata.name={site}") as stream:
        await stream.read()


def minting(account: str = "", *, audiences: tuple[str, ...] = (), **life: float) -> Attempt:
    ttl = timedelta(**life) if life else timedelta(hours=1)
    return lambda c, site, other: c.request_token(
        EDGE_ACCOUNT_PREFIX + (account.format(other=other) or site),
        SYSTEM_NAMESPACE,
        ttl=ttl,
        audiences=audiences,
    )


REFUSED: dict[str, Attempt] = {
    "read another site": getting(FEDERATEDCLUSTERS, "{other}"),
    "push for another site": lambda c, _, other: status_patch(other)(c, "", ""),
    "apply for another site": lambda c, _, other: c.apply(
        FEDERATEDCLUSTERS, push_body(other), field_manager="llmkube-edge", subresource="status"
    ),
    "list sites": listing(FEDERATEDCLUSTERS),
    "watch its own site": watching,
    "change its spec": lambda c, site, _: c.merge_patch(
        FEDERATEDCLUSTERS, site, None, {"spec": {"heartbeatIntervalSeconds": 3600}}
    ),
    "label itself": lambda c, site, _: c.merge_patch(
        FEDERATEDCLUSTERS, site, None, {"metadata": {"labels": {"a": "b"}}}
    ),
    "delete itself": lambda c, site, _: c.delete(FEDERATEDCLUSTERS, site),
    "replace its status": lambda c, site, _: c.update(
        FEDERATEDCLUSTERS, push_body(site), subresource="status"
    ),
    "make a site": lambda c, *_: c.create(FEDERATEDCLUSTERS, {**push_body("new"), "spec": {}}),
    "set its phase": lambda c, site, _: c.merge_patch(
        FEDERATEDCLUSTERS, site, None, {"status": {"phase": "Connected"}}, subresource="status"
    ),
    "read secrets": listing(SECRETS, SYSTEM_NAMESPACE),
    "read config maps": getting(CONFIGMAPS, "kube-root-ca.crt", SYSTEM_NAMESPACE),
    "list pods": listing(PODS, SYSTEM_NAMESPACE),
    "list nodes": listing(NODES),
    "list Macs": listing(METALNODES),
    "list leases": listing(LEASES, SYSTEM_NAMESPACE),
    "read its account": lambda c, site, _: c.get(
        SERVICEACCOUNTS, EDGE_ACCOUNT_PREFIX + site, SYSTEM_NAMESPACE
    ),
    "read its role": lambda c, site, _: c.get(CLUSTERROLES, EDGE_ACCOUNT_PREFIX + site),
    "widen its role": lambda c, site, _: c.merge_patch(
        CLUSTERROLES, EDGE_ACCOUNT_PREFIX + site, None, {"rules": []}
    ),
    "mint another site's token": minting("{other}"),
    "mint the controller's token": lambda c, *_: c.request_token(
        "llmkube-controller", SYSTEM_NAMESPACE, ttl=timedelta(hours=1)
    ),
    "mint a token for 100 years": minting(days=36500),
    "mint a token for another audience": minting(audiences=("vault",)),
}


@pytest.fixture(scope="module")
def two_sites_made() -> dict[str, Path]:
    return {}


@pytest.fixture
async def edge_client(
    admin: KubeClient, two_sites_made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KubeClient]:
    """A client with the credential of site `edge-a`; `edge-b` exists as well."""
    if not two_sites_made:
        folder = tmp_path_factory.mktemp("edges")
        for name in ("edge-a", "edge-b"):
            write(await register_site(admin, FleetOptions(name)), folder / name)
            two_sites_made[name] = folder / name
    access = await load_access(two_sites_made["edge-a"])
    async with KubeClient(access, clock=SystemClock()) as client:
        yield client


BY_POLICY = {"set its phase", "mint a token for 100 years", "mint a token for another audience"}


@pytest.mark.parametrize("what", REFUSED)
async def test_the_edge_may_not(what: str, edge_client: KubeClient) -> None:
    async def refused() -> bool:
        try:
            await REFUSED[what](edge_client, "edge-a", "edge-b")
        except Forbidden:
            return True
        return False

    if what in BY_POLICY:  # a new admission policy takes a moment to bind
        await eventually(refused, what)
    else:
        assert await refused()


async def test_the_edge_may_read_and_push_its_site_and_renew_its_token(
    edge_client: KubeClient,
) -> None:
    assert (await edge_client.get(FEDERATEDCLUSTERS, "edge-a"))["metadata"]["name"] == "edge-a"
    for _ in range(2):
        await edge_client.apply(
            FEDERATEDCLUSTERS,
            push_body("edge-a"),
            field_manager=FieldManager.EDGE,
            subresource="status",
        )
    await status_patch("")(edge_client, "edge-a", "")
    await minting(days=30)(edge_client, "edge-a", "")


# Status ----------------------------------------------------------------------------------------


async def test_status_counts_a_site_without_a_phase(
    control_plane: ControlPlane, admin: KubeClient, unique: Unique
) -> None:
    names = [unique("status") for _ in range(3)]
    for name, phase in zip(names, ("Connected", "Stale", None), strict=True):
        await register_site(admin, FleetOptions(name, data_residency_tier="eu"))
        if phase:
            status = {
                "phase": phase,
                "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                "capacity": {"nodes": 2, "gpusTotal": 8, "gpusAllocatable": 6},
                "inference": {
                    "models": 1,
                    "servicesTotal": 3,
                    "servicesReady": 2,
                    "servicesFailed": 1,
                },
            }
            await admin.merge_patch(
                FEDERATEDCLUSTERS, name, None, {"status": status}, subresource="status"
            )
    here = {"kubeconfig": control_plane.admin_kubeconfig}
    ran = await run_llmkube("fleet", "status", "-o", "json", **here)
    found = json.loads(ran.out)
    ours = [item for item in found["items"] if item["metadata"]["name"] in names]
    assert len(ours) == 3
    assert all("managedFields" not in item["metadata"] for item in ours)
    counted = found["totals"]
    phases = [counted[key] for key in ("connected", "stale", "unreachable", "withoutPhase")]
    assert counted["sites"] == len(found["items"]) == sum(phases)
    assert counted["withoutPhase"] >= 1

    table = await run_llmkube("fleet", "status", "-o", "wide", **here)
    lines = {line.split()[0]: line for line in table.out.splitlines() if line}
    assert lines["NAME"].split()[:4] == ["NAME", "TIER", "PHASE", "LAST-HEARTBEAT"]
    assert " 6/8 " in lines[names[0]]
    assert " 2/3 " in lines[names[1]]
    assert " none yet " in lines[names[2]]
    assert " never " in lines[names[2]]
    assert "\x1b" not in table.out
    assert f"{counted['sites']} sites:" in table.out
    assert "without phase" in table.out

    as_yaml = await run_llmkube("fleet", "status", names[0], "-o", "yaml", **here)
    assert yaml.safe_load(as_yaml.out)["totals"]["connected"] == 1
    by_name = await run_llmkube("fleet", "status", names[0], "-o", "name", **here)
    assert by_name.out == f"federatedcluster.federation.llmkube.dev/{names[0]}\n"
    missing = await run_llmkube("fleet", "status", "no-such-site", **here)
    assert (missing.code, missing.err.count("\n")) == (3, 1)
    for name in names:
        await unregister_site(admin, name, None)


async def test_watch_shows_each_change_and_survives_an_outage(
    control_plane: ControlPlane, admin: KubeClient, site: str, tmp_path: Path
) -> None:
    from tests.support.faultproxy import WATCHES, Drop, FaultProxy

    await register_site(admin, FleetOptions(site))

    async def set_version(version: str) -> None:
        body = {"status": {"observedVersion": version}}
        await admin.merge_patch(FEDERATEDCLUSTERS, site, None, body, subresource="status")

    async with FaultProxy.start(control_plane) as proxy:
        log = tmp_path / "log"
        arguments = ["fleet", "status", site, "--watch", "-o", "wide"]
        async with running_llmkube(
            arguments, log=log, kubeconfig=proxy.admin_kubeconfig
        ) as command:
            await eventually(lambda: site in command.text, "the first line")
            await set_version("v1.0.1")
            await eventually(lambda: "v1.0.1" in command.text, "a change")
            with proxy.playing(Drop()):
                proxy.cut_connections()
                await set_version("v1.0.2")
            await eventually(lambda: "v1.0.2" in command.text, "the change made in the outage")
            proxy.cut(WATCHES)
            await set_version("v1.0.3")
            await eventually(lambda: "v1.0.3" in command.text, "a change after the stream broke")
            assert await command.stop(signal.SIGINT) == 130
            assert "Traceback" not in command.text


# Errors ----------------------------------------------------------------------------------------


async def test_errors_are_one_line_and_say_what_to_do(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path, unique: Unique
) -> None:
    """No rights; an expired or unknown token; no API server; no kubeconfig; a bad name."""
    weak = await control_plane.service_account_kubeconfig(namespace, "default")
    config = yaml.safe_load(weak.read_text())
    config["users"][0]["user"]["token"] = "not-a-token"
    stale = tmp_path / "stale"
    stale.write_text(yaml.safe_dump(config))
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    gone = tmp_path / "gone"
    gone.write_text(yaml.safe_dump(config))
    name = unique("site")
    for kubeconfig, code, words in (
        (weak, 4, "ask a cluster admin"),
        (stale, 4, "expired or revoked"),
        (gone, 6, "cannot be reached"),
        (tmp_path / "missing", 2, "missing"),
    ):
        for arguments in (("fleet", "register", name), ("fleet", "status")):
            ran = await run_llmkube(*arguments, kubeconfig=kubeconfig, cwd=tmp_path)
            assert (ran.code, ran.out) == (code, ""), ran.all
            assert ran.err.startswith("error: ")
            assert words in ran.err
            assert ran.err.count("\n") == 1
            assert "not-a-token" not in ran.err
    ran = await run_llmkube(
        "fleet", "register", "Bad_Name", kubeconfig=control_plane.admin_kubeconfig
    )
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "lower-case" in ran.err
    assert await find(admin, FEDERATEDCLUSTERS, name) is None


async def test_ca_and_server_may_be_given(
    admin: KubeClient, control_plane: ControlPlane, site: str
) -> None:
    token = TokenOptions(
        server="https://hub.example.com:6443", certificate_authority=control_plane.ca_pem.decode()
    )
    await register_site(admin, FleetOptions(site, token=token))
    again = await register_site(admin, FleetOptions(site))
    assert again.server == "https://hub.example.com:6443"
    assert again.ca_pem == control_plane.ca_pem


async def test_the_crds_exist(admin: KubeClient) -> None:
    assert await admin.get(CRDS, "federatedclusters.federation.llmkube.dev")


# A terminal ------------------------------------------------------------------------------------


async def test_on_a_terminal_watch_redraws_in_colour(
    control_plane: ControlPlane, admin: KubeClient, site: str
) -> None:
    await register_site(admin, FleetOptions(site))
    screen = bytearray()
    ours, theirs = pty.openpty()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: screen.extend(os.read(ours, 65536)))
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *("fleet", "status", site, "--watch"),
        env=environment(control_plane.admin_kubeconfig, TERM="xterm"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    try:
        await eventually(lambda: site.encode() in screen, "the first screen")
        body = {"status": {"phase": "Stale"}}
        await admin.merge_patch(FEDERATEDCLUSTERS, site, None, body, subresource="status")
        await eventually(lambda: b"\x1b[33mStale" in screen, "the phase, in yellow")
        drawn = screen.count(b"\x1b[H\x1b[2J")
        await eventually(lambda: screen.count(b"\x1b[H\x1b[2J") > drawn + 1, "ages grow")
    finally:
        loop.remove_reader(ours)
        process.kill()
        await process.wait()
        os.close(ours)
        os.close(theirs)


async def test_a_token_of_a_longer_life_renews_itself_within_the_policy(
    admin: KubeClient, site: str, tmp_path: Path
) -> None:
    """An admin may issue more than the 30 days that an account may issue to itself."""
    file = tmp_path / "edge.kubeconfig"
    credentials = await register_site(
        admin, FleetOptions(site, token=TokenOptions(ttl=timedelta(days=90)))
    )
    assert credentials.expires_at - datetime.now(UTC) > timedelta(days=89)
    write(credentials, file)
    async with KubeClient(await load_access(file), clock=SystemClock()) as edge:
        assert await TokenRenewer(edge, SystemClock(), file).renew()
    claims = read_claims(current_token(file))
    assert claims is not None
    assert claims.life == timedelta(days=30)
