"""Whoever never stops making us look at one Mac takes no time from the others."""

from __future__ import annotations

from datetime import timedelta

import msgspec
import pytest

from llmkube.api.cached import CachedLease, CachedMetalNode, CachedPod, decode_pod
from llmkube.api.names import METALNODE_UID_LABEL
from llmkube.informers.store import Store
from llmkube.reconcilers.pace import Pace
from llmkube.reconcilers.verification_caches import NODE_INDEXES, POD_INDEXES, VerificationCaches
from tests.support.dialback import node_of
from tests.support.reports import UID

SECOND = timedelta(seconds=1)


def looks(changes: list[timedelta]) -> list[timedelta]:
    """When a queue looks after changes at these instants: of several, the earliest wins."""
    pace, seen, due = Pace(SECOND), [], None
    for now in changes:
        if due is not None and due <= now:
            seen.append(due)
            due = None
        later = pace.next("macs/m1", now)
        if later is None:
            seen.append(now)
        else:
            due = later if due is None else min(due, later)
    return seen if due is None else [*seen, due]


def test_a_change_now_and_then_is_looked_at_at_once() -> None:
    changes = [SECOND * n for n in (5, 6, 20)]
    assert looks(changes) == changes


def test_a_hundred_changes_a_second_cost_two_looks_a_second_and_the_last_one_is_seen() -> None:
    changes = [timedelta(milliseconds=10 * n) for n in range(1000)]
    seen = looks(changes)
    assert len(seen) <= 2 * 10 + 1
    assert seen[-1] >= changes[-1]


def test_every_mac_has_its_own_pace_and_a_new_one_of_its_name_does_not_wait() -> None:
    pace = Pace(SECOND)
    assert pace.next("macs/m1", SECOND) is None
    assert pace.next("macs/m2", SECOND) is None
    assert pace.next("macs/m1", SECOND * 1.5) == SECOND * 2
    pace.forget("macs/m1")
    assert pace.next("macs/m1", SECOND * 1.5) is None


@pytest.mark.parametrize(("namespace", "concerned"), [("macs", {"macs/m1"}), ("elsewhere", set())])
def test_a_pod_that_names_a_mac_of_another_namespace_does_not_make_us_look(
    namespace: str, concerned: set[str]
) -> None:
    nodes = Store[CachedMetalNode](NODE_INDEXES)
    nodes.put(node_of())
    caches = VerificationCaches(nodes, Store[CachedLease](), Store[CachedPod](POD_INDEXES))
    meta = {"name": "p", "namespace": namespace, "uid": "p", "labels": {METALNODE_UID_LABEL: UID}}
    pod = decode_pod(msgspec.json.encode({"metadata": meta}))
    assert caches.keys_of_pod(pod) == concerned
