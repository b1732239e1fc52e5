"""Kubeconfig files that hold a secret: whole or not at all, and for the owner's eyes only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from llmkube.kube.config import load_access
from llmkube.kube.errors import ConfigError
from llmkube.kube.kubeconfig import (
    current_token,
    render_kubeconfig,
    replace_token,
    write_kubeconfig,
)

HAND_MADE = """\
# my cluster
apiVersion: v1
kind: Config
current-context: 'mac'
contexts:
- {name: mac, context: {cluster: c, user: "agent", namespace: team}}  # flow style
clusters:
- name: c
  cluster: {server: "https://c:6443"}
users:
- name: other
  user:
    token: untouched
- name: agent
  user:
    token: old.token   # renewed by the agent
"""


def write(path: Path, token: str = "first", ca_pem: bytes | None = None) -> None:
    write_kubeconfig(
        path, server="https://c:6443", ca_pem=ca_pem, namespace="team", user="mac", token=token
    )


def files(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


async def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    write(tmp_path / "k", "tok", b"pem")
    access = await load_access(tmp_path / "k")
    assert access.server == "https://c:6443"
    assert access.namespace == "team"
    assert access.ca_pem == b"pem"
    assert access.credential.authorization == "Bearer tok"
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o600
    assert files(tmp_path) == ["k"]


@settings(deadline=None)
@given(st.text(min_size=1).filter(str.isprintable))
def test_no_value_can_break_out_of_its_place(value: str) -> None:
    text = render_kubeconfig(server="s", ca_pem=None, namespace=value, user=value, token=value)
    document = yaml.safe_load(text)
    assert document["users"] == [{"name": value, "user": {"token": value}}]
    assert document["contexts"][0]["context"]["namespace"] == value


def test_an_old_file_with_loose_rights_is_replaced_by_a_tight_one(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_text("old")
    path.chmod(0o666)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "k").symlink_to("victim")
    write(tmp_path / "k")
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (tmp_path / "k").is_symlink()


def test_a_token_is_replaced_and_every_other_byte_kept(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.write_text(HAND_MADE)
    replace_token(path, "new.token")
    assert path.read_text() == HAND_MADE.replace("old.token ", '"new.token" ')
    assert current_token(path) == "new.token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files(tmp_path) == ["k"]


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text(HAND_MADE)
    (tmp_path / "k").symlink_to("real")
    replace_token(tmp_path / "k", "new")
    assert (tmp_path / "k").is_symlink()
    assert current_token(real) == "new"


def test_a_credential_that_is_put_there_during_a_renewal_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flushing takes its time, and the admin's new file must not be lost to the old account's."""
    path = tmp_path / "k"
    write(path, "old")
    flush = os.fsync

    def rotated_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", flush)
        flush(descriptor)
        write(path, "of another account")

    monkeypatch.setattr(os, "fsync", rotated_meanwhile)
    with pytest.raises(ConfigError, match="kept"):
        replace_token(path, "renewed", replacing="old")
    assert current_token(path) == "of another account"
    assert files(tmp_path) == ["k"]


def test_a_file_that_someone_else_changed_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "k"
    write(path, "rotated-by-the-admin")
    with pytest.raises(ConfigError, match="another token"):
        replace_token(path, "renewed", replacing="first")
    assert current_token(path) == "rotated-by-the-admin"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("{", id="no YAML"),
        pytest.param("[]", id="a list"),
        pytest.param(HAND_MADE.replace("'mac'", "gone"), id="no such context"),
        pytest.param(HAND_MADE.replace("token: old.token", "tokenFile: x"), id="no token"),
        pytest.param(HAND_MADE.replace("token: old.token", "token: [a]"), id="a list of tokens"),
        pytest.param("\xff", id="no UTF-8"),
    ],
)
def test_a_file_without_a_token_of_its_own_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        replace_token(path, "new")
    assert path.read_bytes() == text.encode("latin-1")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        current_token(tmp_path / "gone")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "k"
    write(path, "old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space"):
        replace_token(path, "new")
    with pytest.raises(OSError, match="No space"):
        write(path, "new")
    monkeypatch.undo()
    assert current_token(path) == "old"
    assert files(tmp_path) == ["k"], "no half-written file with a secret may stay"
