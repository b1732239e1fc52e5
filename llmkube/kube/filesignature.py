"""Which file it is: what changes when one is replaced or rewritten.

Credentials are put in place while programs run, by admins and by Kubernetes (which swaps symbolic
links); whoever has read one compares signatures to learn that there is a newer one.
"""

from __future__ import annotations

from pathlib import Path

FileSignature = tuple[int, ...]


def file_signature(path: Path) -> FileSignature:
    """The signature of the file as it is now, () if there is none. Equal ones mean: the same file,
    and nobody has written to it since."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
