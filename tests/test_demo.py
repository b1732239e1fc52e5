"""The demo plays its whole script on a real API server, and the controller needs no right that
config/rbac does not give."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.process import Process
from llmkube.api.names import CONTROLLER_ACCOUNT, SYSTEM_NAMESPACE
from tests.conftest import CONFIG, ROOT
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

CONTROLLER = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{CONTROLLER_ACCOUNT}"
Right = tuple[str, str, str]
"""(verb, API group, resource[/subresource])"""

_MAY = "test_rbac_controller.py::test_may"
NOT_SEEN_IN_THE_DEMO: dict[Right, str] = {
    ("set-phase", "federation.llmkube.dev", "federatedclusters"): (
        "test_admission_phase.py::test_the_controller_and_a_cluster_admin_may_set_it"
    ),
    ("patch", "events.k8s.io", "events"): (
        "test_kube_events.py::test_create_and_patch_are_all_the_rights_it_needs"
    ),
    ("get", "", "pods"): _MAY,
    ("get", "inference.llmkube.dev", "metalnodes/status"): _MAY,
    ("get", "federation.llmkube.dev", "federatedclusters/status"): _MAY,
}
"""Rights that this script does not need each time, and the test that names each."""


def test_each_right_beyond_the_demo_has_a_test_that_exists() -> None:
    for test in NOT_SEEN_IN_THE_DEMO.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), test


async def test_every_act_of_the_script_goes_as_it_should(tmp_path: Path) -> None:
    audit_log = tmp_path / "audit.log"
    log = tmp_path / "demo.log"
    argv = [sys.executable, "-m", "llmkube", "demo", "--once", f"--audit-log={audit_log}"]
    demo = Process.start("demo", argv, log=log)
    try:
        async with asyncio.timeout(timedelta(minutes=12).total_seconds()):
            code = await demo.wait()
    finally:
        await demo.stop()
    assert code == 0, demo.output()
    used, given = set(_used(audit_log)), set(_given())
    assert used
    assert used - given == set(), "the controller uses rights that config/rbac does not give"
    unused = given - used - NOT_SEEN_IN_THE_DEMO.keys()
    assert unused == set(), "config/rbac gives rights that neither the demo nor a named test uses"


async def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = Process.start("demo", [sys.executable, "-m", "llmkube", "demo"], log=tmp_path / "log")
    try:
        await eventually(
            lambda: "export KUBECONFIG=" in demo.output(),
            "the demo is up",
            within=timedelta(minutes=2),
        )
        kubeconfig = Path(demo.output().split("export KUBECONFIG=")[1].split()[0])
        assert kubeconfig.exists()
        demo.signal(signal.SIGINT)
        async with asyncio.timeout(60):
            assert await demo.wait() == 0
    finally:
        await demo.stop()
    assert "Everything is stopped and removed." in demo.output()
    assert not kubeconfig.parent.exists()


def _used(audit_log: Path) -> Iterator[Right]:
    """What the controller asked for and got."""
    for line in audit_log.read_text().splitlines():
        event = json.loads(line)
        reference = event.get("objectRef")
        if event["user"].get("username") != CONTROLLER or reference is None:
            continue
        if event.get("responseStatus", {}).get("code") == 403:
            raise AssertionError(f"refused: {event['verb']} {reference}")
        if reference["resource"] == "selfsubjectreviews":
            continue  # everybody may ask who they are
        yield event["verb"], reference.get("apiGroup", ""), _resource(reference)


def _resource(reference: dict[str, Any]) -> str:
    subresource = reference.get("subresource")
    return f"{reference['resource']}/{subresource}" if subresource else str(reference["resource"])


def _given() -> Iterator[Right]:
    """What config/rbac gives the controller."""
    for file in ("controller_role.yaml", "leader_election_role.yaml"):
        for document in yaml.safe_load_all((CONFIG / "rbac" / file).read_text()):
            for rule in document.get("rules") or ():
                for verb in rule["verbs"]:
                    for group in rule["apiGroups"]:
                        for resource in rule["resources"]:
                            yield verb, group, resource
