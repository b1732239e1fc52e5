"""The node itself: a pod runs, and its termination message comes back."""

from __future__ import annotations

import json
from datetime import timedelta

from e2e import site
from e2e.images import Images
from llmkube.verifier.policy import parse_network
from llmkube.verifier.protocol import CheckRequest, Outcome, decode_report, encode_request
from tests.support.ingresses import issue


def _pod(image: str, request: CheckRequest) -> dict[str, object]:
    container = {
        "name": "verifier",
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["python", "-m", "llmkube.verifier"],
        "env": [{"name": "LLMKUBE_CHECK", "value": encode_request(request)}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    spec = {
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "containers": [container],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "verifier", "namespace": "default"},
        "spec": spec,
    }


async def test_a_verifier_pod_returns_its_report(the_site: site.Site, images: Images) -> None:
    mac = issue()
    request = CheckRequest(
        input_hash="e2e",
        spki=mac.spki,
        certificate=mac.der,
        port=9443,
        addresses=("127.0.0.1", "10.213.0.1"),
        deny=(parse_network("10.96.0.0/16"),),
        connect_timeout=timedelta(seconds=2),
        handshake_timeout=timedelta(seconds=2),
    )
    kubectl = the_site.cluster.kubectl
    pod = _pod(images.name("verifier"), request)
    await kubectl("create", "-f", "-", stdin=json.dumps(pod))
    await kubectl(
        "wait", "pod/verifier", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s"
    )
    shown = await kubectl("get", "pod", "verifier", "-o", "json")
    terminated = json.loads(shown.stdout)["status"]["containerStatuses"][0]["state"]["terminated"]
    report = decode_report(terminated["message"])
    assert report.input_hash == "e2e"
    assert [result.result for result in report.results] == [Outcome.NOT_ALLOWED, Outcome.REFUSED]
    await kubectl("delete", "pod", "verifier", "--timeout=60s")
