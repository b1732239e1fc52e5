"""The manifests in config/: they build, say what they should, and a real API server takes them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import kubectl
from devcluster.controlplane import ControlPlane
from llmkube.api import names
from llmkube.controller.options import DEFAULT_VERIFIER_IMAGE
from tests.support.wait import eventually

CONFIG = Path(__file__).resolve().parent.parent / "config"
KUSTOMIZATIONS = sorted(
    p.parent.relative_to(CONFIG)
    for p in CONFIG.rglob("kustomization.yaml")
    if "kind: Component" not in p.read_text()
)
Object = dict[str, Any]


def build(folder: Path) -> list[Object]:
    result = subprocess.run(
        [kubectl.path(), "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [d for d in yaml.safe_load_all(result.stdout) if d]


def one(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


@pytest.fixture(scope="module")
def default() -> list[Object]:
    return build(CONFIG / "default")


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=str)
def test_every_kustomization_builds(folder: Path) -> None:
    assert build(CONFIG / folder)


def test_every_manifest_belongs_to_a_kustomization() -> None:
    for path in CONFIG.rglob("*.yaml"):
        if path.name in ("kustomization.yaml", "rules.yaml", "rules_test.yaml"):
            continue
        owner = next(p for p in path.parents if (p / "kustomization.yaml").exists())
        text = (owner / "kustomization.yaml").read_text()
        assert str(path.relative_to(owner)) in text, path


def test_the_component_adds_what_the_prometheus_operator_reads(tmp_path: Path) -> None:
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(CONFIG / "default", tmp_path)],
        "components": [relative(CONFIG / "prometheus", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    objects = build(tmp_path)
    monitor = one(objects, "ServiceMonitor", "llmkube-controller")
    service = one(objects, "Service", "llmkube-controller-metrics")
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["honorLabels"] is True
    assert one(objects, "PrometheusRule", "llmkube")["spec"]["groups"]


def relative(target: Path, start: Path) -> str:
    return os.path.relpath(target, start)


# One place for each name ------------------------------------------------------------------------
def controller_container(objects: list[Object]) -> Object:
    deployment = one(objects, "Deployment", names.CONTROLLER_ACCOUNT)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return dict(container)


def test_the_verifier_image_is_named_once(default: list[Object]) -> None:
    """The flag and the admission policy both read the ConfigMap; the code has the same default."""
    image = one(default, "ConfigMap", "llmkube-verifier")["data"]["image"]
    assert image == DEFAULT_VERIFIER_IMAGE
    container = controller_container(default)
    assert "--verifier-image=$(VERIFIER_IMAGE)" in container["args"]
    (variable,) = container["env"]
    assert variable["valueFrom"]["configMapKeyRef"] == {"name": "llmkube-verifier", "key": "image"}
    mentions = [o["metadata"]["name"] for o in default if image in json.dumps(o)]
    assert mentions == ["llmkube-verifier"]


def test_images_are_set_in_an_overlay_in_one_place(tmp_path: Path) -> None:
    overlay = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [relative(CONFIG / "default", tmp_path)],
        "images": [
            {
                "name": f"ghcr.io/llmkube/llmkube-{part}",
                "newName": f"registry.example/{part}",
                "newTag": "t1",
            }
            for part in ("controller", "verifier")
        ],
        "configurations": ["image_fields.yaml"],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    fields = (CONFIG / "default" / "image_fields.yaml").read_text()
    (tmp_path / "image_fields.yaml").write_text(fields)
    objects = build(tmp_path)
    assert controller_container(objects)["image"] == "registry.example/controller:t1"
    verifier = one(objects, "ConfigMap", "llmkube-verifier")["data"]["image"]
    assert verifier == "registry.example/verifier:t1"


def test_the_policies_know_the_names_in_the_code() -> None:
    pods = (CONFIG / "admission/controller_pods.yaml").read_text()
    assert f"matches('^system:serviceaccount:[^:]+:{names.CONTROLLER_ACCOUNT}$')" in pods
    assert f"namespace: {names.SYSTEM_NAMESPACE}" in pods
    assert str(list(names.VERIFIER_COMMAND)) in pods
    for label in (names.MANAGED_BY_LABEL, names.COMPONENT_LABEL):
        assert f"'{label}'" in pods
    tokens = (CONFIG / "admission/account_tokens.yaml").read_text()
    match = re.search(r"\^system:serviceaccount:\[\^:\]\+:llmkube-\((\w+)\|(\w+)\)-", tokens)
    assert match is not None
    prefixes = {f"llmkube-{word}-" for word in match.groups()}
    assert prefixes == {names.METAL_ACCOUNT_PREFIX, names.EDGE_ACCOUNT_PREFIX}


def test_every_policy_fails_closed(default: list[Object]) -> None:
    policies = [o for o in default if o["kind"] == "ValidatingAdmissionPolicy"]
    bindings = [o for o in default if o["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert len(policies) == 3
    assert {b["spec"]["policyName"] for b in bindings} == {p["metadata"]["name"] for p in policies}
    for policy in policies:
        assert policy["spec"]["failurePolicy"] == "Fail"
    for binding in bindings:
        assert binding["spec"]["validationActions"] == ["Deny"]
        if "paramRef" in binding["spec"]:
            assert binding["spec"]["paramRef"]["parameterNotFoundAction"] == "Deny"


# The Deployment ---------------------------------------------------------------------------------
def test_the_deployment_is_as_robust_as_the_controller(default: list[Object]) -> None:
    deployment = one(default, "Deployment", "llmkube-controller")
    assert deployment["spec"]["replicas"] == 2
    container = controller_container(default)
    assert container["args"][:2] == ["controller", "--leader-elect"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"metrics": 8080, "health": 8081}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for kind, name in (
        ("PodDisruptionBudget", "llmkube-controller"),
        ("NetworkPolicy", "llmkube-controller"),
    ):
        spec = one(default, kind, name)["spec"]
        selector = spec.get("selector") or spec["podSelector"]
        assert selector["matchLabels"].items() <= labels.items()
    service = one(default, "Service", "llmkube-controller-metrics")
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_network_policies_name_what_is_needed(default: list[Object]) -> None:
    controller = one(default, "NetworkPolicy", "llmkube-controller")["spec"]
    egress = [
        (port["port"], port.get("protocol", "TCP"))
        for rule in controller["egress"]
        for port in rule["ports"]
    ]
    assert egress == [(443, "TCP"), (6443, "TCP"), (53, "UDP"), (53, "TCP")]
    (verifier,) = build(CONFIG / "network-policy" / "verifier")
    assert verifier["spec"]["ingress"] == []
    selector = verifier["spec"]["podSelector"]["matchLabels"]
    assert {f"{k}={v}" for k, v in selector.items()} == set(names.VERIFIER_SELECTOR.split(","))
    (rule,) = verifier["spec"]["egress"]
    assert rule["ports"] == [{"port": 1024, "endPort": 65535}]


# A real API server ------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def empty_cluster() -> Iterator[ControlPlane]:
    """A control plane of its own: here the Deployment must not meet anybody's kubelet."""
    with asyncio.Runner() as runner:
        starting = ControlPlane.start()
        cluster = runner.run(starting.__aenter__())
        try:
            yield cluster
        finally:
            runner.run(starting.__aexit__(None, None, None))


async def generations(cluster: ControlPlane) -> dict[str, int]:
    """How often each installed object's spec has changed."""
    out = await cluster.kubectl("get", "-k", str(CONFIG / "default"), "-o", "json")
    return {
        f"{o['kind']}/{o['metadata']['name']}": o["metadata"].get("generation", 0)
        for o in json.loads(out.stdout)["items"]
    }


@pytest.mark.cluster
async def test_one_command_installs_it(empty_cluster: ControlPlane) -> None:
    result = await empty_cluster.kubectl("apply", "-k", str(CONFIG / "default"))
    assert "Warning" not in result.stderr
    before = await generations(empty_cluster)
    await empty_cluster.kubectl("apply", "-k", str(CONFIG / "default"))
    assert await generations(empty_cluster) == before
    await empty_cluster.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "-f", str(CONFIG / "crd" / "bases")
    )

    async def pods() -> list[Object]:
        # Made by the ReplicaSet under the namespace's restricted level, or not at all.
        out = await empty_cluster.kubectl("get", "pods", "-n", "llmkube-system", "-o", "json")
        items = json.loads(out.stdout)["items"]
        return items if len(items) == 2 else []

    for pod in await eventually(pods, "two pods of the controller exist"):
        (container,) = pod["spec"]["containers"]
        assert container["volumeMounts"][0]["name"] == "tmp"
        assert pod["spec"]["serviceAccountName"] == "llmkube-controller"


@pytest.mark.cluster
async def test_the_samples_are_valid(empty_cluster: ControlPlane) -> None:
    await empty_cluster.kubectl("apply", "-k", str(CONFIG / "crd"))
    await empty_cluster.kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "-f", str(CONFIG / "crd" / "bases")
    )
    for command in (("create", "--dry-run=server", "--validate=strict"), ("apply",)):

        async def applied(command: tuple[str, ...] = command) -> bool:
            # Right after Established the new kind may still be unknown to discovery.
            result = await empty_cluster.kubectl(
                *command, "-k", str(CONFIG / "samples"), check=False
            )
            assert result.returncode == 0, result.stderr
            return True

        await eventually(applied, f"kubectl {command[0]} takes the samples")


@pytest.mark.cluster
@pytest.mark.parametrize("folder", ["network-policy/verifier", "edge", "grafana"])
async def test_the_rest_is_accepted_too(empty_cluster: ControlPlane, folder: str) -> None:
    await empty_cluster.kubectl("apply", "-k", str(CONFIG / "namespace"))
    await empty_cluster.kubectl(
        "apply", "--dry-run=server", "-k", str(CONFIG / folder), "--validate=strict"
    )


@pytest.mark.cluster
async def test_the_policies_have_no_type_errors(empty_cluster: ControlPlane) -> None:
    await empty_cluster.kubectl("apply", "-k", str(CONFIG / "default"))

    async def checked() -> list[Object]:
        out = await empty_cluster.kubectl("get", "validatingadmissionpolicies", "-o", "json")
        items = json.loads(out.stdout)["items"]
        return items if all("typeChecking" in i.get("status", {}) for i in items) else []

    for policy in await eventually(checked, "the API server has type-checked the policies"):
        assert policy["status"]["typeChecking"] == {}, policy["metadata"]["name"]
