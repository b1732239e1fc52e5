"""A stand-in for scheduler and kubelet: pods become local processes, statuses tell the truth.

It binds pods to nodes by nodeSelector and taints, runs the one container's command with its own
environment and a file as termination log, and honours activeDeadlineSeconds, deletion with grace
and the termination message's limit. It does not isolate anything. `Fault`s play what real nodes do
to pods. The end-to-end tests use a real kubelet instead; see e2e/.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from devcluster import reaper
from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError, Conflict, NotFound
from llmkube.kube.resources import NODES, PODS, Resource

MESSAGE_LIMIT = 4096
"""Bytes of a termination message that a kubelet keeps."""
TERMINATION_LOG_VARIABLE = "LLMKUBE_TERMINATION_LOG"

Pod = dict[str, Any]
_BINDINGS = Resource("", "v1", "bindings", "Binding")


class FaultKind(StrEnum):
    """What a node can do to a pod instead of running it."""

    UNSCHEDULABLE = "unschedulable"
    IMAGE_PULL_BACK_OFF = "image-pull-back-off"
    EVICTED = "evicted"
    OOM_KILLED = "oom-killed"
    SILENCE = "silence"
    """Bound to a node that never says a word."""
    MESSAGE = "message"
    """Ends at once with success and the fault's `text` as termination message."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A node's name, labels and taints (`{"key":…, "value":…, "effect":…}`)."""

    name: str = "standin"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a container ended."""

    exit_code: int
    message: str
    reason: str = ""


Runner = Callable[[Pod, "asyncio.Event"], Awaitable[Ended]]
"""Runs a pod's container until it ends or the event asks it to stop."""


class Kubelet:
    """Scheduler and kubelet of a few made-up nodes. Create with `Kubelet.start`."""

    def __init__(
        self,
        client: KubeClient,
        nodes: tuple[Node, ...],
        runner: Runner,
        refuses: Callable[[Pod], str | None],
    ) -> None:
        self._client = client
        self._refuses = refuses
        self._nodes = nodes
        self._runner = runner
        self._faults: list[tuple[Callable[[Pod], bool], Fault]] = []
        self._running: dict[str, asyncio.Event] = {}
        self.started = 0
        """Containers started so far."""

    @staticmethod
    @asynccontextmanager
    async def start(
        kubeconfig: Path,
        *,
        nodes: tuple[Node, ...] = (Node(),),
        runner: Runner | None = None,
        refuses: Callable[[Pod], str | None] = lambda _pod: None,
    ) -> AsyncIterator[Kubelet]:
        """Register the nodes and run until the block ends; `kubeconfig` must be an admin's.

        `refuses` says why a pod is not to run here; it then stays Pending, and says so.
        """
        access = await load_access(kubeconfig)
        async with KubeClient(access, clock=SystemClock()) as client:
            kubelet = Kubelet(client, nodes, runner or run_process, refuses)
            await kubelet._register()
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(kubelet._watch_for_ever(tasks))
                try:
                    yield kubelet
                finally:
                    watching.cancel()
                    for stop in kubelet._running.values():
                        stop.set()
            await kubelet._unregister()

    def play(
        self, fault: Fault, *, namespace: str | None = None, owner: str | None = None
    ) -> Callable[[], None]:
        """Play `fault` on pods of that namespace and owner (None: any); returns its end."""

        def matches(pod: Pod) -> bool:
            meta = pod["metadata"]
            owners = [reference["name"] for reference in meta.get("ownerReferences", [])]
            return namespace in (None, meta["namespace"]) and (owner is None or owner in owners)

        entry = (matches, fault)
        self._faults.append(entry)
        return lambda: self._faults.remove(entry)

    # Nodes --------------------------------------------------------------------------------------

    async def _register(self) -> None:
        for node in self._nodes:
            body = {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node.name, "labels": dict(node.labels)},
                "spec": {"taints": [dict(taint) for taint in node.taints]},
            }
            await self._client.apply(NODES, body, field_manager="kubelet-standin")

    async def _unregister(self) -> None:
        for node in self._nodes:
            with contextlib.suppress(ApiError):
                await self._client.delete(NODES, node.name)

    # Watching -----------------------------------------------------------------------------------

    async def _watch_for_ever(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                await self._list_and_watch(tasks)
            except ApiError:
                await asyncio.sleep(0.2)  # the API server may be restarting: look again

    async def _list_and_watch(self, tasks: asyncio.TaskGroup) -> None:
        page = json.loads(await self._client.list_page(PODS))
        for pod in page.get("items", []):
            self._see(pod, tasks)
        version = page["metadata"]["resourceVersion"]
        async with self._client.watch(PODS, resource_version=version) as stream:
            rest = b""
            while chunk := await stream.read():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._see_event(json.loads(line), tasks)

    def _see_event(self, event: dict[str, Any], tasks: asyncio.TaskGroup) -> None:
        if event["type"] in ("ADDED", "MODIFIED"):
            self._see(event["object"], tasks)
        elif event["type"] == "DELETED":
            self._stop(event["object"])

    def _see(self, pod: Pod, tasks: asyncio.TaskGroup) -> None:
        uid = pod["metadata"]["uid"]
        if pod["metadata"].get("deletionTimestamp"):
            self._stop(pod)
        elif uid not in self._running and pod.get("status", {}).get("phase") == "Pending":
            self._running[uid] = asyncio.Event()
            tasks.create_task(self._live(pod))

    def _stop(self, pod: Pod) -> None:
        if stop := self._running.get(pod["metadata"]["uid"]):
            stop.set()

    # A pod's life -------------------------------------------------------------------------------

    async def _live(self, pod: Pod) -> None:
        uid = pod["metadata"]["uid"]
        stop = self._running[uid]
        try:
            if await self._schedule(pod):
                await self._run(pod, stop)
            await stop.wait()
            await self._finish_deletion(pod)
        except (NotFound, Conflict):
            pass  # it went away under our hands
        finally:
            self._running.pop(uid, None)

    def _fault(self, pod: Pod) -> Fault | None:
        return next((fault for matches, fault in self._faults if matches(pod)), None)

    async def _schedule(self, pod: Pod) -> bool:
        """Bind the pod to the first node that suits it, or say why none does."""
        fault = self._fault(pod)
        suits = [node for node in self._nodes if _suits(node, pod)]
        refusal = self._refuses(pod)
        if refusal or not suits or (fault and fault.kind is FaultKind.UNSCHEDULABLE):
            total = len(self._nodes)
            why = f"0/{total} nodes are available: {total} node(s) didn't match Pod's node selector"
            text = refusal or (fault.text if fault and fault.text else why)
            await self._set_status(
                pod, phase="Pending", conditions=[_scheduled("False", "Unschedulable", text)]
            )
            return False
        await self._bind(pod, suits[0])
        return True

    async def _bind(self, pod: Pod, node: Node) -> None:
        meta = pod["metadata"]
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": meta["name"], "namespace": meta["namespace"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node.name},
        }
        await self._client.create(_BINDINGS, binding, meta["namespace"])

    async def _run(self, pod: Pod, stop: asyncio.Event) -> None:
        fault = self._fault(pod)
        match fault.kind if fault else None:
            case FaultKind.SILENCE:
                return
            case FaultKind.IMAGE_PULL_BACK_OFF:
                await self._set_waiting(pod, "ImagePullBackOff", "Back-off pulling image")
                return
            case FaultKind.EVICTED:
                await self._set_status(
                    pod, phase="Failed", reason="Evicted", message="The node was low on memory."
                )
                return
        await self._set_waiting(pod, "ContainerCreating", "")
        await self._set_running(pod)
        self.started += 1
        ended = _faked(fault) or await self._run_within_deadline(pod, stop)
        await self._set_ended(pod, ended)

    async def _run_within_deadline(self, pod: Pod, stop: asyncio.Event) -> Ended:
        deadline = pod["spec"].get("activeDeadlineSeconds")
        ending = asyncio.Event()

        async def end_on_stop() -> None:
            await stop.wait()
            ending.set()

        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(end_on_stop())
            running = tasks.create_task(_awaited(self._runner(pod, ending)))
            done, _ = await asyncio.wait({running}, timeout=deadline)
            ending.set()
            ended = await running
            stopping.cancel()
        return ended if done else Ended(137, ended.message, "DeadlineExceeded")

    async def _finish_deletion(self, pod: Pod) -> None:
        meta = pod["metadata"]
        with contextlib.suppress(NotFound, Conflict):
            await self._client.delete(
                PODS,
                meta["name"],
                meta["namespace"],
                uid=meta["uid"],
                grace_seconds=0,
            )

    # Status -------------------------------------------------------------------------------------

    async def _set_status(self, pod: Pod, **status: Any) -> None:
        meta = pod["metadata"]
        body = {"metadata": {"uid": meta["uid"]}, "status": status}
        await self._client.merge_patch(
            PODS, meta["name"], meta["namespace"], body, subresource="status"
        )

    async def _set_waiting(self, pod: Pod, reason: str, message: str) -> None:
        await self._set_status(
            pod,
            phase="Pending",
            startTime=_timestamp(),
            conditions=[_scheduled("True"), *_readiness("False", reason="ContainersNotReady")],
            containerStatuses=[
                _container(pod, {"waiting": {"reason": reason, "message": message}})
            ],
        )

    async def _set_running(self, pod: Pod) -> None:
        await self._set_status(
            pod,
            phase="Running",
            conditions=[_scheduled("True"), *_readiness("True")],
            containerStatuses=[_container(pod, {"running": {"startedAt": _timestamp()}})],
        )

    async def _set_ended(self, pod: Pod, ended: Ended) -> None:
        failed = ended.exit_code != 0
        terminated = {
            "exitCode": ended.exit_code,
            "reason": ended.reason or ("Error" if failed else "Completed"),
            "message": ended.message,
            "finishedAt": _timestamp(),
        }
        status: dict[str, Any] = {
            "phase": "Failed" if failed else "Succeeded",
            "conditions": [_scheduled("True"), *_readiness("False", reason="PodCompleted")],
            "containerStatuses": [_container(pod, {"terminated": terminated})],
        }
        if ended.reason == "DeadlineExceeded":
            status["reason"] = ended.reason
            status["message"] = "Pod was active on the node longer than the specified deadline"
        await self._set_status(pod, **status)


async def run_process(pod: Pod, stop: asyncio.Event) -> Ended:
    """Run the container's command as a local process, in a group and folder of its own."""
    with tempfile.TemporaryDirectory(prefix="llmkube-pod-") as folder:
        log = Path(folder) / "termination-log"
        log.touch()
        container = pod["spec"]["containers"][0]
        try:
            child = await asyncio.create_subprocess_exec(
                *container.get("command", []),
                *container.get("args", []),
                env=_environment(container, log),
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            return Ended(128, str(error), "StartError")
        reaper.watch_group(child.pid)
        grace = timedelta(seconds=pod["spec"].get("terminationGracePeriodSeconds", 30))
        code = await _until_ended(child, stop, grace)
        reaper.forget_group(child.pid)
        message = log.read_bytes()[-MESSAGE_LIMIT:].decode("utf-8", "replace")
        return Ended(code if code >= 0 else 128 - code, message)


async def _until_ended(
    child: asyncio.subprocess.Process, stop: asyncio.Event, grace: timedelta
) -> int:
    ended = asyncio.ensure_future(child.wait())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            _signal(child.pid, signal.SIGTERM)
            await asyncio.wait({ended}, timeout=grace.total_seconds())
        _signal(child.pid, signal.SIGKILL)
        return await ended
    finally:
        stopped.cancel()
        if not ended.done():  # we are being cancelled: the process must not outlive us
            _signal(child.pid, signal.SIGKILL)
            ended.cancel()


def _signal(pgid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pgid, number)


def _environment(container: dict[str, Any], log: Path) -> dict[str, str]:
    """The container's own variables on a bare system: `python` is this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}/usr/bin{os.pathsep}/bin"
    given = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
    return {"PATH": path, TERMINATION_LOG_VARIABLE: str(log), **given}


def _faked(fault: Fault | None) -> Ended | None:
    match fault.kind if fault else None:
        case FaultKind.OOM_KILLED:
            return Ended(137, "", "OOMKilled")
        case FaultKind.MESSAGE if fault:
            return Ended(0, fault.text[:MESSAGE_LIMIT])
    return None


def _suits(node: Node, pod: Pod) -> bool:
    selector: dict[str, str] = pod["spec"].get("nodeSelector") or {}
    selected = all(node.labels.get(key) == value for key, value in selector.items())
    tolerations = pod["spec"].get("tolerations") or []
    return selected and all(
        any(_tolerates(toleration, taint) for toleration in tolerations) for taint in node.taints
    )


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    same_key = toleration.get("key") == taint["key"]
    return same_key and toleration.get("value", "") == taint.get("value", "")


def _container(pod: Pod, state: dict[str, Any]) -> dict[str, Any]:
    container = pod["spec"]["containers"][0]
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": container["image"],
        "ready": "running" in state,
        "restartCount": 0,
        "state": state,
    }


def _scheduled(status: str, reason: str = "", message: str = "") -> dict[str, str]:
    return _condition("PodScheduled", status, reason, message)


def _readiness(status: str, reason: str = "") -> list[dict[str, str]]:
    return [_condition(kind, status, reason, "") for kind in ("ContainersReady", "Ready")]


def _condition(kind: str, status: str, reason: str, message: str) -> dict[str, str]:
    condition = {"type": kind, "status": status, "lastTransitionTime": _timestamp()}
    return (
        condition
        | ({"reason": reason} if reason else {})
        | ({"message": message} if message else {})
    )


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def _awaited(ended: Awaitable[Ended]) -> Ended:
    return await ended
