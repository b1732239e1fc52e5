"""The working copy of the datacenter's credential: taken over when it changes, kept otherwise."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from llmkube.edge.credential import WorkingCopy
from llmkube.kube.errors import ConfigError
from llmkube.kube.kubeconfig import current_token, replace_token, write_kubeconfig


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "secret" / "kubeconfig"
    path.parent.mkdir()
    write(path, "first")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    path.mkdir()
    return path


def write(path: Path, token: str) -> None:
    write_kubeconfig(
        path,
        server="https://hub:6443",
        ca_pem=b"pem",
        namespace="llmkube-system",
        user="u",
        token=token,
    )


def test_the_original_is_taken_over_once(source: Path, folder: Path) -> None:
    copy = WorkingCopy(source, folder)
    assert copy.refresh()
    assert current_token(copy.path) == "first"
    assert stat.S_IMODE(copy.path.stat().st_mode) == 0o600
    assert not copy.refresh()


def test_a_renewed_token_outlives_restarts(source: Path, folder: Path) -> None:
    WorkingCopy(source, folder).refresh()
    replace_token(folder / "kubeconfig", "renewed")
    again = WorkingCopy(source, folder)
    assert not again.refresh()
    assert current_token(again.path) == "renewed"


def test_a_rotated_original_replaces_the_copy_also_as_a_mounted_secret_does(
    tmp_path: Path, folder: Path
) -> None:
    """A kubelet swaps a symbolic link; the file's own path stays."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "kubeconfig", version)
    link = tmp_path / "data"
    link.symlink_to("v1")
    copy = WorkingCopy(link / "kubeconfig", folder)
    assert copy.refresh()
    replace_token(copy.path, "renewed")
    temporary = tmp_path / "tmp"
    temporary.symlink_to("v2")
    os.replace(temporary, link)
    assert copy.refresh()
    assert current_token(copy.path) == "v2"


def test_a_lost_copy_is_made_again(source: Path, folder: Path) -> None:
    WorkingCopy(source, folder).refresh()
    (folder / "kubeconfig").unlink()
    assert WorkingCopy(source, folder).refresh()


def test_interrupted_before_it_remembers_the_original_it_takes_it_over_again(
    source: Path, folder: Path
) -> None:
    WorkingCopy(source, folder).refresh()
    (folder / "kubeconfig.origin").unlink()
    assert WorkingCopy(source, folder).refresh()
    assert current_token(folder / "kubeconfig") == "first"


def test_without_the_original_the_copy_is_used(source: Path, folder: Path) -> None:
    copy = WorkingCopy(source, folder)
    copy.refresh()
    source.unlink()
    assert not copy.refresh()
    assert not WorkingCopy(source, folder).refresh()


def test_without_either_it_says_which_file_is_missing(source: Path, folder: Path) -> None:
    source.unlink()
    with pytest.raises(ConfigError, match="secret/kubeconfig"):
        WorkingCopy(source, folder).refresh()
