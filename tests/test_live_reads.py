"""Live reads: which of an answer and the cache is newer, and what a late answer says."""

from __future__ import annotations

from datetime import timedelta

import pytest

from llmkube.api.cached import CachedLease, LeaseMeta, LeaseSpec
from llmkube.informers.informer import Informer
from llmkube.kube.resources import LEASES
from llmkube.reconcilers.live import overtaken
from tests.support.clock import FakeClock

SECOND = timedelta(seconds=1)


def lease(version: str, *, name: str = "mac", uid: str = "u1") -> CachedLease:
    return CachedLease(LeaseMeta(name, "macs", uid, version), LeaseSpec())


def cache(*shown: CachedLease, watched_up_to: str = "") -> Informer[CachedLease]:
    """An informer that holds these objects, without a client."""
    clock = FakeClock()
    informer: Informer[CachedLease] = Informer(
        None,  # type: ignore[arg-type]
        LEASES,
        decode=CachedLease,
        clock=clock,
    )
    for obj in shown:
        informer.put(obj, clock.now(), first_sight=False)
    informer._reflectors[None].resource_version = watched_up_to
    return informer


# Which is newer ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("informer", "newer"),
    [
        pytest.param(cache(lease("13")), False, id="the cache is older"),
        pytest.param(cache(lease("14")), True, id="the cache shows the same"),
        pytest.param(cache(lease("15")), True, id="an event came before the answer"),
        pytest.param(cache(lease("9")), False, id="9 is older than 14, though not as a text"),
        pytest.param(cache(lease("15", uid="u2")), True, id="it was re-created meanwhile"),
        pytest.param(cache(), False, id="the cache has not seen it yet"),
        pytest.param(cache(watched_up_to="20"), True, id="it was deleted meanwhile"),
    ],
)
def test_the_newer_of_answer_and_cache_is_believed(
    informer: Informer[CachedLease], newer: bool
) -> None:
    assert overtaken(informer, lease("14")) is newer


def test_an_answer_whose_version_is_no_number_is_believed() -> None:
    assert not overtaken(cache(lease("15")), lease("x"))
