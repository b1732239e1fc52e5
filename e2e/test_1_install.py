"""The shipped manifests on a real node: two replicas, ready, restricted, and one of them leads."""

from __future__ import annotations

from e2e.images import Images
from e2e.kube import CONTROLLER, SYSTEM, Kube, condition, eventually

DEPLOYMENT = "deployment/llmkube-controller"
PODS = ("pods", "-n", SYSTEM, "-l", CONTROLLER)


async def test_the_images_have_the_names_that_the_manifests_use(
    installed: Kube, images: Images
) -> None:
    deployment = await installed.get(DEPLOYMENT, "-n", SYSTEM)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == images.name("controller")
    config = await installed.get("configmap/llmkube-verifier", "-n", SYSTEM)
    assert config["data"]["image"] == images.name("verifier")


async def test_two_replicas_are_ready_under_the_restricted_level(installed: Kube) -> None:
    namespace = await installed.get("namespace", SYSTEM)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    await installed.wait(DEPLOYMENT, "jsonpath={.status.readyReplicas}=2", SYSTEM)
    pods = await installed.items(*PODS)
    assert len(pods) == 2
    for pod in pods:
        assert condition(pod, "Ready")["status"] == "True"
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


async def holder(kube: Kube) -> str:
    lease = await kube.get("lease/llmkube-controller", "-n", SYSTEM)
    return str(lease["spec"].get("holderIdentity") or "")


async def test_a_leader_is_elected_among_the_pods(installed: Kube) -> None:
    names = [pod["metadata"]["name"] for pod in await installed.items(*PODS)]

    async def led() -> bool:
        identity = await holder(installed)
        return any(name in identity for name in names)

    assert await eventually(led)
