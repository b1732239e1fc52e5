"""Flags of the controller that no other test needs, on the real command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from tests.support.command import run_llmkube, running_llmkube
from tests.support.controller import running_controller
from tests.support.wait import eventually


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        pytest.param(
            "--controllers=heartbeats",
            "choose from federatedcluster, heartbeat, verification",
            id="a controller that is none",
        ),
        pytest.param("--controllers=,", "choose from", id="no controller at all"),
        pytest.param(
            "--check-timeout=5s",
            "checks.handshake_timeout must be less than checks.timeout",
            id="a check that cannot be in time",
        ),
        pytest.param("--metrics-bind-address=8080", "use HOST:PORT", id="a port alone"),
        pytest.param("--log-level=loud", "use debug, info, warning or error", id="a level"),
    ],
)
async def test_a_flag_that_makes_no_sense_says_what_to_write(flag: str, words: str) -> None:
    ran = await run_llmkube("controller", flag)
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


@pytest.mark.cluster
async def test_context_chooses_a_cluster_of_the_kubeconfig(
    crds: ControlPlane, tmp_path: Path
) -> None:
    document = yaml.safe_load(crds.admin_kubeconfig.read_text())
    good = document["current-context"]
    document["clusters"].append({"name": "away", "cluster": {"server": "https://127.0.0.1:1"}})
    user = document["contexts"][0]["context"]["user"]
    document["contexts"].append({"name": "away", "context": {"cluster": "away", "user": user}})
    document["current-context"] = "away"
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(document))
    async with running_controller(kubeconfig, f"--context={good}") as controller:
        (greeting,) = controller.logged("llmkube controller")
        assert greeting["server"] == crds.server


@pytest.mark.cluster
async def test_console_logs_are_lines_for_people(crds: ControlPlane, tmp_path: Path) -> None:
    args = ["controller", "--log-format=console", "--metrics-bind-address=0"]
    args += ["--health-probe-bind-address=0", f"--kubeconfig={crds.admin_kubeconfig}"]
    async with running_llmkube(args, log=tmp_path / "log") as running:
        await eventually(lambda: "controller started" in running.text, "it works")
        assert await running.stop() == 0
        lines = running.text.splitlines()
    assert any("[info" in line and "controller started" in line for line in lines)
    assert not any(line.startswith("{") for line in lines)
    assert "\x1b" not in running.text, "no colours in a file"
