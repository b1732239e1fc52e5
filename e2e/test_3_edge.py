"""An edge cluster: the shipped edge as a pod, pushing to a datacenter (here: the same cluster)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from e2e import site
from e2e.kube import SYSTEM, Kube
from e2e.macs import llmkube

EDGE = Path(__file__).resolve().parent.parent / "config" / "edge"
NAME = "home"
# No storage here for the claim that keeps the renewed credential: a pod's own folder will do.
PATCH = [
    {"op": "replace", "path": "/spec/template/spec/volumes/1", "value": {
        "name": "state", "emptyDir": {}}},
]  # fmt: skip


def _overlay(folder: Path) -> Path:
    """What an admin writes: the site's name, and this cluster's storage."""
    folder.mkdir()
    document = {
        "resources": [os.path.relpath(EDGE, folder)],
        "namespace": SYSTEM,
        "configMapGenerator": [
            {"name": "llmkube-edge", "behavior": "merge", "literals": [f"cluster-name={NAME}"]}
        ],
        "patches": [
            {
                "target": {"kind": "Deployment", "name": "llmkube-edge"},
                "patch": json.dumps(PATCH),
            }
        ],
    }
    (folder / "kustomization.yaml").write_text(json.dumps(document))
    return folder


async def test_the_shipped_edge_makes_its_site_connected(
    installed: Kube, the_site: site.Site
) -> None:
    credential = the_site.folder / "edge.kubeconfig"
    await llmkube(
        the_site, "fleet", "register", NAME, "-o", str(credential), "--heartbeat-interval=5s",
        "--display-name=At home", "--tier=eu",
    )  # fmt: skip
    secret = ["secret", "generic", "llmkube-edge-datacenter"]
    await installed.kubectl("create", *secret, "-n", SYSTEM, f"--from-file=kubeconfig={credential}")
    overlay = _overlay(the_site.folder / "edge-overlay")
    await installed.kubectl("apply", "--server-side", "-k", str(overlay))
    await installed.wait(f"fc/{NAME}", "jsonpath={.status.phase}=Connected", SYSTEM)
    status = (await installed.get(f"fc/{NAME}"))["status"]
    assert status["capacity"]["nodes"] == 1
    shown = (await installed.kubectl("get", "mn,fc", "-A")).stdout
    row = next(line.split() for line in shown.splitlines() if NAME in line)
    assert "Connected" in row
    table = await llmkube(the_site, "fleet", "status")
    assert NAME in table


async def test_a_stopped_edge_goes_stale_and_then_unreachable(installed: Kube) -> None:
    await installed.kubectl("scale", "deployment/llmkube-edge", "-n", SYSTEM, "--replicas=0")
    await installed.wait(f"fc/{NAME}", "jsonpath={.status.phase}=Stale", SYSTEM)
    await installed.wait(f"fc/{NAME}", "jsonpath={.status.phase}=Unreachable", SYSTEM)
    events = (await installed.kubectl("get", "events", "-n", "default")).stdout
    assert f"federatedcluster/{NAME}" in events
