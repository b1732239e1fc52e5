"""The client against the real API server: each verb, and each refusal's class."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from llmkube.kube import errors
from llmkube.kube.client import KubeClient
from llmkube.kube.resources import CONFIGMAPS, NAMESPACES, SERVICEACCOUNTS
from llmkube.kube.watch import WatchStream

pytestmark = pytest.mark.cluster


def config_map(namespace: str, name: str, **data: str) -> dict:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": {"set": "a"}},
        "data": data,
    }


async def test_an_object_lives_through_every_verb(admin: KubeClient, namespace: str) -> None:
    created = await admin.create(CONFIGMAPS, config_map(namespace, "one", a="1"))
    assert created["data"] == {"a": "1"}

    patched = await admin.merge_patch(CONFIGMAPS, "one", namespace, {"data": {"b": "2"}})
    assert patched["data"] == {"a": "1", "b": "2"}

    replaced = await admin.json_patch(
        CONFIGMAPS, "one", namespace, [{"op": "replace", "path": "/data/a", "value": "3"}]
    )
    assert replaced["data"]["a"] == "3"

    updated = await admin.update(CONFIGMAPS, {**replaced, "data": {"c": "4"}})
    assert updated["data"] == {"c": "4"}

    applied = await admin.apply(
        CONFIGMAPS, config_map(namespace, "one", d="5"), field_manager="tests"
    )
    assert applied["data"] == {"c": "4", "d": "5"}
    assert await admin.get(CONFIGMAPS, "one", namespace) == applied

    await admin.delete(CONFIGMAPS, "one", namespace, uid=applied["metadata"]["uid"])
    with pytest.raises(errors.NotFound):
        await admin.get(CONFIGMAPS, "one", namespace)


async def test_a_list_is_gathered_from_its_pages(
    admin: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmkube.kube.client.PAGE", 2)
    for number in range(5):
        await admin.create(CONFIGMAPS, config_map(namespace, f"map-{number}"))
    names = [
        item["metadata"]["name"]
        for item in await admin.list(CONFIGMAPS, namespace, label_selector="set=a")
    ]
    assert names == [f"map-{number}" for number in range(5)]


async def test_metadata_only_leaves_the_rest_out(admin: KubeClient, namespace: str) -> None:
    await admin.create(CONFIGMAPS, config_map(namespace, "one", a="1"))
    whole = await admin.get(CONFIGMAPS, "one", namespace, metadata_only=True)
    assert "data" not in whole
    listed = await admin.list(
        CONFIGMAPS, namespace, metadata_only=True, field_selector="metadata.name=one"
    )
    assert [item["metadata"]["uid"] for item in listed] == [whole["metadata"]["uid"]]
    assert "data" not in listed[0]


async def test_refusals_have_their_class(admin: KubeClient, namespace: str) -> None:
    made = await admin.create(CONFIGMAPS, config_map(namespace, "one"))
    with pytest.raises(errors.AlreadyExists):
        await admin.create(CONFIGMAPS, config_map(namespace, "one"))
    await admin.merge_patch(CONFIGMAPS, "one", namespace, {"data": {"a": "1"}})
    with pytest.raises(errors.Conflict):
        await admin.update(CONFIGMAPS, made)
    with pytest.raises(errors.Conflict):
        await admin.delete(CONFIGMAPS, "one", namespace, uid="another")
    with pytest.raises(errors.Invalid):
        await admin.create(CONFIGMAPS, config_map(namespace, "No_Name"))
    with pytest.raises(errors.NotFound):
        await admin.list(NAMESPACES.__class__("no.such", "v1", "things", "Thing"))
    with pytest.raises(errors.Gone):
        await admin.list_page(
            CONFIGMAPS, namespace, resource_version="9" * 15, resource_version_match="NotOlderThan"
        )


async def test_rights_end_where_rbac_says(client_for, namespace: str) -> None:
    client = await client_for(namespace, "default")
    assert (await client.whoami()).username == f"system:serviceaccount:{namespace}:default"
    with pytest.raises(errors.Forbidden, match="configmaps"):
        await client.list(CONFIGMAPS, namespace)


async def test_a_token_request_says_when_the_token_really_ends(
    admin: KubeClient, namespace: str
) -> None:
    issued = await admin.request_token("default", namespace, ttl=timedelta(minutes=20))
    left = issued.expires_at - datetime.now(UTC)
    assert timedelta(minutes=15) < left <= timedelta(minutes=20)
    assert issued.token not in repr(issued)
    with pytest.raises(errors.NotFound):
        await admin.request_token("nobody", namespace, ttl=timedelta(minutes=20))


async def test_a_watch_shows_what_happens_and_ends_in_time(
    admin: KubeClient, namespace: str
) -> None:
    async with admin.watch(
        CONFIGMAPS, namespace, resource_version="0", server_timeout=timedelta(seconds=3)
    ) as stream:
        await admin.create(CONFIGMAPS, config_map(namespace, "seen"))
        text = b""
        while data := await stream.read():
            text += data
    assert b'"seen"' in text


async def test_a_silent_watch_is_unavailable(admin: KubeClient, namespace: str) -> None:
    async with admin.watch(
        SERVICEACCOUNTS,
        namespace,
        field_selector="metadata.name=nobody",
        inactivity_timeout=timedelta(milliseconds=300),
    ) as stream:
        with pytest.raises(errors.Unavailable, match="silent"):
            await read_to_end(stream)


async def read_to_end(stream: WatchStream) -> None:
    while await stream.read():
        pass


async def test_a_watch_that_may_not_be_is_refused(client_for, namespace: str) -> None:
    client = await client_for(namespace, "default")
    with pytest.raises(errors.Forbidden):
        async with client.watch(CONFIGMAPS, namespace):
            pass


async def test_the_server_has_a_version(admin: KubeClient) -> None:
    assert (await admin.server_version()).startswith("v1.")


async def test_the_gate_stops_every_write_and_no_read(admin: KubeClient, namespace: str) -> None:
    def closed() -> None:
        raise errors.NotLeader("not the leader")

    admin.write_gate = closed
    with pytest.raises(errors.NotLeader):
        await admin.create(CONFIGMAPS, config_map(namespace, "one"))
    with pytest.raises(errors.NotLeader):
        await admin.delete(CONFIGMAPS, "kube-root-ca.crt", namespace)
    assert await admin.list(NAMESPACES)
    assert (await admin.whoami()).username
    await admin.ungated().create(CONFIGMAPS, config_map(namespace, "one"))
