"""Kubernetes resource quantities, as far as we write them: bytes for people to read."""

from __future__ import annotations

_UNITS = (("Gi", 1 << 30), ("Mi", 1 << 20))


def format_bytes(count: int) -> str:
    """A number of bytes as an exact quantity: whole Gi, else whole Mi, else plain bytes."""
    for suffix, size in _UNITS:
        if count and count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)
