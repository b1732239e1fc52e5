"""The verifier pod: what it is and what it is not. What admission says: test_admission_pods."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmkube.api.cached import CachedMetalNode, CachedVerifierPlacement
from llmkube.api.spki import SpkiPin
from llmkube.rules.checks import CheckInputs, CheckSettings
from llmkube.rules.verifier_pod import PodSettings, pod_name, render_pod
from llmkube.verifier.policy import AddressPolicy, parse_network
from llmkube.verifier.protocol import decode_request
from tests.support.dialback import node_of
from tests.support.reports import UID, make_certificate

INPUTS = CheckInputs(SpkiPin(bytes(32)), make_certificate(), 9443, ("100.101.2.3", "fd00::1"))
POLICY = AddressPolicy([parse_network("10.0.0.0/8")], [parse_network("10.96.0.0/12")])
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def pod(node: CachedMetalNode | None = None, **settings: str) -> dict:  # type: ignore[type-arg]
    return render_pod(
        node or node_of(),
        INPUTS,
        name="p",
        policy=POLICY,
        checks=CheckSettings(),
        settings=PodSettings(image="registry.example/v:1", **settings),
    )


def test_it_carries_the_whole_question_as_literal_environment() -> None:
    (container,) = pod()["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == "LLMKUBE_CHECK"
    request = decode_request(variable["value"])
    assert request.input_hash == INPUTS.hash()
    assert (request.spki, request.certificate) == (INPUTS.pin.digest, INPUTS.certificate)
    assert (request.port, request.addresses) == (INPUTS.port, INPUTS.addresses)
    assert (request.allow, request.deny) == (POLICY.allow, POLICY.deny)


def test_it_is_owned_by_its_metalnode_without_blocking_its_deletion() -> None:
    assert pod()["metadata"]["ownerReferences"] == [
        {
            "apiVersion": "inference.llmkube.dev/v1alpha1",
            "kind": "MetalNode",
            "name": "m1",
            "uid": UID,
            "controller": True,
        }
    ]


def test_it_has_no_token_no_volume_and_no_right() -> None:
    spec = pod()["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert "volumes" not in spec
    assert "serviceAccountName" not in spec
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = spec["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


def test_it_ends_by_itself_and_gets_the_cpu_that_a_handshake_needs() -> None:
    spec = pod()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] == 120
    resources = spec["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == ("50m", "1")


def test_meshes_leave_it_alone() -> None:
    metadata = pod()["metadata"]
    assert metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert metadata["annotations"]["linkerd.io/inject"] == "disabled"


def test_placement_is_copied_verbatim() -> None:
    toleration = {
        "key": "k",
        "operator": "Equal",
        "value": "v",
        "effect": "NoExecute",
        "tolerationSeconds": 7,
    }
    node = node_of(spec={"verifier": {"nodeSelector": {"a": "b"}, "tolerations": [toleration]}})
    spec = pod(node)["spec"]
    assert spec["nodeSelector"] == {"a": "b"}
    assert spec["tolerations"] == [toleration]


def test_a_pull_secret_is_named_only_if_there_is_one() -> None:
    assert "imagePullSecrets" not in pod()["spec"]
    assert pod(pull_secret="regcred")["spec"]["imagePullSecrets"] == [{"name": "regcred"}]


@given(st.from_regex(SUBDOMAIN, fullmatch=True).filter(lambda name: len(name) <= 253))
def test_every_name_of_a_metalnode_makes_a_pod_name(name: str) -> None:
    made = pod_name(name, "0123456789")
    assert SUBDOMAIN.fullmatch(made)
    assert len(made) <= 66


# The hash of the inputs ---------------------------------------------------------------------------
PLACED = CachedVerifierPlacement({"a": "1", "b": "2"}, ({"key": "k", "operator": "Exists"},))


@pytest.mark.parametrize(
    "other",
    [
        replace(INPUTS, pin=SpkiPin(b"\1" * 32)),
        replace(INPUTS, certificate=b"another"),
        replace(INPUTS, port=9444),
        replace(INPUTS, addresses=("100.101.2.3",)),
        replace(INPUTS, addresses=("fd00::1", "100.101.2.3")),
        replace(INPUTS, placement=PLACED),
    ],
)
def test_each_input_changes_the_hash(other: CheckInputs) -> None:
    assert other.hash() != INPUTS.hash()


def test_the_hash_does_not_depend_on_the_order_of_a_mapping_or_on_empty_placement() -> None:
    turned = CachedVerifierPlacement({"b": "2", "a": "1"}, ({"operator": "Exists", "key": "k"},))
    assert replace(INPUTS, placement=PLACED).hash() == replace(INPUTS, placement=turned).hash()
    assert replace(INPUTS, placement=CachedVerifierPlacement()).hash() == INPUTS.hash()


def test_the_pod_is_json() -> None:
    assert msgspec.json.encode(pod())
