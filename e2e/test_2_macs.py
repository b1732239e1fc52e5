"""Macs join with a token file; verifier pods dial them; the status names what truly works."""

from __future__ import annotations

from e2e import site
from e2e.kube import SYSTEM, Kube, condition, eventually
from e2e.macs import INGRESS_PORT, NAMESPACE, TAILNET, Mac, llmkube
from e2e.test_1_install import DEPLOYMENT, PODS, holder


async def test_an_ordinary_mac_is_reachable(
    installed: Kube, the_site: site.Site, studio: Mac
) -> None:
    await installed.wait_reachable("studio", "True", "Verified", NAMESPACE)
    status = (await installed.get("mn/studio", "-n", NAMESPACE))["status"]
    assert status["hostIP"] == the_site.address("studio")
    assert condition({"status": status}, "AgentConnected")["status"] == "True"
    assert status["ingressPort"] == INGRESS_PORT


async def test_the_second_candidate_is_chosen_where_the_first_leads_nowhere(
    installed: Kube, the_site: site.Site, laptop: Mac
) -> None:
    await installed.wait_reachable("laptop", "True", "Verified", NAMESPACE)
    status = (await installed.get("mn/laptop", "-n", NAMESPACE))["status"]
    first, second = status["candidates"][:2]
    assert (first["address"], first["source"]) == (TAILNET, "tailnet")
    assert first["result"] in ("Timeout", "Error")
    assert (second["address"], second["result"]) == (the_site.address("laptop"), "Reachable")
    assert status["hostIP"] == the_site.address("laptop")


async def test_a_dropping_firewall_is_a_timeout_in_plain_words(
    installed: Kube, the_site: site.Site, hidden: Mac
) -> None:
    await installed.wait_reachable("hidden", "False", "VerificationFailed", NAMESPACE)
    node = await installed.get("mn/hidden", "-n", NAMESPACE)
    message = condition(node, "Reachable")["message"]
    assert the_site.address("hidden") in message
    assert "Timeout" in message
    assert "hostIP" not in node["status"]
    assert condition(node, "AgentConnected")["status"] == "True"


async def test_no_verifier_pod_is_left(
    installed: Kube, studio: Mac, laptop: Mac, hidden: Mac
) -> None:
    async def none_left() -> bool:
        return not await installed.items(
            "pods", "-n", NAMESPACE, "--field-selector=status.phase=Succeeded"
        )

    assert await eventually(none_left)


async def test_kubectl_shows_what_the_documentation_says(
    installed: Kube, the_site: site.Site, studio: Mac, laptop: Mac, hidden: Mac
) -> None:
    listing = (await installed.kubectl("get", "mn,fc", "-A")).stdout.splitlines()
    heading = listing[0].split()
    assert heading[:3] == ["NAMESPACE", "NAME", "CHIP"]
    assert heading[-4:] == ["HOST-IP", "CONNECTED", "REACHABLE", "AGE"]
    row = next(line.split() for line in listing if "studio" in line)
    assert row[-4:-1] == [the_site.address("studio"), "True", "True"]
    described = (await installed.kubectl("describe", "mn", "laptop", "-n", NAMESPACE)).stdout
    for words in ("Verified", TAILNET, the_site.address("laptop"), "Ingress SPKI"):
        assert words in described
    events = (await installed.kubectl("get", "events", "-n", NAMESPACE)).stdout
    assert "metalnode/hidden" in events


async def test_the_command_line_explains_the_hidden_one(
    installed: Kube, the_site: site.Site, hidden: Mac
) -> None:
    await installed.wait_reachable("hidden", "False", "VerificationFailed", NAMESPACE)
    shown = await llmkube(the_site, "metal", "describe", "hidden", "-n", NAMESPACE)
    assert the_site.address("hidden") in shown
    assert "Timeout" in shown


async def test_a_deleted_leader_loses_nothing(
    installed: Kube, the_site: site.Site, studio: Mac, laptop: Mac
) -> None:
    await installed.wait_reachable("studio", "True", "Verified", NAMESPACE)
    await installed.wait_reachable("laptop", "True", "Verified", NAMESPACE)
    before = {
        name: (await installed.get(f"mn/{name}", "-n", NAMESPACE))["status"]["conditions"]
        for name in ("studio", "laptop")
    }
    leader = await holder(installed)
    pod = next(
        pod["metadata"]["name"]
        for pod in await installed.items(*PODS)
        if pod["metadata"]["name"] in leader
    )
    await installed.kubectl("delete", "pod", pod, "-n", SYSTEM, "--timeout=90s")

    async def moved() -> bool:
        now = await holder(installed)
        return now not in ("", leader)

    assert await eventually(moved)
    await installed.wait(DEPLOYMENT, "jsonpath={.status.readyReplicas}=2", SYSTEM)
    # The new leader works: it starts a check when asked, and nothing flapped meanwhile.
    await llmkube(the_site, "metal", "verify", "studio", "-n", NAMESPACE, "--wait")
    for name, conditions in before.items():
        after = (await installed.get(f"mn/{name}", "-n", NAMESPACE))["status"]["conditions"]
        assert [(one["type"], one["status"], one["lastTransitionTime"]) for one in after] == [
            (one["type"], one["status"], one["lastTransitionTime"]) for one in conditions
        ]
