"""Requests in bad company: a proxy in front of the real API server plays the faults."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from prometheus_client import generate_latest

from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube import connection, errors
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.credentials import ServerTrust
from llmkube.kube.resources import CONFIGMAPS, NAMESPACES
from llmkube.metrics import Metrics
from tests.support.configmaps import a_map
from tests.support.faultproxy import (
    EXPIRED,
    WATCHES,
    WRITES,
    Answer,
    Drop,
    EmptyStream,
    FaultProxy,
    LoseAnswer,
    Slow,
    Swallow,
    status_body,
)
from tests.support.wait import eventually

pytestmark = pytest.mark.cluster

Connect = Callable[..., Awaitable[KubeClient]]
GETS = "^GET /api/v1/namespaces"


@pytest.fixture
async def proxy(control_plane: ControlPlane) -> AsyncIterator[FaultProxy]:
    async with FaultProxy.start(control_plane) as running:
        yield running


@pytest.fixture
async def connect(proxy: FaultProxy) -> AsyncIterator[Connect]:
    """A factory of clients that talk through the proxy."""
    async with AsyncExitStack() as stack:

        async def make(**options: object) -> KubeClient:
            access = await load_access(proxy.admin_kubeconfig)
            return await stack.enter_async_context(
                KubeClient(access, clock=SystemClock(), **options)  # type: ignore[arg-type]
            )

        yield make


# What answers mean ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        pytest.param({"Retry-After": "7"}, 7, 7, id="in seconds"),
        pytest.param(
            {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)},
            3000,
            3600,
            id="as a date",
        ),
        pytest.param({"Retry-After": "Mon, 01 Jan 2001 00:00:00 GMT"}, 0, 0, id="in the past"),
        pytest.param({"Retry-After": "9" * 400}, 86_400, 86_400, id="absurdly long"),
    ],
)
async def test_a_busy_server_says_how_long_to_wait(
    proxy: FaultProxy, connect: Connect, headers: dict[str, str], least: int, most: int
) -> None:
    client = await connect()
    with (
        proxy.playing(Answer(429, status_body(429, "TooManyRequests"), headers)),
        pytest.raises(errors.TooManyRequests) as caught,
    ):
        await client.list(NAMESPACES)
    assert caught.value.retry_after is not None
    assert timedelta(seconds=least) <= caught.value.retry_after <= timedelta(seconds=most)
    assert proxy.count() == 1, "the transport must leave waiting to the worker"


@pytest.mark.parametrize("value", ["", "soon", "-3", "1.5"])
async def test_a_retry_after_that_says_nothing_is_none(
    proxy: FaultProxy, connect: Connect, value: str
) -> None:
    client = await connect()
    with (
        proxy.playing(Answer(429, b"", {"Retry-After": value} if value else {})),
        pytest.raises(errors.TooManyRequests) as caught,
    ):
        await client.list(NAMESPACES)
    assert caught.value.retry_after is None


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        pytest.param(Answer(500, b"boom"), errors.Unavailable, "boom", id="a text instead of JSON"),
        pytest.param(Answer(503, b""), errors.Unavailable, "503", id="an empty refusal"),
        pytest.param(Answer(200, b"<html>"), errors.Unavailable, "JSON", id="a page instead"),
        pytest.param(Answer(200, b"[]"), errors.Unavailable, "object", id="not an object"),
        pytest.param(
            Answer(302, b"", {"Location": "https://login.example"}),
            errors.Unavailable,
            "redirect",
            id="a redirect is not followed",
        ),
        pytest.param(
            Answer(410, status_body(410, "Expired")), errors.Gone, "made up", id="expired"
        ),
        pytest.param(
            Answer(403, status_body(403, "Forbidden")), errors.Forbidden, "made up", id="forbidden"
        ),
    ],
)
async def test_every_answer_has_one_class(
    proxy: FaultProxy, connect: Connect, answer: Answer, error: type[Exception], text: str
) -> None:
    client = await connect()
    with proxy.playing(answer), pytest.raises(error, match=text):
        await client.get(NAMESPACES, "default")
    assert proxy.count() == 1


async def test_an_answer_that_trickles_in_is_read_whole(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    with proxy.playing(Slow(size=50, every=timedelta(milliseconds=1))):
        assert (await client.get(NAMESPACES, "default"))["metadata"]["name"] == "default"


async def test_a_long_list_comes_compressed_and_whole(admin: KubeClient, namespace: str) -> None:
    for number in range(3):
        body = a_map(namespace, text=f"{number}" * 100_000)
        body["metadata"]["name"] = f"map-{number}"
        await admin.create(CONFIGMAPS, body)
    sizes = [
        len(m.get("data", {}).get("text", "")) for m in await admin.list(CONFIGMAPS, namespace)
    ]
    assert sizes.count(100_000) == 3


async def test_a_connection_serves_on_after_an_answer_of_megabytes(
    admin: KubeClient, namespace: str
) -> None:
    for number in range(3):
        body = a_map(namespace, text=base64.b64encode(os.urandom(600_000)).decode())
        body["metadata"]["name"] = f"map-{number}"
        await admin.create(CONFIGMAPS, body)
    page = await admin.list_page(CONFIGMAPS, namespace)
    assert len(page) * 3 / 4 > connection.BUFFER, "even compressed"
    assert (await admin.get(NAMESPACES, namespace))["metadata"]["name"] == namespace


async def test_a_list_whose_next_page_is_gone_is_read_anew(
    proxy: FaultProxy, connect: Connect, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmkube.kube.client.PAGE", 2)
    client = await connect()
    for number in range(5):
        body = a_map(namespace)
        body["metadata"]["name"] = f"map-{number}"
        await client.create(CONFIGMAPS, body)
    with proxy.playing(EXPIRED, "continue="):
        found = [m["metadata"]["name"] for m in await client.list(CONFIGMAPS, namespace)]
    assert found == sorted(set(found))
    assert len(found) >= 5
    with proxy.playing(EXPIRED), pytest.raises(errors.Gone):
        await client.list(CONFIGMAPS, namespace)


# Time -------------------------------------------------------------------------------------------


async def test_a_server_that_hangs_is_unavailable_in_time(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect(request_timeout=timedelta(milliseconds=400))
    with proxy.playing(Swallow()), pytest.raises(errors.Unavailable, match=r"within 0\.4 s"):
        await client.list(NAMESPACES)
    with proxy.playing(Swallow()), pytest.raises(errors.Unavailable, match=r"within 0\.4 s"):
        async with client.watch(NAMESPACES):
            pass
    assert await client.list(NAMESPACES), "a hung connection must not be used again"


async def test_a_request_in_hand_ends_in_time_though_its_client_is_closed(
    proxy: FaultProxy,
) -> None:
    access = await load_access(proxy.admin_kubeconfig)
    with proxy.playing(Swallow()):
        limit = timedelta(milliseconds=400)
        async with KubeClient(access, clock=SystemClock(), request_timeout=limit) as client:
            asking = asyncio.create_task(client.list(NAMESPACES))
            await eventually(proxy.open_count, "it is under way")
        with pytest.raises(errors.Unavailable, match=r"within 0\.4 s"):
            await asking


async def test_a_cancelled_request_leaves_nothing_behind(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    await client.get(NAMESPACES, "default")
    with proxy.playing(Slow(size=1, every=timedelta(milliseconds=20))), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.get(NAMESPACES, "kube-system")
    assert (await client.get(NAMESPACES, "default"))["metadata"]["name"] == "default"


# Connections ------------------------------------------------------------------------------------


async def test_nobody_there_is_unavailable(proxy: FaultProxy) -> None:
    access = replace(await load_access(proxy.admin_kubeconfig), server="https://127.0.0.1:1")
    async with KubeClient(access, clock=SystemClock()) as client:
        with pytest.raises(errors.Unavailable, match="cannot connect"):
            await client.list(NAMESPACES)


async def test_a_port_that_never_answers_is_unavailable_in_time(
    proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", timedelta(milliseconds=300))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        access = replace(
            await load_access(proxy.admin_kubeconfig), server=f"https://127.0.0.1:{port}"
        )
        async with KubeClient(access, clock=SystemClock()) as client:
            in_time = r"cannot connect \(.*within 0\.3 s\)"
            with pytest.raises(errors.Unavailable, match=in_time):
                await client.list(NAMESPACES)
            with pytest.raises(errors.Unavailable, match=in_time):
                async with client.watch(NAMESPACES):
                    pass


async def test_a_server_with_another_authority_is_not_trusted(
    proxy: FaultProxy, control_plane: ControlPlane
) -> None:
    access = await load_access(proxy.admin_kubeconfig)
    wrong = replace(access, trust=ServerTrust(control_plane.ca_pem))
    async with KubeClient(wrong, clock=SystemClock()) as client:
        with pytest.raises(errors.Unavailable, match=r"not trusted.*certificate-authority"):
            await client.list(NAMESPACES)
    assert proxy.count() == 0


async def test_a_stale_connection_costs_an_idempotent_call_nothing(
    proxy: FaultProxy, connect: Connect, namespace: str
) -> None:
    client = await connect()
    await client.list(NAMESPACES)
    proxy.cut_connections()  # the client has not heard of it when it sends
    assert (await client.get(NAMESPACES, namespace))["metadata"]["name"] == namespace
    proxy.cut_connections()
    await client.apply(CONFIGMAPS, a_map(namespace, a="1"), field_manager="tests")
    proxy.cut_connections()
    await client.delete(CONFIGMAPS, "one", namespace)


async def test_a_repetition_is_made_once_and_on_a_new_connection(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    await client.list(NAMESPACES)
    proxy.forget()
    with proxy.playing(Drop()), pytest.raises(errors.Unavailable):
        await client.list(NAMESPACES)
    assert proxy.count() == 2
    with proxy.playing(Drop()), pytest.raises(errors.Unavailable):
        await client.list(NAMESPACES)
    assert proxy.count() == 3, "a call on a new connection is not repeated"


async def test_a_create_is_never_repeated(
    proxy: FaultProxy, connect: Connect, namespace: str
) -> None:
    client = await connect()
    await client.list(NAMESPACES)
    with proxy.playing(Drop(), WRITES), pytest.raises(errors.Unavailable):
        await client.create(CONFIGMAPS, a_map(namespace))
    assert proxy.count("^POST") == 1
    with proxy.playing(LoseAnswer(), WRITES), pytest.raises(errors.Unavailable):
        await client.create(CONFIGMAPS, a_map(namespace))
    assert proxy.count("^POST") == 2
    assert await client.get(CONFIGMAPS, "one", namespace), "the server acted on it"


async def test_the_gate_is_asked_again_before_a_repetition(
    proxy: FaultProxy, connect: Connect, namespace: str
) -> None:
    client = await connect()
    await client.list(NAMESPACES)
    asked = 0

    def gate() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise errors.NotLeader("too late")

    client.write_gate = gate
    with proxy.playing(Drop(), WRITES), pytest.raises(errors.NotLeader):
        await client.apply(CONFIGMAPS, a_map(namespace), field_manager="tests")
    assert proxy.count(WRITES) == 1


async def test_the_gate_is_asked_only_when_there_is_nothing_left_to_wait_for(
    proxy: FaultProxy, namespace: str
) -> None:
    """Leadership may end while a connection is being made."""
    access = replace(await load_access(proxy.admin_kubeconfig), server="https://127.0.0.1:1")
    async with KubeClient(access, clock=SystemClock()) as client:
        client.write_gate = lambda: pytest.fail("asked before there was a connection")
        with pytest.raises(errors.Unavailable):
            await client.apply(CONFIGMAPS, a_map(namespace), field_manager="tests")


async def test_many_requests_at_once_share_a_bounded_number_of_connections(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    found = await asyncio.gather(*(client.get(NAMESPACES, "default") for _ in range(200)))
    assert len(found) == 200
    assert len(proxy._connections) <= 64


# Watches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [timedelta(0), timedelta(milliseconds=50)])
async def test_a_watch_delivers_everything_in_order(
    proxy: FaultProxy, connect: Connect, namespace: str, period: timedelta
) -> None:
    client = await connect()
    await client.create(CONFIGMAPS, a_map(namespace, n="start"))
    text = b""
    async with client.watch(
        CONFIGMAPS,
        namespace,
        resource_version="0",
        field_selector="metadata.name=one",
        pace=lambda: period,
    ) as stream:
        for number in range(30):
            await client.merge_patch(CONFIGMAPS, "one", namespace, {"data": {"n": f"({number})"}})
        while b"(29)" not in text:
            text += await stream.read()
    places = [text.index(f"({n})".encode()) for n in range(30)]
    assert places == sorted(places)


async def test_a_watch_that_breaks_is_unavailable(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    async with client.watch(NAMESPACES) as stream:
        await stream.read()
        assert proxy.cut(WATCHES) == 1
        with pytest.raises(errors.Unavailable, match="broke"):
            await read_to_end(stream)


async def test_a_half_open_watch_is_unavailable_in_time(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    async with client.watch(
        NAMESPACES,
        inactivity_timeout=timedelta(milliseconds=500),
        pace=lambda: timedelta(seconds=0.05),
    ) as stream:
        with proxy.frozen(WATCHES), pytest.raises(errors.Unavailable, match=r"silent for 0\.5 s"):
            await read_to_end(stream)


async def test_an_orderly_end_is_no_error(proxy: FaultProxy, connect: Connect) -> None:
    client = await connect()
    with proxy.playing(EmptyStream(), WATCHES):
        async with client.watch(NAMESPACES) as stream:
            assert await stream.read() == b""


async def test_a_watch_that_is_refused_raises_before_the_block(
    proxy: FaultProxy, connect: Connect
) -> None:
    client = await connect()
    refusal = Answer(429, status_body(429, "TooManyRequests"), {"Retry-After": "2"})
    with proxy.playing(refusal, WATCHES), pytest.raises(errors.TooManyRequests) as caught:
        async with client.watch(NAMESPACES):
            pytest.fail("the block must not be entered")
    assert caught.value.retry_after == timedelta(seconds=2)


async def read_to_end(stream: object) -> None:
    while await stream.read():  # type: ignore[attr-defined]
        pass


# Metrics ----------------------------------------------------------------------------------------


async def test_requests_are_counted_by_code_and_method(proxy: FaultProxy, connect: Connect) -> None:
    metrics = Metrics()
    client = await connect(metrics=metrics)
    await client.get(NAMESPACES, "default")
    with pytest.raises(errors.NotFound):
        await client.get(NAMESPACES, "nowhere")
    with proxy.playing(Drop()), pytest.raises(errors.Unavailable):
        await client.get(NAMESPACES, "default")
    host = proxy.server.removeprefix("https://")

    def count(code: str) -> float | None:
        labels = {"code": code, "method": "GET", "host": host}
        return metrics.registry.get_sample_value("rest_client_requests_total", labels)

    assert (count("200"), count("404"), count("<error>")) == (1, 1, 1)
    text = generate_latest(metrics.registry).decode()
    assert (
        f'rest_client_request_duration_seconds_bucket{{host="{host}",le="0.005",verb="GET"}}'
        in text
    )
    assert (
        f'rest_client_request_retries_total{{code="<error>",host="{host}",verb="GET"}} 1.0' in text
    )
