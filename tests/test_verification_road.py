"""Verification on the real API server, with the shipped rights, real verifiers and real sockets."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devcluster.kubelet import Fault, FaultKind, Kubelet, Node
from llmkube.api.times import parse_time
from llmkube.kube.resources import EVENTS, METALNODES
from tests.support.fleet import Fleet, Mac, Object, reporting_as, verifying
from tests.support.ingresses import Credential, closed_port, issue, listening, tls
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster


@pytest.fixture
async def controller(shipped: ControlPlane) -> Path:
    """A kubeconfig of the controller's own account, once the policies let it create pods."""
    return await wait_until_pods_are_allowed(shipped)


@pytest.fixture
def fleet(admin: KubeClient, namespace: str) -> Fleet:
    return Fleet(admin, namespace)


def report_of(credential: Credential, *addresses: str, port: int) -> str:
    return reporting_as(credential.der, credential.spki, *addresses, port=port)("")


async def test_a_mac_is_reachable_at_the_first_address_that_answers(
    controller: Path, kubelet: Kubelet, fleet: Fleet
) -> None:
    mac = await fleet.add("studio", report=None)
    me = issue(uid=mac.uid)
    with listening(tls(me.server_context())) as peer:
        async with verifying(controller):
            await mac.becomes("False", "NoReport")
            await mac.report(report_of(me, "127.0.0.9", "127.0.0.1", port=peer.port))
            status = await mac.becomes("True", "Verified")
            assert status["hostIP"] == "127.0.0.1"
            assert status["ingressPort"] == peer.port
            assert [(c["address"], c["result"]) for c in status["candidates"]] == [
                ("127.0.0.9", "Refused"),
                ("127.0.0.1", "Reachable"),
            ]
            book = status["verification"]
            started, checked = parse_time(book["lastStartTime"]), parse_time(book["lastCheckTime"])
            assert started is not None
            assert checked is not None
            assert checked >= started
            assert book["consecutiveFailures"] == 0
            assert book["podUID"]
            assert len(book["inputHash"]) == 64
            await mac.without_pods()
    assert peer.seen.application_data == []


async def test_the_port_closes_the_key_changes_the_spec_is_wrong(
    controller: Path, kubelet: Kubelet, fleet: Fleet, admin: KubeClient
) -> None:
    mac = await fleet.add("studio", report=None)
    me, other = issue(uid=mac.uid), issue(uid=mac.uid)
    async with verifying(controller):
        with listening(tls(me.server_context())) as peer:
            await mac.report(report_of(me, "127.0.0.1", port=peer.port))
            await mac.becomes("True", "Verified")
        await mac.ask()
        status = await mac.becomes("False", "VerificationFailed")
        assert "hostIP" not in status
        assert status["candidates"][0]["result"] == "Refused"
        assert "127.0.0.1: Refused" in (await mac.reachable())["message"]

        with listening(tls(other.server_context()), port=peer.port):
            await mac.ask()
            await eventually(lambda: _result_is(mac, "PinMismatch"), "another key is noticed")
            await mac.report(report_of(other, "127.0.0.1", port=peer.port))
            status = await mac.becomes("True", "Verified")
            assert status["ingressSPKI"] == _pin(other)
            event = await eventually(lambda: _event(admin, mac.uid), "the new key is told")
            assert event["type"] == "Warning"
            assert _pin(me) in event["note"]
            assert _pin(other) in event["note"]

            await mac.edit(hostIP="not-an-ip")
            status = await mac.becomes("False", "InvalidSpec")
            assert "hostIP" not in status
            await mac.edit(hostIP=None)
            await mac.becomes("True", "Verified")


async def test_a_rotated_key_is_unknown_until_it_is_verified(
    controller: Path, kubelet: Kubelet, fleet: Fleet
) -> None:
    mac = await fleet.add("studio", report=None)
    me, other = issue(uid=mac.uid), issue(uid=mac.uid)
    async with verifying(controller):
        with listening(tls(me.server_context())) as peer:
            await mac.report(report_of(me, "127.0.0.1", port=peer.port))
            await mac.becomes("True", "Verified")
            end = kubelet.play(Fault(FaultKind.UNSCHEDULABLE), namespace=mac.namespace)
            await mac.report(report_of(other, "127.0.0.1", port=peer.port))
            status = await mac.becomes("Unknown", "VerificationPending")
            assert "hostIP" not in status
            assert status["candidates"] == [
                {"address": "127.0.0.1", "result": "Pending", "source": "lan"}
            ]
        end()
        with listening(tls(other.server_context()), port=peer.port):
            await mac.becomes("True", "Verified")


async def test_nobody_gets_the_address_of_another_mac(
    controller: Path, kubelet: Kubelet, fleet: Fleet
) -> None:
    """Its address alone, its address and pin, its whole report, or a certificate of its key."""
    honest = await fleet.add("honest", report=None)
    thief = await fleet.add("thief", report=None)
    me = issue(uid=honest.uid)
    own = issue(uid=thief.uid)
    with listening(tls(me.server_context())) as peer:
        async with verifying(controller):
            await honest.report(report_of(me, "127.0.0.1", port=peer.port))
            await honest.becomes("True", "Verified")

            await thief.report(report_of(own, "127.0.0.1", port=peer.port))
            status = await thief.becomes("False", "VerificationFailed")
            assert status["candidates"][0]["result"] == "PinMismatch"

            await thief.report(report_of(me, "127.0.0.1", port=peer.port))
            await thief.becomes("False", "CertificateMismatch")

            forged = issue(me.key, uid=thief.uid)  # as good as a certificate can be without the key
            await thief.report(report_of(forged, "127.0.0.1", port=peer.port))
            status = await thief.becomes("False", "VerificationFailed")
            assert status["candidates"][0]["result"] == "CertificateMismatch"
            assert "hostIP" not in status
            assert (await honest.status())["hostIP"] == "127.0.0.1"


async def test_a_disconnected_mac_loses_its_host_ip_and_gets_it_back(
    controller: Path, kubelet: Kubelet, fleet: Fleet
) -> None:
    mac = await fleet.add("studio", report=None)
    me = issue(uid=mac.uid)
    with listening(tls(me.server_context())) as peer:
        await mac.report(report_of(me, "127.0.0.1", port=peer.port))
        async with verifying(controller):
            first = await mac.becomes("True", "Verified")
            await mac.connect(connected=False)
            status = await mac.becomes("Unknown", "AgentDisconnected")
            assert "hostIP" not in status
            assert status["candidates"] == first["candidates"]
            await mac.connect()
            status = await mac.becomes("True", "Verified")
            assert status["verification"]["podUID"] != first["verification"]["podUID"]


async def test_a_verifier_runs_where_the_admin_says(
    shipped: ControlPlane, controller: Path, fleet: Fleet
) -> None:
    mac = await fleet.add("studio", report=None)
    me = issue(uid=mac.uid)
    relay = Node(
        "relay-1",
        labels={"pool": "relay"},
        taints=({"key": "dedicated", "value": "relay", "effect": "NoSchedule"},),
    )
    with listening(tls(me.server_context())) as peer:
        await mac.report(report_of(me, "127.0.0.1", port=peer.port))
        async with (
            Kubelet.start(shipped.admin_kubeconfig, nodes=(Node("other"), relay)),
            verifying(controller),
        ):
            await mac.edit(
                verifier={
                    "nodeSelector": {"pool": "relay"},
                    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
                }
            )
            await mac.becomes("True", "Verified")
            await mac.edit(verifier={"nodeSelector": {"pool": "nowhere"}})
            await eventually(
                lambda: _words(mac, "didn't match Pod's node selector"),
                "the scheduler's words are in the condition",
            )
            assert (await mac.reachable())["status"] == "True"


async def test_a_deleted_metalnode_takes_its_check_along(
    controller: Path, kubelet: Kubelet, fleet: Fleet, admin: KubeClient
) -> None:
    mac = await fleet.add("studio", report=None)
    me = issue(uid=mac.uid)
    kubelet.play(Fault(FaultKind.SILENCE), namespace=mac.namespace)
    await mac.report(report_of(me, "127.0.0.1", port=closed_port()))
    async with verifying(controller):
        await eventually(mac.pods, "a verifier pod")
        await admin.delete(METALNODES, mac.name, mac.namespace)
        await mac.without_pods()
        again = await fleet.add("again", report=None)
        me = issue(uid=again.uid)
        await again.report(report_of(me, "127.0.0.1", port=closed_port()))
        await eventually(again.pods, "the slot is free for another")


# Small parts ------------------------------------------------------------------------------------
def _pin(credential: Credential) -> str:
    return b64encode(credential.spki).decode()


async def _result_is(mac: Mac, result: str) -> bool:
    return set((await mac.results()).values()) == {result}


async def _words(mac: Mac, words: str) -> bool:
    return words in (await mac.reachable()).get("message", "")


async def _event(admin: KubeClient, uid: str, reason: str = "IngressKeyChanged") -> Object | None:
    found = await admin.list(EVENTS)
    about = [e for e in found if e.get("regarding", {}).get("uid") == uid]
    return next((e for e in about if e["reason"] == reason), None)
