"""Reads that may wait: answers and watch events are taken together, at beats, and nothing is lost.

The tests hold lower bounds only: that something is not read earlier than it may be is true on a
slow machine, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest

from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube import errors, transport
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.connection import Connection, Disconnected, connect
from llmkube.kube.login import Login
from llmkube.kube.resources import CONFIGMAPS, METALNODES
from tests.support.configmaps import a_map
from tests.support.faultproxy import Answer, FaultProxy
from tests.support.wait import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

LONG = timedelta(seconds=1)
HALF = LONG.total_seconds() / 2


@pytest.fixture
async def patient(
    control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[KubeClient]:
    """A client whose patience is a second."""
    monkeypatch.setattr(transport, "PATIENCE", LONG)
    access = await load_access(control_plane.admin_kubeconfig)
    async with KubeClient(access, clock=SystemClock()) as client:
        yield client


async def register(admin: KubeClient, namespace: str, names: list[str]) -> None:
    for name in names:
        spec = {"leaseName": name, "serviceAccountName": name}
        await admin.create(METALNODES, {**a_node(namespace, name), "spec": spec})


def a_node(namespace: str, name: str, **metadata: str) -> dict[str, Any]:
    return {
        "apiVersion": METALNODES.api_version,
        "kind": METALNODES.kind,
        "metadata": {"name": name, "namespace": namespace, **metadata},
    }


async def write(client: KubeClient, namespace: str, name: str, **metadata: str) -> float:
    """Write a status; returns the instant, on the loop's clock, at which the answer was there."""
    body = {**a_node(namespace, name, **metadata), "status": {"agentVersion": "v9"}}
    written = await client.apply_status(METALNODES, body, field_manager="test")
    assert written.status == {"agentVersion": "v9"}
    return asyncio.get_running_loop().time()


async def test_a_patient_write_is_sent_at_once_and_its_answer_waits(
    patient: KubeClient, admin: KubeClient, namespace: str
) -> None:
    await register(admin, namespace, ["one"])
    began = asyncio.get_running_loop().time()
    writing = asyncio.create_task(write(patient, namespace, "one"))

    async def written() -> bool:
        return "status" in await admin.get(METALNODES, "one", namespace)

    await eventually(written, "the write is done")
    assert await writing - began >= HALF


async def test_the_answers_of_a_beat_are_read_together(
    patient: KubeClient, admin: KubeClient, namespace: str
) -> None:
    names = [f"mac-{number}" for number in range(8)]
    await register(admin, namespace, names)
    ends = await asyncio.gather(*(write(patient, namespace, name) for name in names))
    beats = {round(end / LONG.total_seconds()) for end in ends}
    assert len(beats) <= 2, "they were sent within moments, so they end at one beat or the next"


async def test_what_is_patient_fails_like_everything_else(
    patient: KubeClient, admin: KubeClient, namespace: str
) -> None:
    await register(admin, namespace, ["one"])
    with pytest.raises(errors.Conflict):
        await write(patient, namespace, "one", resourceVersion="1")
    with pytest.raises(errors.NotFound):
        await write(patient, namespace, "nobody", resourceVersion="1")


async def test_an_answer_to_a_status_that_is_no_object_is_unavailable(
    control_plane: ControlPlane, namespace: str
) -> None:
    async with FaultProxy.start(control_plane) as proxy:
        access = await load_access(proxy.admin_kubeconfig)
        async with KubeClient(access, clock=SystemClock()) as client:
            for body in (b"<html>", b"[]", b"{}", b'{"metadata":{"resourceVersion":7}}', b"\xff"):
                with (
                    proxy.playing(Answer(200, body), "^PATCH "),
                    pytest.raises(errors.Unavailable, match="is it an API server"),
                ):
                    await write(client, namespace, "one")


async def test_the_first_event_is_read_at_once_and_those_after_it_together(
    admin: KubeClient, namespace: str
) -> None:
    clock = asyncio.get_running_loop().time
    async with admin.watch(
        CONFIGMAPS, namespace, resource_version="0", pace=lambda: LONG
    ) as stream:
        text = b""
        while b'"name":"first"' not in text:
            if not text:
                await admin.create(CONFIGMAPS, a_map(namespace, "first"))
            text = await stream.read()
        first = clock()
        await admin.create(CONFIGMAPS, a_map(namespace, "second"))
        while b'"name":"second"' not in text:
            text += await stream.read()
        assert clock() - first >= HALF


async def test_the_pace_is_asked_for_anew_after_each_read(
    admin: KubeClient, namespace: str
) -> None:
    pace = timedelta(0)
    async with admin.watch(
        CONFIGMAPS, namespace, resource_version="0", pace=lambda: pace
    ) as stream:

        async def see(name: str) -> None:
            await admin.create(CONFIGMAPS, a_map(namespace, name))
            text = b""
            while f'"name":"{name}"'.encode() not in text:
                text += await stream.read()

        await see("first")
        pace = timedelta(hours=1)
        await see("second")  # read at once, but what follows it may lie
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HALF):
                await see("third")


async def test_a_connection_that_is_cut_while_it_rests_says_so(
    control_plane: ControlPlane, namespace: str
) -> None:
    connection, login = await _connected(control_plane)
    request = (
        f"GET {login.base_path}/api/v1/namespaces/{namespace} HTTP/1.1\r\n{login.headers}\r\n"
    ).encode()
    asking = asyncio.create_task(connection.exchange(request, timedelta(hours=1)))
    await asyncio.sleep(0)
    connection.abort()
    with pytest.raises(Disconnected, match="cut"):
        await asking


async def _connected(control_plane: ControlPlane) -> tuple[Connection, Login]:
    login = Login.of(await load_access(control_plane.admin_kubeconfig))
    return await connect(login.origin), login


async def test_silence_counts_only_while_somebody_listens(
    control_plane: ControlPlane, namespace: str
) -> None:
    """A reader that is busy for longer than the limit finds its stream alive."""
    limit = timedelta(milliseconds=200)
    async with FaultProxy.start(control_plane) as proxy:
        access = await load_access(proxy.admin_kubeconfig)
        async with (
            KubeClient(access, clock=SystemClock()) as client,
            client.watch(
                CONFIGMAPS, namespace, resource_version="0", inactivity_timeout=limit
            ) as stream,
        ):
            text = b""
            while b'"name":"seen"' not in text:
                if not text:
                    await client.create(CONFIGMAPS, a_map(namespace, "seen"))
                text += await stream.read()
            busy_until = asyncio.get_running_loop().time() + 3 * limit.total_seconds()
            await client.create(CONFIGMAPS, a_map(namespace, "later"))
            await asyncio.sleep(busy_until - asyncio.get_running_loop().time())
            while b'"name":"later"' not in text:
                text += await stream.read()
