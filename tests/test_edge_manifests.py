"""config/edge: the API server takes it, it is confined as the namespace asks, its flags exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from devcluster.controlplane import ControlPlane
from tests.support.command import run_llmkube

EDGE = Path(__file__).parent.parent / "config" / "edge"


@pytest.mark.cluster
async def test_the_api_server_takes_it_and_pod_security_has_no_complaint(
    shipped: ControlPlane,
) -> None:
    done = await shipped.kubectl("apply", "--dry-run=server", "-k", str(EDGE))
    assert "deployment.apps/llmkube-edge created" in str(done.stdout)
    assert "PodSecurity" not in str(done.stderr)


async def test_the_deployment_uses_flags_that_exist() -> None:
    deployment = yaml.safe_load((EDGE / "deployment.yaml").read_text())
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    command, *flags = container["args"]
    known = set(re.findall(r"--[a-z-]+", (await run_llmkube(command, "--help")).out))
    assert {flag.partition("=")[0] for flag in flags} <= known
