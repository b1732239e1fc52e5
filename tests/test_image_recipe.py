"""The image recipe: what it promises and a build would show only after minutes (`make image`)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = [
    line.strip()
    for line in DOCKERFILE.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


def pinned(name: str) -> dict[str, str]:
    """Package versions in requirements/NAME.txt."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def stage(name: str) -> list[str]:
    """The instructions of one stage."""
    start = next(i for i, line in enumerate(INSTRUCTIONS) if line.endswith(f" AS {name}"))
    rest = INSTRUCTIONS[start + 1 :]
    end = next((i for i, line in enumerate(rest) if line.startswith("FROM ")), len(rest))
    return rest[:end]


def test_the_base_is_an_argument_declared_before_the_first_stage() -> None:
    first = next(i for i, line in enumerate(INSTRUCTIONS) if line.startswith("FROM "))
    arguments = [line.split()[1].partition("=")[0] for line in INSTRUCTIONS[:first]]
    assert arguments == ["BASE", "BUILD_BASE"]


@pytest.mark.parametrize("target", ["controller", "verifier"])
def test_an_image_runs_as_a_numeric_user_other_than_root(target: str) -> None:
    """The kubelet cannot tell whether a user given by name is root (runAsNonRoot)."""
    users = [line for line in stage(target) if line.startswith("USER ")]
    assert users == ["USER 65532:65532"]


@pytest.mark.parametrize("target", ["controller", "verifier"])
def test_an_image_is_labelled(target: str) -> None:
    labels = " ".join(line for line in stage(target) if line.startswith("LABEL "))
    for name in ("title", "description", "version", "revision", "licenses"):
        assert f"org.opencontainers.image.{name}=" in labels


def test_no_shell_is_needed() -> None:
    for line in INSTRUCTIONS:
        if line.startswith(("RUN ", "ENTRYPOINT ", "CMD ")):
            command = re.sub(r"^(RUN|ENTRYPOINT|CMD)( --mount=\S+)*\s+", "", line)
            assert isinstance(json.loads(command), list), line


def test_every_dependency_is_pinned_by_hash() -> None:
    for name in ("runtime", "verifier"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert len(pinned(name)) <= text.count("--hash=sha256:")
    installs = [line for line in INSTRUCTIONS if '"pip", "install"' in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line and "--no-deps" in line for line in installs)


def test_both_images_have_the_same_versions() -> None:
    runtime = pinned("runtime")
    assert pinned("verifier").items() <= runtime.items()
    assert set(pinned("verifier")) == {"cryptography", "cffi", "pycparser"}


def test_the_verifier_image_holds_what_the_verifier_imports() -> None:
    code = "import sys, llmkube.verifier.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    imported = {name for name in done.stdout.split() if name.split(".")[0] == "llmkube"}
    copied = {"llmkube", "llmkube.clock"}
    assert {name for name in imported if not name.startswith("llmkube.verifier")} == copied
    sources = " ".join(line for line in stage("build-verifier") if line.startswith("COPY "))
    for path in ("llmkube/__init__.py", "llmkube/clock.py", "llmkube/verifier/"):
        assert f" {path}" in sources


@pytest.mark.parametrize("script", ["build-image.sh", "local-base.sh"])
def test_the_scripts_are_plain_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "hack" / script)], check=True, timeout=10)


def test_without_an_engine_it_says_what_to_install(tmp_path: Path) -> None:
    """Exit code 77 is the customary "skipped"."""
    for tool in ("dirname", "sed", "git"):
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=False)
        if found.stdout:
            (tmp_path / tool).symlink_to(found.stdout.strip())
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "hack" / "build-image.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 77
    assert "buildah" in done.stderr
