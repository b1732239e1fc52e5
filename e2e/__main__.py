"""`make e2e`: check the machine, build the images, run the proofs.

Exits with 77, the customary code for "skipped", where the machine cannot do it. Arguments go to
pytest. LLMKUBE_E2E_IMAGES names a folder that keeps the images, to save the next build.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from devcluster import binaries, reaper
from e2e import images, requirements

SKIPPED = 77
FOLDER = Path(__file__).resolve().parent


def main(argv: list[str]) -> int:
    if problems := requirements.missing():
        print("make e2e cannot run here: " + "; ".join(problems), file=sys.stderr)
        return SKIPPED
    binaries.control_plane()
    binaries.node()
    with tempfile.TemporaryDirectory(prefix="llmkube-images-") as scratch:
        reaper.watch_folder(Path(scratch))
        folder = os.environ.setdefault("LLMKUBE_E2E_IMAGES", scratch)
        images.complete(Path(folder))
        proofs = [] if any("test_" in word for word in argv) else [str(FOLDER)]
        return int(pytest.main([*proofs, "-o", "timeout=900", *argv]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
