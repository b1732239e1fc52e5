"""`make e2e` on a machine that cannot run it: exit code 77 and a way out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from e2e import __main__ as program
from e2e import addresses, requirements


@pytest.fixture(autouse=True)
def capable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing stands in the way; each test takes one thing away."""
    monkeypatch.setattr(requirements, "_is_debian_12", lambda: True)
    monkeypatch.setattr(requirements, "_routed_networks", list)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{Path(name).name}")


def test_nothing_is_missing() -> None:
    assert requirements.missing() == []


def test_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_is_debian_12", lambda: False)
    assert "Debian 12" in requirements.missing()[0]


def test_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "sudo make e2e" in requirements.missing()[0]


def test_missing_programs_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    present = {"ip": "/sbin/ip", "unshare": "/bin/unshare", "nsenter": "/bin/nsenter"}
    monkeypatch.setattr(shutil, "which", present.get)
    (problem,) = requirements.missing()
    command = "apt-get install --no-install-recommends "
    packages = problem.partition(command)[2].split()
    assert {"buildah", "containerd", "containernetworking-plugins", "runc"} <= set(packages)
    assert "iproute2" not in packages


def test_a_network_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "_routed_networks", lambda: [addresses.PODS])
    assert str(addresses.PODS) in requirements.missing()[0]


def test_the_exit_code_is_77(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert program.main([]) == 77
    assert "cannot run here" in capsys.readouterr().err
