"""What goes away takes everything with it, even in the middle of a check."""

from __future__ import annotations

import json
import subprocess

from e2e import site
from e2e.kube import SYSTEM, Kube, eventually
from e2e.macs import NAMESPACE, Mac, drop_incoming, join
from e2e.test_1_install import PODS


async def test_a_deleted_metalnode_takes_everything_with_it(
    installed: Kube, the_site: site.Site, laptop: Mac
) -> None:
    await installed.wait_reachable("laptop", "True", "Verified", NAMESPACE)
    owned = "serviceaccount,role,rolebinding,lease,pod"

    async def left() -> list[str]:
        items = await installed.items(owned, "-n", NAMESPACE)
        return [
            one["metadata"]["name"]
            for one in items
            for owner in one["metadata"].get("ownerReferences", [])
            if owner["name"] == "laptop"
        ]

    assert len(await left()) >= 4

    async def as_laptop(*argv: str) -> subprocess.CompletedProcess[str]:
        return await the_site.cluster.kubectl(*argv, check=False, kubeconfig=laptop.kubeconfig)

    allowed = await as_laptop("get", "mn/laptop", "-n", NAMESPACE)
    assert allowed.returncode == 0, allowed.stderr
    await installed.kubectl("delete", "mn/laptop", "-n", NAMESPACE, "--timeout=60s")

    async def all_gone() -> bool:
        return not await left()

    assert await eventually(all_gone)

    async def token_dead() -> bool:
        answer = await as_laptop("get", "--raw=/api")
        return "Unauthorized" in answer.stderr or "must be logged in" in answer.stderr

    assert await eventually(token_dead)
    assert laptop.agent.returncode is None, "the agent keeps trying"


async def test_a_namespace_deleted_in_mid_check_ends_cleanly(
    installed: Kube, the_site: site.Site
) -> None:
    brief = "brief"
    await installed.kubectl("create", "namespace", brief)
    mac = await join(the_site, "leaving", brief)
    drop_incoming(mac)

    async def in_mid_check() -> bool:
        pods = await installed.items("pods", "-n", brief)
        return any(pod["status"]["phase"] in ("Pending", "Running") for pod in pods)

    assert await eventually(in_mid_check)
    await installed.kubectl("delete", "namespace", brief, "--timeout=120s")
    assert not await installed.exists("namespace", brief)
    for pod in await installed.items(*PODS):
        name = pod["metadata"]["name"]
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        logs = (await installed.kubectl("logs", name, "-n", SYSTEM)).stdout
        assert "Traceback" not in logs
        for line in logs.splitlines():
            assert json.loads(line)["level"] != "error", line
