"""`llmkube metal token …` on the real API server: what it makes, keeps, refuses and survives."""

from __future__ import annotations

import base64
import json
import shlex
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from llmkube.api.names import METAL_ACCOUNT_PREFIX
from llmkube.cli.credentials import TokenOptions
from llmkube.cli.errors import CliError, NameTaken
from llmkube.cli.metal_credentials import (
    MetalTokenOptions,
    create_metal_token,
    revoke_metal_token,
    rotate_metal_token,
)
from llmkube.cli.ownership import find
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import NotFound, Unauthorized
from llmkube.kube.resources import (
    LEASES,
    METALNODES,
    ROLEBINDINGS,
    ROLES,
    SERVICEACCOUNTS,
)
from tests.support.command import run_llmkube
from tests.support.interruption import StopAfter, Stopped
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

Unique = Callable[[str], str]
KINDS = (SERVICEACCOUNTS, LEASES, ROLES, ROLEBINDINGS)


async def owned_objects(admin: KubeClient, name: str, namespace: str) -> dict[str, dict[str, Any]]:
    account = METAL_ACCOUNT_PREFIX + name
    found = {r.kind: await find(admin, r, account, namespace) for r in KINDS}
    return {kind: item for kind, item in found.items() if item is not None}


async def test_the_command_makes_everything_and_writes_a_safe_file(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    ran = await run_llmkube(
        *("metal", "token", "create", "mac-1", "-n", namespace, "--host-ip", "192.168.1.20"),
        *("--verifier-node-selector", "pool=relay", "--verifier-toleration", "gpu=yes:NoSchedule"),
        kubeconfig=control_plane.admin_kubeconfig,
        cwd=tmp_path,
    )
    assert ran.code == 0, ran.all

    node = await admin.get(METALNODES, "mac-1", namespace)
    assert node["spec"] == {
        "leaseName": "llmkube-metal-mac-1",
        "serviceAccountName": "llmkube-metal-mac-1",
        "hostIP": "192.168.1.20",
        "verifier": {
            "nodeSelector": {"pool": "relay"},
            "tolerations": [
                {"key": "gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"}
            ],
        },
    }
    made = await owned_objects(admin, "mac-1", namespace)
    assert set(made) == {resource.kind for resource in KINDS}
    for item in made.values():
        assert item["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "inference.llmkube.dev/v1alpha1",
                "kind": "MetalNode",
                "name": "mac-1",
                "uid": node["metadata"]["uid"],
            }
        ]
        assert {entry["manager"] for entry in item["metadata"]["managedFields"]} == {"llmkube-cli"}
    assert not made["Lease"].get("spec")
    assert made["ServiceAccount"]["automountServiceAccountToken"] is False

    file = tmp_path / "mac-1.kubeconfig"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["mac-1.kubeconfig"]
    content = yaml.safe_load(file.read_text())
    cluster = content["clusters"][0]["cluster"]
    assert cluster["server"] == control_plane.server
    assert base64.b64decode(cluster["certificate-authority-data"]) == control_plane.ca_pem
    assert "insecure" not in file.read_text()
    token = content["users"][0]["user"]["token"]
    assert token not in ran.all
    assert "eyJ" not in ran.all

    async with KubeClient(await load_access(file), clock=SystemClock()) as mac:
        assert (await mac.whoami()).username == (
            f"system:serviceaccount:{namespace}:llmkube-metal-mac-1"
        )
        assert (await mac.get(METALNODES, "mac-1", namespace))["metadata"]["uid"] == node[
            "metadata"
        ]["uid"]


async def test_options_not_given_keep_their_values_and_empty_ones_are_cleared(
    admin: KubeClient, namespace: str
) -> None:
    full = MetalTokenOptions(
        "mac-1",
        namespace,
        host_ip="10.0.0.1",
        verifier_node_selector={"a": "1", "b": "2"},
        verifier_tolerations=({"operator": "Exists"},),
        token=TokenOptions(ttl=timedelta(hours=3), server="https://api.example.com:6443"),
    )
    first = await create_metal_token(admin, full)
    assert first.server == "https://api.example.com:6443"
    spec = (await admin.get(METALNODES, "mac-1", namespace))["spec"]

    again = await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    assert (await admin.get(METALNODES, "mac-1", namespace))["spec"] == spec
    assert again.server == "https://api.example.com:6443"
    life = again.expires_at - datetime.now(UTC)
    assert timedelta(hours=2.9) < life < timedelta(hours=3.1)
    assert {change.verb for change in again.changes} == {"unchanged"}

    changed = MetalTokenOptions(
        "mac-1", namespace, host_ip="", verifier_node_selector={"b": "3"}, verifier_tolerations=()
    )
    await create_metal_token(admin, changed)
    spec = (await admin.get(METALNODES, "mac-1", namespace))["spec"]
    assert "hostIP" not in spec
    assert spec["verifier"] == {"nodeSelector": {"b": "3"}}


async def test_what_kubectl_wrote_is_kept_and_can_be_cleared(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace, host_ip="10.0.0.1"))
    patch = {"spec": {"hostIP": "10.0.0.2", "verifier": {"nodeSelector": {"by": "kubectl"}}}}
    await control_plane.kubectl(
        "-n", namespace, "patch", "metalnode", "mac-1", "--type=merge", "-p", json.dumps(patch)
    )
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    spec = (await admin.get(METALNODES, "mac-1", namespace))["spec"]
    assert spec["hostIP"] == "10.0.0.2"
    assert spec["verifier"] == {"nodeSelector": {"by": "kubectl"}}

    clear = MetalTokenOptions("mac-1", namespace, host_ip="", verifier_node_selector={})
    await create_metal_token(admin, clear)
    spec = (await admin.get(METALNODES, "mac-1", namespace))["spec"]
    assert "hostIP" not in spec
    assert not spec.get("verifier", {}).get("nodeSelector")


async def test_a_lease_that_llmkube_did_not_make_is_refused_and_nothing_is_made(
    admin: KubeClient, namespace: str
) -> None:
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "llmkube-metal-mac-1", "namespace": namespace},
        "spec": {"holderIdentity": "somebody"},
    }
    before = await admin.create(LEASES, lease)
    with pytest.raises(NameTaken, match=r"lease\.coordination\.k8s\.io/llmkube-metal-mac-1"):
        await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    assert await find(admin, METALNODES, "mac-1", namespace) is None
    assert set(await owned_objects(admin, "mac-1", namespace)) == {"Lease"}
    assert await admin.get(LEASES, "llmkube-metal-mac-1", namespace) == before


async def test_a_lease_taken_between_the_look_and_the_write_is_refused(
    admin: KubeClient, namespace: str
) -> None:
    """Somebody creates the Lease while the MetalNode is there and its own Lease is not."""
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    await admin.delete(LEASES, "llmkube-metal-mac-1", namespace)
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": "llmkube-metal-mac-1", "namespace": namespace},
    }
    before = await admin.create(LEASES, lease)
    with pytest.raises(NameTaken):
        await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    assert await admin.get(LEASES, "llmkube-metal-mac-1", namespace) == before


@pytest.mark.parametrize("resource", [SERVICEACCOUNTS, ROLES], ids=lambda r: r.kind)
async def test_other_objects_that_llmkube_did_not_make_are_refused(
    resource: Any, admin: KubeClient, namespace: str
) -> None:
    body = {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": "llmkube-metal-mac-1", "namespace": namespace},
    }
    before = await admin.create(resource, body)
    with pytest.raises(NameTaken):
        await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    assert await admin.get(resource, "llmkube-metal-mac-1", namespace) == before


async def test_a_missing_namespace_is_named(
    control_plane: ControlPlane, unique: Unique, tmp_path: Path
) -> None:
    ran = await run_llmkube(
        *("metal", "token", "create", "mac-1", "-n", unique("nowhere")),
        kubeconfig=control_plane.admin_kubeconfig,
        cwd=tmp_path,
    )
    assert (ran.code, ran.out) == (3, "")
    assert "namespaces" in ran.err
    assert "--namespace" in ran.err
    assert not list(tmp_path.iterdir())


async def test_a_metalnode_with_an_account_of_its_own_is_refused(
    admin: KubeClient, namespace: str
) -> None:
    node = {
        "apiVersion": METALNODES.api_version,
        "kind": METALNODES.kind,
        "metadata": {"name": "mac-1", "namespace": namespace},
        "spec": {"leaseName": "mine", "serviceAccountName": "default"},
    }
    await admin.create(METALNODES, node)
    for act in (create_metal_token, rotate_metal_token):
        with pytest.raises(CliError, match="names the ServiceAccount default"):
            await act(admin, MetalTokenOptions("mac-1", namespace))
    with pytest.raises(CliError, match="names the ServiceAccount default"):
        await revoke_metal_token(admin, "mac-1", namespace)
    assert await find(admin, SERVICEACCOUNTS, "default", namespace) is not None


async def test_interrupted_after_any_write_and_run_again_it_is_complete(
    control_plane: ControlPlane, namespace: str, admin: KubeClient
) -> None:
    access = await load_access(control_plane.admin_kubeconfig)
    for stop_after in range(1, 6):
        name = f"mac-{stop_after}"
        asked = MetalTokenOptions(name, namespace, host_ip="10.0.0.1")
        async with KubeClient(access, clock=SystemClock()) as client:
            client.write_gate = StopAfter(stop_after)
            with pytest.raises(Stopped):
                await create_metal_token(client, asked)
        made = await owned_objects(admin, name, namespace)
        assert len(made) == min(stop_after - 1, len(KINDS))
        await create_metal_token(admin, MetalTokenOptions(name, namespace))
        assert set(await owned_objects(admin, name, namespace)) == {r.kind for r in KINDS}
        spec = (await admin.get(METALNODES, name, namespace))["spec"]
        assert spec["hostIP"] == "10.0.0.1"


async def test_rotation_interrupted_anywhere_and_run_again_ends_every_old_token(
    control_plane: ControlPlane, namespace: str, admin: KubeClient
) -> None:
    access = await load_access(control_plane.admin_kubeconfig)
    for stop_after in range(1, 5):
        asked = MetalTokenOptions(f"mac-{stop_after}", namespace)
        await create_metal_token(admin, asked)
        before = await admin.get(SERVICEACCOUNTS, asked.account, namespace)
        async with KubeClient(access, clock=SystemClock()) as client:
            client.write_gate = StopAfter(stop_after)
            with pytest.raises(Stopped):
                await rotate_metal_token(client, asked)
        await rotate_metal_token(admin, asked)
        after = await admin.get(SERVICEACCOUNTS, asked.account, namespace)
        assert after["metadata"]["uid"] != before["metadata"]["uid"]


async def test_what_an_earlier_metalnode_left_is_not_adopted(
    admin: KubeClient, namespace: str
) -> None:
    """Its account's tokens, and its Lease's last heartbeat, must not live on."""
    asked = MetalTokenOptions("mac-1", namespace)
    await create_metal_token(admin, asked)
    old = await owned_objects(admin, "mac-1", namespace)
    await admin.delete(METALNODES, "mac-1", namespace)
    await create_metal_token(admin, asked)  # the garbage collector may not even have looked
    new = await owned_objects(admin, "mac-1", namespace)
    for kind in ("ServiceAccount", "Lease"):
        assert new[kind]["metadata"]["uid"] != old[kind]["metadata"]["uid"]
    node = await admin.get(METALNODES, "mac-1", namespace)
    for item in (await owned_objects(admin, "mac-1", namespace)).values():
        assert item["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]


async def test_a_tampered_binding_and_role_are_put_right(admin: KubeClient, namespace: str) -> None:
    asked = MetalTokenOptions("mac-1", namespace)
    await create_metal_token(admin, asked)
    binding = await admin.get(ROLEBINDINGS, asked.account, namespace)
    await admin.delete(ROLEBINDINGS, asked.account, namespace)
    for server_side in ("resourceVersion", "uid", "managedFields", "creationTimestamp"):
        del binding["metadata"][server_side]
    binding["roleRef"] = {**binding["roleRef"], "kind": "ClusterRole", "name": "view"}
    await admin.create(ROLEBINDINGS, binding)
    await admin.merge_patch(ROLES, asked.account, namespace, {"rules": []})
    await create_metal_token(admin, asked)
    binding = await admin.get(ROLEBINDINGS, asked.account, namespace)
    assert binding["roleRef"]["name"] == asked.account
    assert len((await admin.get(ROLES, asked.account, namespace))["rules"]) == 3


async def test_deleting_the_metalnode_deletes_everything(admin: KubeClient, namespace: str) -> None:
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace))
    await admin.delete(METALNODES, "mac-1", namespace)

    async def all_gone() -> bool:
        return not await owned_objects(admin, "mac-1", namespace)

    await eventually(all_gone, "owned objects are collected", within=timedelta(minutes=2))


async def test_revoke_ends_the_token_and_create_lets_the_mac_in_again(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "mac.kubeconfig"
    here = {"kubeconfig": control_plane.admin_kubeconfig, "cwd": tmp_path}
    create = ("metal", "token", "create", "mac-1", "-n", namespace, "-o", str(file))
    revoke = ("metal", "token", "revoke", "mac-1", "-n", namespace)
    assert (await run_llmkube(*create, **here)).code == 0
    async with KubeClient(await load_access(file), clock=SystemClock()) as mac:
        await mac.get(METALNODES, "mac-1", namespace)
        ran = await run_llmkube(*revoke, **here)
        assert ran.code == 0
        assert "within about 10 seconds" in ran.out

        async def refused() -> bool:
            try:
                await mac.get(METALNODES, "mac-1", namespace)
            except Unauthorized:
                return True
            return False

        await eventually(refused, "401 after revocation", within=timedelta(seconds=15))
        again = await run_llmkube(*revoke, **here)
        assert (again.code, again.out.strip()) == (
            0,
            "mac-1 was revoked already: it has no account",
        )
        assert (await run_llmkube(*create, **here)).code == 0

        async def let_in() -> bool:
            """The client reads the new file after a 401, at most every two seconds."""
            return not await refused()

        await eventually(let_in, "access with the new file", within=timedelta(seconds=15))
    gone = await run_llmkube("metal", "token", "revoke", "mac-9", "-n", namespace, **here)
    assert gone.code == 3
    with pytest.raises(NotFound):
        await admin.get(SERVICEACCOUNTS, "llmkube-metal-mac-9", namespace)


async def test_revoke_also_ends_an_account_whose_metalnode_is_gone(
    admin: KubeClient, namespace: str
) -> None:
    """The garbage collector may lag, or be off."""
    asked = MetalTokenOptions("mac-1", namespace)
    await create_metal_token(admin, asked)
    await admin.delete(METALNODES, "mac-1", namespace, propagation="Orphan")

    async def node_gone() -> bool:
        return await find(admin, METALNODES, "mac-1", namespace) is None

    await eventually(node_gone, "the orphaning is done", within=timedelta(minutes=2))
    assert set(await owned_objects(admin, "mac-1", namespace)) == {r.kind for r in KINDS}
    await revoke_metal_token(admin, "mac-1", namespace)
    assert await find(admin, SERVICEACCOUNTS, asked.account, namespace) is None
    await create_metal_token(admin, asked)


async def test_a_lease_that_a_mac_keeps_by_a_finalizer_is_told_with_the_way_out(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    here = {"kubeconfig": control_plane.admin_kubeconfig, "cwd": tmp_path}
    create = ("metal", "token", "create", "mac-1", "-n", namespace)
    assert (await run_llmkube(*create, **here)).code == 0
    held = {"metadata": {"finalizers": ["mac.example/mine"]}}
    await admin.merge_patch(LEASES, "llmkube-metal-mac-1", namespace, held)
    await admin.delete(METALNODES, "mac-1", namespace)

    async def only_the_lease() -> bool:
        return set(await owned_objects(admin, "mac-1", namespace)) == {"Lease"}

    await eventually(only_the_lease, "all else is collected", within=timedelta(minutes=2))
    ran = await run_llmkube(*create, **here)
    assert ran.code != 0
    assert "finalizers hold it: mac.example/mine" in ran.err
    way_out = ran.err[ran.err.index("`kubectl") + 1 :].partition("`")[0]
    await control_plane.kubectl(*shlex.split(way_out)[1:])
    assert (await run_llmkube(*create, **here)).code == 0


async def test_rotate_writes_a_new_file_and_keeps_the_server(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    here = {"kubeconfig": control_plane.admin_kubeconfig, "cwd": tmp_path}
    server = control_plane.server.replace("127.0.0.1", "localhost")
    base = ("-n", namespace, "-o", "mac.kubeconfig")
    first = await run_llmkube(
        "metal", "token", "create", "mac-1", *base, "--server", server, **here
    )
    assert first.code == 0, first.all
    old = yaml.safe_load((tmp_path / "mac.kubeconfig").read_text())
    ran = await run_llmkube("metal", "token", "rotate", "mac-1", *base, **here)
    assert ran.code == 0, ran.all
    new = yaml.safe_load((tmp_path / "mac.kubeconfig").read_text())
    assert new["clusters"] == old["clusters"]
    assert new["clusters"][0]["cluster"]["server"] == server
    assert new["users"] != old["users"]
    missing = await run_llmkube("metal", "token", "rotate", "mac-9", "-n", namespace, **here)
    assert missing.code == 3
    assert "token create" in missing.err


async def test_list_shows_accounts_and_no_secret(
    control_plane: ControlPlane, admin: KubeClient, namespace: str
) -> None:
    for name in ("mac-1", "mac-2"):
        await create_metal_token(admin, MetalTokenOptions(name, namespace))
    await revoke_metal_token(admin, "mac-2", namespace)
    stamp = {"spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}}
    await admin.merge_patch(LEASES, "llmkube-metal-mac-1", namespace, stamp)
    here = {"kubeconfig": control_plane.admin_kubeconfig}
    ran = await run_llmkube("metal", "token", "list", "-n", namespace, **here)
    lines = [line.split() for line in ran.out.splitlines()]
    assert lines[0] == ["NAME", "ACCOUNT", "STATE", "AGE", "LAST-HEARTBEAT"]
    assert lines[1][:3] == ["mac-1", "llmkube-metal-mac-1", "Active"]
    assert lines[1][4].endswith("d")
    assert lines[2][:3] == ["mac-2", "llmkube-metal-mac-2", "Revoked"]
    as_json = await run_llmkube("metal", "token", "list", "-n", namespace, "-o", "json", **here)
    assert [row["state"] for row in json.loads(as_json.out)] == ["Active", "Revoked"]
    by_name = await run_llmkube("metal", "token", "list", "-n", namespace, "-o", "name", **here)
    assert by_name.out.splitlines()[0] == "serviceaccount/llmkube-metal-mac-1"


async def test_the_admins_file_is_never_overwritten(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    precious = tmp_path / "config"
    precious.write_bytes(control_plane.admin_kubeconfig.read_bytes())
    before = precious.read_bytes()
    create = ("metal", "token", "create", "mac-1", "-n", namespace, "-o", str(precious))
    here = {"kubeconfig": control_plane.admin_kubeconfig, "cwd": tmp_path}
    ran = await run_llmkube(*create, **here)
    assert ran.code == 5
    assert ran.err.count("\n") == 1
    assert precious.read_bytes() == before
    assert await find(admin, METALNODES, "mac-1", namespace) is None
    assert (await run_llmkube(*create, "--overwrite", **here)).code == 0
    assert (await run_llmkube(*create, **here)).code == 0  # now it is ours
    folder = await run_llmkube(*create[:-1], str(tmp_path / "no" / "such"), **here)
    assert folder.code == 2


async def test_stdout_carries_the_kubeconfig_only_where_asked(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    ran = await run_llmkube(
        *("metal", "token", "create", "mac-1", "-n", namespace, "-o", "-"),
        kubeconfig=control_plane.admin_kubeconfig,
        cwd=tmp_path,
    )
    assert ran.code == 0
    token = yaml.safe_load(ran.out)["users"][0]["user"]["token"]
    assert token.startswith("eyJ")
    assert token not in ran.err
    assert "metalnode.inference.llmkube.dev/mac-1 created" in ran.err
    assert not list(tmp_path.iterdir())


async def test_the_ca_comes_from_the_cluster_where_the_kubeconfig_has_none(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """The admin's kubeconfig relies on the system's trust store."""
    content = yaml.safe_load(control_plane.admin_kubeconfig.read_text())
    for entry in content["clusters"]:
        entry["cluster"].pop("certificate-authority-data", None)
        entry["cluster"].pop("certificate-authority", None)
    config, bundle = tmp_path / "config", tmp_path / "system.pem"
    config.write_text(yaml.safe_dump(content))
    bundle.write_bytes(control_plane.ca_pem)
    ran = await run_llmkube(
        *("metal", "token", "create", "mac-1", "-n", namespace, "-o", "mac.kubeconfig"),
        kubeconfig=config,
        cwd=tmp_path,
        SSL_CERT_FILE=str(bundle),
    )
    assert ran.code == 0, ran.all
    written = yaml.safe_load((tmp_path / "mac.kubeconfig").read_text())
    embedded = base64.b64decode(written["clusters"][0]["cluster"]["certificate-authority-data"])
    assert embedded.strip() == control_plane.ca_pem.strip()


async def test_a_life_that_the_server_shortens_is_reported(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    ran = await run_llmkube(
        *("metal", "token", "create", "mac-1", "-n", namespace, "--ttl", "90d"),
        kubeconfig=control_plane.admin_kubeconfig,
        cwd=tmp_path,
    )
    assert ran.code == 0
    expires = ran.out.split("expires at ")[1].split(";")[0]
    assert datetime.fromisoformat(expires) > datetime.now(UTC)


@pytest.mark.usefixtures("shipped")
async def test_the_admin_of_one_namespace_may_do_all_of_it_there(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    """With Kubernetes' own ClusterRole `admin`, to which config/rbac adds our kinds."""
    head = {"apiVersion": ROLEBINDINGS.api_version, "kind": "RoleBinding"}
    binding = {
        **head,
        "metadata": {"name": "helper-admin"},
        "roleRef": {"apiGroup": ROLES.group, "kind": "ClusterRole", "name": "admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
    }
    await admin.create(ROLEBINDINGS, binding, namespace)
    helper = await control_plane.service_account_kubeconfig(namespace, "default")
    for arguments in (
        ("token", "create", "mac-1"),
        ("token", "rotate", "mac-1"),
        ("token", "list"),
        ("list",),
        ("describe", "mac-1"),
        ("verify", "mac-1"),
        ("token", "revoke", "mac-1"),
    ):
        ran = await run_llmkube(
            "metal", *arguments, "-n", namespace, kubeconfig=helper, cwd=tmp_path
        )
        assert ran.code == 0, ran.all
        assert "may not" not in ran.out
    ran = await run_llmkube("metal", "list", "-A", kubeconfig=helper)
    assert ran.code == 4


@pytest.mark.parametrize(
    "annotation", ["llmkube.dev/token-ttl", "llmkube.dev/token-server"], ids=["ttl", "server"]
)
async def test_a_remembered_option_that_was_spoilt_is_named(
    annotation: str, admin: KubeClient, namespace: str
) -> None:
    asked = MetalTokenOptions("mac-1", namespace)
    await create_metal_token(admin, asked)
    spoilt = {"metadata": {"annotations": {annotation: "nonsense"}}}
    await admin.merge_patch(METALNODES, "mac-1", namespace, spoilt)
    with pytest.raises(CliError, match="give it with --ttl or --server"):
        await create_metal_token(admin, asked)
    token = TokenOptions(ttl=timedelta(hours=1), server="https://api.example.com:6443")
    await create_metal_token(admin, MetalTokenOptions("mac-1", namespace, token=token))
