"""The control plane that the tests stand on is real, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devcluster import binaries
from devcluster.controlplane import ControlPlane
from tests.conftest import ROOT
from tests.support.wait import eventually

_CRASHING = """
import asyncio, os, sys
from devcluster.controlplane import ControlPlane
async def main():
    async with ControlPlane.start() as cluster:
        print(cluster.folder, *(p.pid for p in cluster._processes.values()), flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.cluster
async def test_namespaces_are_really_deleted(control_plane: ControlPlane, namespace: str) -> None:
    await control_plane.kubectl("delete", "namespace", namespace, "--timeout=60s")
    gone = await control_plane.kubectl("get", "namespace", namespace, check=False)
    assert "NotFound" in gone.stderr


@pytest.mark.cluster
async def test_a_service_account_has_only_its_own_rights(
    control_plane: ControlPlane, namespace: str
) -> None:
    kubeconfig = await control_plane.service_account_kubeconfig(namespace, "default")
    refused = await control_plane.kubectl("get", "pods", check=False, kubeconfig=kubeconfig)
    assert f"system:serviceaccount:{namespace}:default" in refused.stderr
    assert "Forbidden" in refused.stderr


@pytest.mark.cluster
async def test_a_crash_leaves_no_process_and_no_folder_behind() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _CRASHING], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    folder, *pids = child.stdout.readline().split()
    assert len(pids) == 3
    child.send_signal(signal.SIGKILL)
    child.wait()
    await eventually(lambda: not any(_alive(int(pid)) for pid in pids), "the programs are gone")
    await eventually(lambda: not Path(folder).exists(), "the data folder is gone")


def test_assets_of_the_ecosystem_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("etcd", "kube-apiserver"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    assert binaries.control_plane() == {
        "etcd": tmp_path / "etcd",
        "kube-apiserver": tmp_path / "kube-apiserver",
    }


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
