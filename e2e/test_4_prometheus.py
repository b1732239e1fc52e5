"""A real Prometheus scrapes the controller's pods and reads the shipped rules.

Debian's Prometheus cannot ask Kubernetes for its targets. The test reads them where a
ServiceMonitor makes Prometheus read them: from the EndpointSlices of the shipped Service.
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e import addresses, site
from e2e.kube import SYSTEM, Kube, eventually
from e2e.macs import Mac

PORT = 9090
RULES = Path(__file__).resolve().parent.parent / "config" / "prometheus" / "rules.yaml"
SERVICE = "llmkube-controller-metrics"


@pytest.fixture
async def prometheus(the_site: site.Site, installed: Kube) -> AsyncIterator[str]:
    """Its URL. It runs in the node's network, as a pod of the host network would."""
    folder = the_site.folder / "prometheus"
    folder.mkdir(exist_ok=True)
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(_config(await _targets(installed))))
    process = the_site.node.machine.spawn(
        "prometheus",
        [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={addresses.NODE}:{PORT}",
        ],
    )
    yield f"http://{addresses.NODE}:{PORT}"
    await process.stop(grace=timedelta(seconds=10))


async def _targets(kube: Kube) -> list[str]:
    """What stands behind the shipped metrics Service: both replicas, once both are ready."""

    async def both() -> list[str] | None:
        label = f"kubernetes.io/service-name={SERVICE}"
        found = [
            f"{endpoint['addresses'][0]}:{slice_['ports'][0]['port']}"
            for slice_ in await kube.items("endpointslices", "-n", SYSTEM, "-l", label)
            for endpoint in slice_["endpoints"]
            if endpoint["conditions"]["ready"]
        ]
        return found if len(found) == 2 else None

    return await eventually(both)


def _config(targets: list[str]) -> dict[str, Any]:
    scrape = {
        "job_name": "llmkube",
        "honor_labels": True,
        "static_configs": [{"targets": targets}],
    }
    return {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scrape],
    }


async def _query(url: str, expression: str) -> list[dict[str, Any]]:
    def ask() -> list[dict[str, Any]]:
        target = f"{url}/api/v1/query?query={urllib.parse.quote(expression)}"
        with urllib.request.urlopen(target, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])

    try:
        return await asyncio.to_thread(ask)
    except OSError:
        return []


async def test_both_pods_are_scraped_and_one_leads(prometheus: str, studio: Mac) -> None:
    async def both_up() -> bool:
        series = await _query(prometheus, 'up{job="llmkube"} == 1')
        return len(series) == 2

    assert await eventually(both_up)

    async def one_leads() -> bool:
        series = await _query(prometheus, "sum(leader_election_master_status)")
        return bool(series) and series[0]["value"][1] == "1"

    assert await eventually(one_leads)
    connected = await _query(prometheus, "llmkube_metalnode_connected")
    assert connected, "the Macs are seen"


async def test_the_shipped_rules_see_the_hidden_mac(
    prometheus: str, installed: Kube, hidden: Mac
) -> None:
    """Connected and unreachable: the alert is pending at once, and fires after ten minutes."""
    await installed.wait_reachable("hidden", "False", "VerificationFailed", hidden.namespace)

    async def pending() -> bool:
        name = "LLMKubeMetalNodeUnreachable"
        series = await _query(prometheus, f'ALERTS{{alertname="{name}",name="hidden"}}')
        return bool(series) and series[0]["metric"]["alertstate"] == "pending"

    assert await eventually(pending)
