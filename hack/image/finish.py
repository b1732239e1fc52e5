"""Finish an installed tree for an image: drop what never runs, compile the rest.

Usage: finish.py FOLDER [--verifier]. Runs with the image's own Python, in the build stage. Compiled
files are of the unchecked kind: nothing in an image changes, so nothing needs to be compared.
"""

from __future__ import annotations

import compileall
import py_compile
import shutil
import sys
from pathlib import Path

UNUSED = ("bin", "**/tests", "**/test", "**/*.pyi", "**/*.c", "**/*.h", "**/*.pyx", "**/*.pxd")
UNUSED_BY_VERIFIER = (
    # cryptography wants cffi's compiled half only (_cffi_backend); the rest parses C headers.
    "pycparser*",
    "cffi*",
    # Key derivation, one-time passwords, symmetric envelopes: not imported for X.509.
    "cryptography/hazmat/primitives/kdf",
    "cryptography/hazmat/primitives/twofactor",
    "cryptography/fernet.py",
)


def main() -> int:
    folder = Path(sys.argv[1])
    patterns = UNUSED + (UNUSED_BY_VERIFIER if "--verifier" in sys.argv else ())
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
    done = compileall.compile_dir(
        folder, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    )
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
