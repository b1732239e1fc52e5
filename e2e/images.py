"""The images: built as a user builds them, then kept as archives for the node to import."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAUSE = "localhost/llmkube-pause:e2e"
_PAUSE_DOCKERFILE = """\
FROM localhost/llmkube-local-base:12
ENTRYPOINT ["python", "-c", "import signal; signal.pause()"]
"""


@dataclass(frozen=True, slots=True)
class Images:
    """Archives of the images, by role: controller, verifier and pause."""

    folder: Path

    def archive(self, role: str) -> Path:
        return self.folder / f"{role}.tar"

    def name(self, role: str) -> str:
        """The name inside the archive."""
        listing = ["tar", "--extract", "--to-stdout", f"--file={self.archive(role)}"]
        manifest = subprocess.run(
            [*listing, "manifest.json"], capture_output=True, check=True
        ).stdout
        return str(json.loads(manifest)[0]["RepoTags"][0])


def complete(folder: Path) -> Images:
    """Build what `folder` lacks: `make image` on a local base, and a pause image.

    Nothing is pulled from a registry.
    """
    folder.mkdir(parents=True, exist_ok=True)
    images = Images(folder)
    if not all(images.archive(role).exists() for role in ("controller", "verifier")):
        env = {**os.environ, "BASE": "local", "ENGINE": "buildah", "ARCHIVES": str(folder)}
        subprocess.run(["make", "image"], cwd=ROOT, env=env, check=True)
    if not images.archive("pause").exists():
        _build_pause(folder)
    return images


def _build_pause(folder: Path) -> None:
    context = folder / "pause"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text(_PAUSE_DOCKERFILE)
    env = {**os.environ, "BUILDAH_ISOLATION": "chroot"}
    archive = folder / "pause.tar"
    for command in (
        ["buildah", "build", "--quiet", "--tag", PAUSE, str(context)],
        ["buildah", "push", "--quiet", PAUSE, f"docker-archive:{archive}:{PAUSE}"],
    ):
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
