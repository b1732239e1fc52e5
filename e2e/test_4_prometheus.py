"""A real Prometheus finds the controller's pods by the shipped labels and scrapes them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from devcluster.process import Process
from e2e import addresses, site
from e2e.kube import Kube, eventually
from e2e.macs import Mac
from e2e.test_1_install import SYSTEM

PORT = 9090


@pytest.fixture
async def prometheus(the_site: site.Site, installed: Kube) -> AsyncIterator[str]:
    """Its URL. It runs in the node's network, as a pod of the host network would."""
    folder = the_site.folder / "prometheus"
    folder.mkdir()
    config = folder / "prometheus.yml"
    config.write_text(json.dumps(_config(the_site)))
    process: Process = the_site.node.machine.spawn(
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


def _config(the_site: site.Site) -> dict[str, Any]:
    source = "__meta_kubernetes_pod"
    return {
        "global": {"scrape_interval": "2s"},
        "scrape_configs": [
            {
                "job_name": "llmkube",
                "kubernetes_sd_configs": [
                    {
                        "role": "pod",
                        "kubeconfig_file": str(the_site.cluster.admin_kubeconfig),
                        "namespaces": {"names": [SYSTEM]},
                    }
                ],
                "relabel_configs": [
                    {
                        "source_labels": [f"{source}_label_app_kubernetes_io_component"],
                        "regex": "controller",
                        "action": "keep",
                    },
                    {
                        "source_labels": [f"{source}_container_port_name"],
                        "regex": "metrics",
                        "action": "keep",
                    },
                    {"source_labels": [f"{source}_name"], "target_label": "pod"},
                ],
            }
        ],
    }


async def _query(url: str, expression: str) -> list[dict[str, Any]]:
    def ask() -> list[dict[str, Any]]:
        target = f"{url}/api/v1/query?query={urllib.request.quote(expression)}"  # type: ignore[attr-defined]
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
