"""Where a verifier pod runs: nodeSelector, tolerations, and what the scheduler says."""

from __future__ import annotations

from e2e import site
from e2e.kube import Kube, condition, eventually
from e2e.macs import join, llmkube


async def _pod_of_next_check(
    kube: Kube, the_site: site.Site, name: str, namespace: str
) -> dict[str, object]:
    """Ask for a check and catch its pod. Fails after a while if there is none."""
    await llmkube(the_site, "metal", "verify", name, "-n", namespace)

    async def one() -> dict[str, object] | None:
        pods = await kube.items(
            "pods", "-n", namespace, "-l", "app.kubernetes.io/component=verifier"
        )
        owned = [pod for pod in pods if pod["metadata"]["ownerReferences"][0]["name"] == name]
        return owned[0] if owned else None

    return await eventually(one)


async def test_an_unsatisfiable_selector_gives_the_schedulers_words(
    installed: Kube, the_site: site.Site, namespace: str
) -> None:
    await join(the_site, "nowhere", namespace, "--verifier-node-selector", "rack=none")
    await installed.wait_reachable("nowhere", "Unknown", "VerifierFailed", namespace)
    node = await installed.get("mn/nowhere", "-n", namespace)
    message = condition(node, "Reachable")["message"]
    assert "0/1 nodes are available" in message
    assert all(one["result"] == "Pending" for one in node["status"]["candidates"])


async def test_selector_and_toleration_place_the_pod(
    installed: Kube, the_site: site.Site, namespace: str
) -> None:
    await installed.kubectl("label", "node", "--all", "rack=relay", "--overwrite")
    await installed.kubectl("taint", "node", "--all", "relays=only:NoSchedule", "--overwrite")
    try:
        await join(
            the_site, "placed", namespace,
            "--verifier-node-selector", "rack=relay",
            "--verifier-toleration", "relays=only:NoSchedule",
        )  # fmt: skip
        await installed.wait_reachable("placed", "True", "Verified", namespace)
        pod = await _pod_of_next_check(installed, the_site, "placed", namespace)
        spec = pod["spec"]
        assert isinstance(spec, dict)
        assert spec["nodeSelector"] == {"rack": "relay"}
        assert any(one.get("key") == "relays" for one in spec["tolerations"])
        # Who tolerates nothing waits for a node, in the scheduler's words.
        await join(the_site, "outside", namespace)
        await installed.wait_reachable("outside", "Unknown", "VerifierFailed", namespace)
        node = await installed.get("mn/outside", "-n", namespace)
        assert "taint" in condition(node, "Reachable")["message"]
    finally:
        await installed.kubectl("taint", "node", "--all", "relays-")
