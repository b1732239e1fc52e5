"""The agent as a real process against the real API server: it beats, and goes on beating."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import aiohttp
import pytest
import yaml
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from devcluster.controlplane import ControlPlane
from llmkube.agent.heartbeat import Heartbeat
from llmkube.agent.settings import HeartbeatSettings
from llmkube.agent.target import Wanted
from llmkube.api.names import REPORT_ANNOTATION
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.kubeconfig import current_token, replace_token
from llmkube.kube.resources import LEASES, METALNODES
from tests.support.agentprocess import (
    NAME,
    Mac,
    claims,
    create_token,
    llmkube,
    register_mac,
)
from tests.support.command import run_llmkube
from tests.support.ports import free_port
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture
async def mac(crds: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path) -> Mac:
    return await register_mac(crds, admin, namespace, tmp_path)


async def test_a_beat_says_who_when_and_what(mac: Mac) -> None:
    async with mac.agent("--host-ip", "192.0.2.55") as agent:
        await mac.beats.go_on()
        await mac.beats.go_on()
        lease = await mac.beats.read()
        report = await mac.beats.report()
        assert re.fullmatch(r"[-\dT:]+\.\d{6}Z", lease["spec"]["renewTime"])
        assert lease["spec"]["leaseDurationSeconds"] == 120
        assert re.fullmatch(r"[0-9a-f-]{36}", lease["spec"]["holderIdentity"])
        assert len(lease["metadata"]["annotations"][REPORT_ANNOTATION]) < 4096
        assert report.certificate_uid == await mac.uid()
        assert report.ingress_port == agent.port
        assert report.ingress_spki.digest == agent.pin()
        assert report.ingress_certificate == await agent.served_certificate()
        assert report.candidates[0].address == "192.0.2.55"
        managers = {entry["manager"] for entry in lease["metadata"]["managedFields"]}
        assert "llmkube-agent" in managers


async def test_a_restart_keeps_key_certificate_and_holder(mac: Mac) -> None:
    seen = []
    port = free_port()
    for _ in range(2):
        async with mac.agent("--ingress-bind", "127.0.0.1", port=port) as agent:
            await mac.beats.go_on()
            lease = await mac.beats.read()
            seen.append((lease["spec"]["holderIdentity"], await mac.beats.report()))
            assert await agent.stop() == 0
            assert agent.lines()[-1]["event"] == "agent stopped"
    assert seen[0] == seen[1]


async def test_a_report_that_somebody_removed_comes_back(mac: Mac) -> None:
    async with mac.agent():
        await mac.beats.go_on()
        before = await mac.beats.report()
        await mac.admin.merge_patch(
            LEASES,
            mac.beats.lease,
            mac.namespace,
            {"metadata": {"annotations": {REPORT_ANNOTATION: None}}},
        )

        async def returned() -> bool:
            annotations = (await mac.beats.read())["metadata"].get("annotations", {})
            return REPORT_ANNOTATION in annotations

        await eventually(returned, "the report is back")
        assert await mac.beats.report() == before


async def test_it_renews_its_token_at_the_start(mac: Mac) -> None:
    first = current_token(mac.kubeconfig)
    async with mac.agent() as agent:
        await agent.says("token renewed")
        assert current_token(mac.kubeconfig) != first
        assert mac.kubeconfig.stat().st_mode & 0o777 == 0o600
        await mac.beats.go_on()
    log = agent.log.read_text()
    assert first not in log
    assert current_token(mac.kubeconfig) not in log


async def test_a_credential_put_in_place_of_a_revoked_one_is_taken_up(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        where = ("-n", mac.namespace, "--kubeconfig", mac.cluster.admin_kubeconfig)
        await llmkube("metal", "token", "revoke", NAME, *where)
        await agent.says("no heartbeat", do="metal token create")
        fresh = await mac.new_credential(mac.folder / "fresh.kubeconfig", verb="rotate")
        fresh.replace(mac.kubeconfig)
        await agent.says("beating again")
        await mac.beats.go_on()
        assert agent.process.returncode is None


async def test_an_expired_token_waits_for_a_new_file(mac: Mac) -> None:
    """The token runs out while the machine is off: signed by the API server's own key."""
    good = mac.kubeconfig.read_bytes()
    replace_token(mac.kubeconfig, aged(mac, timedelta(hours=-1)))
    async with mac.agent() as agent:
        await agent.says("no heartbeat", do="the token has expired or was revoked")
        mac.kubeconfig.write_bytes(good)
        await agent.said("token renewed")  # in either order
        await agent.said("beating again")


async def test_a_recreated_metalnode_gets_a_new_certificate_of_the_same_key(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        old_uid, pin = await mac.uid(), agent.pin()
        old = await agent.served_certificate()
        await mac.admin.delete(METALNODES, NAME, mac.namespace)
        await agent.says("no heartbeat")
        await eventually(lambda: create_fresh(mac), "the old objects are collected")
        new_uid = await mac.uid()
        assert new_uid != old_uid
        await agent.says("this machine is MetalNode", uid=new_uid)
        await mac.beats.go_on()
        report = await mac.beats.report()
        assert report.certificate_uid == new_uid
        assert report.ingress_spki.digest == agent.pin() == pin
        assert await agent.served_certificate() == report.ingress_certificate != old
        assert "part of the agent failed" not in agent.log.read_text()


async def test_a_metalnode_replaced_under_the_same_credential_is_noticed(mac: Mac) -> None:
    """A backup restored the objects with new UIDs; the account, and so the token, is the old."""
    async with mac.agent() as agent:
        await mac.beats.go_on()
        await mac.admin.delete(METALNODES, NAME, mac.namespace, propagation="Orphan")
        body = {
            "apiVersion": METALNODES.api_version,
            "kind": METALNODES.kind,
            "metadata": {"name": NAME, "namespace": mac.namespace},
            "spec": {"leaseName": mac.beats.lease, "serviceAccountName": mac.beats.lease},
        }

        async def again() -> bool:
            try:
                node = await mac.admin.create(METALNODES, body, mac.namespace)
            except Exception:
                return False
            owner = {
                "apiVersion": METALNODES.api_version,
                "kind": METALNODES.kind,
                "name": NAME,
                "uid": node["metadata"]["uid"],
            }
            patch = {"metadata": {"ownerReferences": [owner]}}
            await mac.admin.merge_patch(LEASES, mac.beats.lease, mac.namespace, patch)
            return True

        await eventually(again, "the MetalNode is created anew")
        await agent.says("belongs to another MetalNode")
        uid = await mac.uid()
        await agent.says("this machine is MetalNode", uid=uid)

        async def reported() -> bool:
            return (await mac.beats.report()).certificate_uid == uid

        await eventually(reported, "the report names the new UID")


async def test_a_lost_lease_is_beaten_again_once_it_is_back(mac: Mac) -> None:
    """A patch on a missing Lease is a 404; an apply or a PUT would be a misleading 403."""
    async with mac.agent() as agent:
        await mac.beats.go_on()
        await mac.admin.delete(LEASES, mac.beats.lease, mac.namespace)
        await agent.says("no heartbeat", do="Lease is gone")
        await mac.new_credential(mac.folder / "unused.kubeconfig")
        await agent.says("beating again")
        await mac.beats.go_on()
        assert (await mac.beats.report()).certificate_uid == await mac.uid()


class FixedReport:
    async def render(self, uid: str) -> str:
        return uid


async def test_a_lease_that_stays_another_metalnodes_is_not_hammered(mac: Mac) -> None:
    await create_token(
        mac.cluster.admin_kubeconfig, mac.namespace, "other", mac.folder / "other.kubeconfig"
    )
    other = await mac.admin.get(LEASES, "llmkube-metal-other", mac.namespace)
    owner = {"metadata": {"ownerReferences": other["metadata"]["ownerReferences"]}}
    await mac.admin.merge_patch(LEASES, mac.beats.lease, mac.namespace, owner)
    beats: list[Exception | None] = []
    rhythm = HeartbeatSettings(interval=timedelta(hours=1))
    wanted = Wanted(mac.namespace, NAME)
    access = await load_access(mac.kubeconfig)
    async with KubeClient(access, clock=SystemClock()) as client, asyncio.TaskGroup() as group:
        heartbeat = Heartbeat(
            client, SystemClock(), rhythm, wanted, "me", FixedReport(), beats.append
        )
        task = group.create_task(heartbeat.run())
        await eventually(lambda: len(beats) >= 2, "the second look")
        await asyncio.sleep(1)
        task.cancel()
    assert beats == [None, None]


@pytest.mark.slow
async def test_two_minutes_without_an_api_server(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        await mac.cluster.stop_apiserver()
        try:
            await agent.says("no heartbeat")
            until = time.monotonic() + 120
            while time.monotonic() < until:
                await agent.served_certificate()  # the ingress does not care
                await asyncio.sleep(5)
            assert agent.process.returncode is None
        finally:
            await mac.cluster.start_apiserver()
        await agent.says("beating again", within=timedelta(seconds=40))
        await mac.beats.go_on()
        troubles = [line for line in agent.lines() if line["event"] == "no heartbeat"]
        assert len(troubles) < 8  # told once per kind, not once per attempt


async def test_a_frozen_api_server_does_not_freeze_the_agent(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        mac.cluster.pause_apiserver()
        try:
            await agent.says("no heartbeat", why="no answer within")
        finally:
            mac.cluster.resume_apiserver()
        await agent.says("beating again")


async def test_started_without_an_api_server_it_serves_with_its_last_certificate(
    mac: Mac,
) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        certificate = await agent.served_certificate()
        await agent.stop()
    broken = yaml.safe_load(mac.kubeconfig.read_text())
    broken["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    mac.kubeconfig.write_text(yaml.safe_dump(broken))
    async with mac.agent() as agent:
        await agent.says("ingress listens")
        assert await agent.served_certificate() == certificate


async def test_sigterm_is_clean_and_a_second_one_immediate(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        assert await agent.stop(signal.SIGTERM) == 0
        stamp = await mac.beats.stamp()
    assert await mac.beats.stamp() == stamp
    assert "Traceback" not in agent.log.read_text()


async def test_a_port_that_is_taken_costs_the_ingress_only(mac: Mac) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, mac.agent("--ingress-bind", "127.0.0.1", port=port) as agent:
        await agent.says("a part of the agent failed", part="ingress")
        await mac.beats.go_on()
        server.close()
        await server.wait_closed()
        await agent.says("ingress listens")


async def test_a_second_agent_on_the_same_state_is_refused(mac: Mac) -> None:
    async with mac.agent() as agent:
        await mac.beats.go_on()
        async with mac.agent() as second:
            assert await second.process.wait() == 1
        assert "another agent is running" in agent.log.read_text()
        await mac.beats.go_on()


async def test_metrics_and_health_for_whoever_watches_the_mac(mac: Mac) -> None:
    port = free_port()
    async with mac.agent("--metrics-bind-address", f"127.0.0.1:{port}") as agent:
        await mac.beats.go_on()
        await agent.says("ingress listens")
        await agent.served_certificate()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/readyz") as answer:
                assert await answer.text() == "ok"
            async with session.get("/metrics") as answer:
                text = await answer.text()
        assert 'llmkube_agent_heartbeats_total{result="ok"}' in text
        assert "llmkube_agent_last_heartbeat_timestamp_seconds 1" in text
        assert "llmkube_agent_ingress_connections" in text


async def test_check_tells_everything_and_writes_nothing(mac: Mac, tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    before = await mac.beats.read()
    async with server:
        text = await llmkube(
            *("agent", "--check", "--kubeconfig", mac.kubeconfig, "--host-ip", "192.0.2.1"),
            *("--state-dir", tmp_path / "none", "--upstream", f"http://127.0.0.1:{port}"),
        )
    assert await mac.uid() in text
    assert "192.0.2.1 (override)" in text
    assert "FAIL" not in text
    assert "WARN authentication: no --relay-token-file" in text
    assert not (tmp_path / "none").exists()
    assert await mac.beats.read() == before


async def test_a_missing_kubeconfig_is_told_before_a_key_is_made(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for flags in ((), ("--check",)):
        ran = await run_llmkube(
            *("agent", *flags, "--kubeconfig", str(tmp_path / "absent")),
            *("--state-dir", str(state), "--upstream", "http://127.0.0.1:9"),
        )
        assert ran.code != 0
        assert "give --kubeconfig FILE, or copy the file" in ran.out + ran.err
        assert not state.exists()


async def test_check_says_what_to_do_after_a_revocation(mac: Mac, tmp_path: Path) -> None:
    file = tmp_path / "revoked.kubeconfig"
    text = mac.kubeconfig.read_text()
    file.write_text(re.sub(r"(token: \S{20}.*)\.[\w-]+", r"\1.AAAA", text))
    assert file.read_text() != text
    ran = await run_llmkube(
        *("agent", "--check", "--kubeconfig", str(file)),
        *("--state-dir", str(tmp_path / "none"), "--upstream", "http://127.0.0.1:9"),
    )
    assert ran.code == 1
    assert re.search(
        r"FAIL cluster: .*Unauthorized.*`llmkube metal token create \S+ -n \S+`", ran.out
    )


async def create_fresh(mac: Mac) -> bool:
    """Register again once the garbage collector has taken the old account and Lease."""
    try:
        lease = await mac.beats.read()
        if lease["metadata"].get("annotations"):
            return False
    except Exception:
        lease = {}
    fresh = await mac.new_credential(mac.folder / "fresh.kubeconfig")
    fresh.replace(mac.kubeconfig)
    return True


def aged(mac: Mac, left: timedelta) -> str:
    """The Mac's token, but with `left` to live: signed with the API server's own key."""
    header, _, _ = current_token(mac.kubeconfig).split(".")
    payload = claims(current_token(mac.kubeconfig))
    payload["exp"] = int(time.time() + left.total_seconds())
    payload["iat"] = payload["nbf"] = payload["exp"] - 7200
    signed = header + "." + _base64(json.dumps(payload).encode())
    pem = (mac.cluster.folder / "service-account.key").read_bytes()
    key = serialization.load_pem_private_key(pem, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = utils.decode_dss_signature(key.sign(signed.encode(), ec.ECDSA(hashes.SHA256())))
    return signed + "." + _base64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))


def _base64(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
