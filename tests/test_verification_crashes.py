"""SIGKILL at every step of a check, with and without a follower: nothing is done twice or lost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from devcluster.kubelet import Fault, FaultKind, Kubelet
from devcluster.process import Process
from llmkube.api.times import parse_time
from llmkube.controller.tuning import Tuning
from llmkube.kube.resources import METALNODES, PODS
from llmkube.leader import LeaderSettings
from tests.conftest import ROOT
from tests.support.failpoint import KILL_AFTER_WRITE
from tests.support.fleet import (
    Fleet,
    Mac,
    all_reachable,
    answering,
    reporting,
    scaled,
    verifying,
)
from tests.support.recording import Recording, recording
from tests.support.verifierpods import wait_until_pods_are_allowed
from tests.support.wait import eventually

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane
    from llmkube.kube.client import KubeClient

pytestmark = pytest.mark.cluster

SPACING = timedelta(seconds=4)
CHECKS = scaled(spacing=SPACING, timeout=timedelta(seconds=60))
LEADER = LeaderSettings(
    lease_duration=timedelta(seconds=3),
    renew_deadline=timedelta(seconds=2),
    retry_period=timedelta(milliseconds=500),
)
TUNING = {
    "checks": {"spacing": "4s", "backoff": "2s", "backoff_cap": "8s", "intake": "1s"},
    "leader": {"lease_duration": "3s", "renew_deadline": "2s", "retry_period": "500ms"},
}
FOREVER = 10**9


@pytest.fixture
async def controller(shipped: ControlPlane) -> Path:
    return await wait_until_pods_are_allowed(shipped)


@pytest.fixture
def fleet(admin: KubeClient, namespace: str) -> Fleet:
    return Fleet(admin, namespace)


@asynccontextmanager
async def doomed(
    kubeconfig: Path, namespace: str, folder: Path, *, after_write: int, leader_elect: bool = False
) -> AsyncIterator[Process]:
    """A controller process that is killed after so many writes, or at the end of the block."""
    config = folder / "config.json"
    config.write_text(json.dumps(TUNING))
    command = [
        sys.executable,
        "-m",
        "tests.support.failpoint",
        "controller",
        f"--kubeconfig={kubeconfig}",
        f"--config={config}",
        f"--namespace={namespace}",
        "--controllers=verification",
        "--allow-cidr=127.0.0.0/8",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        *(["--leader-elect"] if leader_elect else []),
    ]
    env = {**os.environ, KILL_AFTER_WRITE: str(after_write)}
    log = folder / "doomed.log"
    process = Process.start("doomed controller", command, log=log, env=env, cwd=ROOT)
    try:
        yield process
    finally:
        await process.kill()


def starts(history: Recording) -> list[datetime]:
    """Every lastStartTime that the status ever had."""
    found = [parse_time(text) for text in history.values("status", "verification", "lastStartTime")]
    return [instant for instant in found if instant is not None]


def gaps(instants: Sequence[datetime]) -> Iterator[timedelta]:
    return (b - a for a, b in pairwise(instants))


# Start (1), pod (2), podUID (3), result (4), deletion of the pod (5).
WRITES = [
    pytest.param(1, 2, id="after lastStartTime"),
    pytest.param(2, 2, id="after the pod"),
    pytest.param(3, 1, id="after podUID"),
    pytest.param(4, 1, id="after the result"),
    pytest.param(5, 1, id="after the pod's deletion"),
]


@pytest.mark.parametrize("follower", [False, True], ids=["restart", "follower"])
@pytest.mark.parametrize(("write", "expected_starts"), WRITES)
async def test_a_crash_after_any_write_of_a_check_costs_nothing(
    controller: Path,
    shipped: ControlPlane,
    admin: KubeClient,
    fleet: Fleet,
    tmp_path: Path,
    write: int,
    expected_starts: int,
    follower: bool,
) -> None:
    mac = await fleet.add("studio", report=reporting("127.0.0.1"))
    space = fleet.namespace
    options = {"checks": CHECKS, "namespaces": (space,)}
    if follower:
        options |= {"leader_elect": True, "tuning": Tuning(checks=CHECKS, leader=LEADER)}
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        recording(admin, METALNODES, space) as history,
        recording(admin, PODS, space) as pods,
    ):
        async with doomed(
            controller, space, tmp_path, after_write=write, leader_elect=follower
        ) as victim:
            await eventually(lambda: victim.returncode is not None, "the controller is killed")
            assert victim.returncode == -9, victim.tail()
        async with verifying(controller, **options):
            status = await mac.becomes("True", "Verified")
            await mac.without_pods()
        assert status["hostIP"] == "127.0.0.1"
        assert status["verification"].get("consecutiveFailures", 0) == 0
        assert len(starts(history)) == expected_starts
        assert all(gap >= SPACING for gap in gaps(starts(history)))
        assert pods.most_at_once() == 1
        made = {pod["metadata"]["uid"] for pod in pods.added()}
        assert len(made) == (1 if write == 1 else expected_starts)


async def test_a_crash_after_the_end_of_a_check_without_an_answer_is_counted_once(
    controller: Path, shipped: ControlPlane, fleet: Fleet, tmp_path: Path
) -> None:
    """Writes 1 to 3 start it, 4 writes down that it gave no answer, and its pod is left behind."""
    mac = await fleet.add("studio", report=reporting("127.0.0.1"))
    space = fleet.namespace
    async with Kubelet.start(shipped.admin_kubeconfig) as kubelet:
        kubelet.play(Fault(FaultKind.EVICTED), namespace=space)
        async with doomed(controller, space, tmp_path, after_write=4) as victim:
            await eventually(lambda: victim.returncode is not None, "the controller is killed")
        assert len(await mac.pods()) == 1
        async with verifying(
            controller, checks=scaled(spacing=timedelta(minutes=5)), namespaces=(space,)
        ):
            await mac.without_pods()
        book = await mac.verification()
        assert book["consecutiveFailures"] == 1
        assert "podUID" not in book
        assert (await mac.reachable())["reason"] == "VerifierFailed"


async def test_a_restless_mac_gets_one_start_per_spacing_whoever_leads(
    controller: Path, shipped: ControlPlane, admin: KubeClient, fleet: Fleet, tmp_path: Path
) -> None:
    """It changes its report five times a second, while one leader after the other is killed."""
    mac = await fleet.add("restless", report=reporting("127.0.0.1"))
    space = fleet.namespace
    async with (
        Kubelet.start(shipped.admin_kubeconfig, runner=answering(all_reachable)),
        recording(admin, METALNODES, space) as history,
        recording(admin, PODS, space) as pods,
    ):
        for n, write in enumerate((2, 3, FOREVER, 1, 4, 2)):
            async with doomed(
                controller, space, tmp_path, after_write=write, leader_elect=n % 2 == 0
            ) as victim:
                for m in range(30):
                    if victim.returncode is not None:
                        break
                    await mac.report(reporting(f"127.0.{n}.{m + 1}")(mac.uid))
                    await asyncio.sleep(0.2)
        await mac.report(reporting("127.0.0.1")(mac.uid))
        async with verifying(controller, checks=CHECKS, namespaces=(space,)):
            await eventually(lambda: _verified_at(mac, "127.0.0.1"), "it is verified at last")
            await mac.without_pods()
        assert len(starts(history)) >= 4
        assert all(gap >= SPACING for gap in gaps(starts(history)))
        assert pods.most_at_once() <= 2, "at most an orphan beside the running one"


async def _verified_at(mac: Mac, address: str) -> bool:
    return (await mac.status()).get("hostIP") == address
