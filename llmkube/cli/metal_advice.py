"""What to do about a Mac that is not connected or not reachable: pure rules.

`advise` goes down the road that a working Mac has come: controller, account, Lease, heartbeat,
report, addresses, dial-back. It stops at the first stretch that is broken, because everything
after it follows from that. Neighbour: `metal_describe`, which shows the advice.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from llmkube.api.names import SYSTEM_NAMESPACE, ConditionType, ConnectedReason, ReachableReason
from llmkube.api.times import parse_time
from llmkube.cli.metal_list import condition

Node = Mapping[str, Any]

_CONTROLLER_LOG = f"kubectl -n {SYSTEM_NAMESPACE} logs deployment/llmkube-controller"
_SETTLED = timedelta(minutes=2)
_DEFAULT_LEASE = timedelta(seconds=120)
_RECHECK = timedelta(minutes=10)
_FIRST_BACKOFF = timedelta(seconds=30)

_CANDIDATE = {
    "Reachable": "answers there with the Mac's key",
    "Pending": "not checked yet with this key and port",
    "Timeout": "no answer: a firewall drops it, or the verifier's node has no way there",
    "Refused": "nothing listens at port {port}: is the agent running, does a firewall reject?",
    "PinMismatch": "TLS with another key: another machine, or a proxy, has this address",
    "CertificateMismatch": "the Mac's key with an older certificate: restart the agent",
    "NotAllowed": "never dialled: the address policy refuses it (--deny-cidr, or not routable)",
    "Error": "no way there, or what answers does not speak TLS 1.3: a proxy, another service?",
}


def explain_candidate(result: str, port: int | None) -> str:
    """What a dial-back's outcome means for the admin."""
    return _CANDIDATE.get(result, "unknown outcome: update llmkube").format(port=port)


def next_check(node: Node) -> datetime | None:
    """About when the controller checks again by itself; None if nothing was checked yet."""
    verification = (node.get("status") or {}).get("verification") or {}
    finished = parse_time(verification.get("lastCheckTime"))
    if finished is None:
        return None
    failures = int(verification.get("consecutiveFailures") or 0)
    if failures <= 0:
        return finished + _RECHECK
    doublings = min(failures - 1, 10)
    return finished + min(_FIRST_BACKOFF * (1 << doublings), _RECHECK)


def advise(node: Node, lease: Node | None, now: datetime, *, lease_known: bool) -> list[str]:
    """What to do, most important first; empty if all is well."""
    connected = condition(node, ConditionType.AGENT_CONNECTED)
    if not connected or (lease_known and _disagrees(connected, lease, now)):
        return [_controller_is_not_working(connected)]
    if connected["status"] != "True":
        return _advise_connection(node, str(connected["reason"]))
    reachable = condition(node, ConditionType.REACHABLE)
    if not reachable:
        return [_controller_is_not_working(reachable)]
    if reachable["status"] == "True" and reachable["reason"] == ReachableReason.VERIFIED:
        return []
    return _advise_reachability(node, str(reachable["reason"]))


def _disagrees(connected: Mapping[str, Any], lease: Node | None, now: datetime) -> bool:
    """True if the controller has not acted for minutes on what the Lease plainly says."""
    spec = (lease or {}).get("spec") or {}
    renewed = parse_time(spec.get("renewTime"))
    if renewed is None:
        return False
    silence = now - renewed
    duration = timedelta(seconds=spec.get("leaseDurationSeconds") or 0) or _DEFAULT_LEASE
    if connected["status"] == "True":
        return silence > duration + _SETTLED
    if connected["reason"] == ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND:
        return False
    judged = parse_time(connected.get("lastTransitionTime"))
    return silence < duration and judged is not None and renewed - judged > _SETTLED


def _controller_is_not_working(found: Mapping[str, Any]) -> str:
    seen = "has not acted on what the Lease says" if found else "has not judged this Mac yet"
    return (
        f"The controller {seen}. See whether it runs: `kubectl -n {SYSTEM_NAMESPACE} get "
        f"deployments`, then `{_CONTROLLER_LOG}`."
    )


def _advise_connection(node: Node, reason: str) -> list[str]:
    name, namespace = node["metadata"]["name"], node["metadata"]["namespace"]
    create = f"`llmkube metal token create {name} -n {namespace}`"
    rotate = f"`llmkube metal token rotate {name} -n {namespace}`"
    match reason:
        case ConnectedReason.SERVICE_ACCOUNT_NOT_FOUND:
            return [f"The Mac was revoked. To let it in again: {create}, then copy the new file."]
        case ConnectedReason.LEASE_NOT_FOUND:
            return [
                f"Its Lease is gone. {create} makes it again; the agent then goes on by itself."
            ]
        case ConnectedReason.NEVER_CONNECTED:
            return [
                "Start the agent on the Mac: "
                "`llmkube agent --kubeconfig FILE --upstream http://127.0.0.1:PORT "
                f"--relay-token-file relay-token` with the file that {create} wrote.",
                "If it runs, its log says why it does not get through: the API server's URL as "
                "seen from the Mac (--server), a firewall, or an expired token.",
            ]
        case _:
            return [
                "The heartbeat stopped. See whether the Mac is on, awake and online, and whether "
                "the agent runs; its log says why it does not get through.",
                f"If its token has expired (the Mac was off for weeks): {rotate}, then copy the "
                "new file.",
            ]


def _advise_reachability(node: Node, reason: str) -> list[str]:
    name, namespace = node["metadata"]["name"], node["metadata"]["namespace"]
    host_ip = f"`llmkube metal token create {name} -n {namespace} --host-ip IP`"
    verify = f"`llmkube metal verify {name} -n {namespace} --wait`"
    match reason:
        case ReachableReason.INVALID_SPEC:
            return [f"spec.hostIP is no IP address. Set a right one, or '' for none: {host_ip}."]
        case ReachableReason.NO_REPORT:
            return ["The agent beats but reports nothing. Update and restart it."]
        case ReachableReason.INVALID_REPORT:
            return ["The agent's report is malformed, see Reachable above. Update and restart it."]
        case ReachableReason.NO_CANDIDATES:
            return [
                "The agent found no address of its own: see its log for what it rejected and why. "
                f"If you know one: {host_ip}."
            ]
        case ReachableReason.NO_ALLOWED_ADDRESS:
            return [
                "The address policy refuses every address. Give one on a LAN or tailnet that is "
                f"outside the cluster's own ranges: {host_ip}; or change the controller's "
                "--deny-cidr and --allow-cidr."
            ]
        case ReachableReason.CERTIFICATE_MISMATCH:
            return [
                "The agent still shows the certificate of an earlier MetalNode of this name. It "
                "renews it within a minute; if not, restart it."
            ]
        case ReachableReason.VERIFIER_FAILED | ReachableReason.VERIFIED:
            return [
                "The verifier pod failed, which says nothing about the Mac: see Reachable above, "
                f"and `kubectl -n {namespace} get pods,events`. Then try again: {verify}."
            ]
        case ReachableReason.VERIFICATION_PENDING | ReachableReason.AGENT_DISCONNECTED:
            return [f"A check is due and starts by itself. To see its result: {verify}."]
        case _:
            return [*_advise_addresses(node), f"Then try again without waiting: {verify}."]


def _advise_addresses(node: Node) -> list[str]:
    """The most telling outcomes first."""
    status = node.get("status") or {}
    results = {candidate["result"] for candidate in status.get("candidates") or ()}
    steps = []
    if "CertificateMismatch" in results:
        steps.append("Restart the agent: it serves an older certificate than it reports.")
    if "PinMismatch" in results:
        steps.append(
            "Another machine or a TLS proxy answers at an address of the Mac: take it out of the "
            "way, or start the agent with --host-ip and an address that is the Mac's alone."
        )
    if "Refused" in results:
        steps.append(
            f"Let the Mac accept connections at port {status.get('ingressPort')}: agent running, "
            "incoming connections allowed in its firewall, Local Network privacy granted."
        )
    if results & {"Timeout", "Error"} or not steps:
        steps.append(
            "Make sure that pods of this cluster can reach an address of the Mac: routes, "
            "firewalls, NetworkPolicies, a tailnet on the nodes. If only some nodes can, choose "
            "them with --verifier-node-selector, and run your relay pods there as well."
        )
    return steps
