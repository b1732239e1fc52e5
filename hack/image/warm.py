"""Import what the image's commands import, so that the base's standard modules get compiled.

Usage: warm.py [FILE]. Runs once as root while the image is built, and removes FILE (itself).
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import llmkube


def load(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "devcluster":
            raise
        # The demo starts a control plane of its own, which no image holds.


def main() -> int:
    for module in pkgutil.walk_packages(llmkube.__path__, "llmkube."):
        if not module.name.endswith("__main__"):
            load(module.name)
    for name in sys.argv[1:]:
        Path(name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
