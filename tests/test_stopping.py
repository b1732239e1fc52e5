"""A stop that comes while a program starts, in this process and to the programs themselves."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from llmkube.stopping import Stopped, unless_stopped
from tests.support.command import running_llmkube
from tests.support.wait import eventually


async def test_work_that_ends_first_gives_its_result() -> None:
    assert await unless_stopped(asyncio.Event(), asyncio.sleep(0, "done")) == "done"


async def test_work_that_fails_first_raises_its_own_error() -> None:
    async def fail() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        await unless_stopped(asyncio.Event(), fail())


async def test_a_stop_that_comes_first_cancels_the_work() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            stop.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(Stopped):
        await unless_stopped(stop, work())
    assert ended.is_set()


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["controller", "--kubeconfig={}"], id="the controller"),
        pytest.param(
            ["edge", "--cluster-name=site", "--datacenter-kubeconfig={}", "--kubeconfig={}"],
            id="the edge",
        ),
    ],
)
async def test_sigterm_while_a_plugin_logs_in_is_obeyed_at_once(
    command: list[str], tmp_path: Path
) -> None:
    kubeconfig, began = tmp_path / "kubeconfig", tmp_path / "began"
    kubeconfig.write_text(json.dumps(with_plugin(f"touch {began}; exec sleep 600")))
    args = [word.format(kubeconfig) for word in command]
    args += ["--metrics-bind-address=0", "--health-probe-bind-address=0"]
    async with running_llmkube(args, log=tmp_path / "log") as running:
        await eventually(began.exists, "the plugin runs")
        assert await running.stop(signal.SIGTERM) == 0, running.text
        assert "stopped" in running.text


def with_plugin(script: str) -> dict:
    """A kubeconfig whose user logs in by that script."""
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "/bin/sh",
        "args": ["-c", script],
        "interactiveMode": "Never",
    }
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "clusters": [{"name": "it", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "it", "user": {"exec": plugin}}],
    }
