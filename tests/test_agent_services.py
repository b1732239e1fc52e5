"""The service files and the page for admins: they load, and they speak of what there is."""

from __future__ import annotations

import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from llmkube.cli.agent import app, default_state_dir

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "config" / "agent"
UNIT = FILES / "llmkube-agent.service"
PLIST = FILES / "dev.llmkube.agent.plist"
PAGE = ROOT / "docs" / "agent.md"


def flags() -> set[str]:
    """Every option of `llmkube agent`."""
    command = typer.main.get_command(app)
    return {name for parameter in command.params for name in parameter.opts if name[:2] == "--"}


def plist() -> dict[str, object]:
    with PLIST.open("rb") as file:
        loaded: dict[str, object] = plistlib.load(file)
    return loaded


class TestLaunchd:
    def test_it_stays_up_without_root_and_without_being_slowed_down(self) -> None:
        job = plist()
        assert job["Label"] == PLIST.name.removesuffix(".plist")
        assert job["KeepAlive"] is True
        assert job["RunAtLoad"] is True
        assert job["UserName"] == "_llmkube"
        assert job["ProcessType"] != "Background"
        assert job["Umask"] == 0o077
        assert int(str(job["ExitTimeOut"])) > 10

    def test_it_starts_the_agent_with_flags_that_exist(self) -> None:
        arguments = plist()["ProgramArguments"]
        assert isinstance(arguments, list)
        assert arguments[1] == "agent"
        assert {text for text in arguments if text.startswith("--")} <= flags()
        assert not any("insecure" in text for text in arguments)


class TestSystemd:
    @pytest.fixture
    def unit(self, tmp_path: Path) -> Path:
        """The unit as if it were installed on this machine."""
        if shutil.which("systemd-analyze") is None:
            pytest.skip("systemd-analyze is not here")
        program = tmp_path / "llmkube"
        program.write_text(f"#!{sys.executable}\n")
        program.chmod(0o755)
        text = UNIT.read_text().replace("/usr/local/bin/llmkube", str(program))
        text = re.sub(r"(User|Group)=llmkube-agent", r"\1=root", text)
        installed = tmp_path / UNIT.name
        installed.write_text(text)
        return installed

    def test_systemd_finds_no_fault(self, unit: Path) -> None:
        command = ["systemd-analyze", "verify", "--recursive-errors=no", str(unit)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")

    def test_it_is_hardened(self, unit: Path) -> None:
        command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(unit)]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout

    def test_it_starts_the_agent_with_flags_that_exist(self) -> None:
        line = next(line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart="))
        assert set(re.findall(r"--[a-z-]+", line)) <= flags()
        assert "insecure" not in line


class TestStateFolder:
    def test_systemd_says_where(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/llmkube-agent:/var/lib/other")
        assert default_state_dir() == Path("/var/lib/llmkube-agent")

    @pytest.mark.parametrize(
        ("platform", "user", "folder"),
        [
            ("darwin", 0, "/Library/Application Support/LLMKube Agent"),
            ("darwin", 501, "/home/me/Library/Application Support/LLMKube Agent"),
            ("linux", 0, "/var/lib/llmkube-agent"),
            ("linux", 1000, "/home/me/.local/state/llmkube-agent"),
        ],
    )
    def test_or_the_platform_does(
        self, monkeypatch: pytest.MonkeyPatch, platform: str, user: int, folder: str
    ) -> None:
        monkeypatch.delenv("STATE_DIRECTORY", raising=False)
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr("os.geteuid", lambda: user)
        assert default_state_dir() == Path(folder)


def test_the_page_knows_every_flag_and_no_other() -> None:
    named = set(re.findall(r"^\| `(--[a-z-]+)", PAGE.read_text(), re.MULTILINE))
    assert named == flags() - {"--help"}
