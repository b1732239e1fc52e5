"""How results are shown: kubectl's tables, or JSON, YAML and names for scripts.

Cells come from machines that are only half trusted, so control characters never reach the
terminal. Ages are rounded as kubectl rounds them. Colour only on a terminal, and not with NO_COLOR.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import typer

from llmkube.cli.errors import one_line
from llmkube.cli.ownership import describe
from llmkube.cli.values import Format
from llmkube.kube.resources import Resource

NONE = "<none>"


class Hint(str):
    """Words for people where there is nothing to show: not part of the output."""

    __slots__ = ()


def show(text: str) -> None:
    """Print a result on stdout, a hint on stderr."""
    typer.echo(text, err=isinstance(text, Hint))


_GAP = 3
_GOOD = frozenset({"True", "Connected", "Reachable", "Active"})
_BAD = frozenset({"False", "Unreachable", "Revoked", "Timeout", "Refused", "PinMismatch"})
_DOUBTFUL = frozenset({"Unknown", "Stale", "Pending"})


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, three blanks apart; empty cells show <none>."""
    lines = [list(headers), *([plain(value) for value in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(headers))]
    return "\n".join(_line(line, widths) for line in lines)


def plain(value: object) -> str:
    """The value as text without control characters; <none> if it is empty."""
    return NONE if value is None or value == "" else one_line(str(value))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width + _GAP) for cell, width in zip(cells, widths, strict=True)]
    painted = [paint(cell) for cell in padded]
    return "".join(painted).rstrip()


def paint(cell: str) -> str:
    """The cell in the colour of what it says, on a terminal."""
    word = cell.strip()
    for words, colour in ((_GOOD, "green"), (_BAD, "red"), (_DOUBTFUL, "yellow")):
        if word in words and wants_colour():
            return typer.style(cell, fg=colour)
    return cell


def wants_colour() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def age(since: datetime | None, now: datetime) -> str:
    """`12s`, `3m20s`, `5h10m`, `26h`, `3d4h`, `12d`; "" if there is none."""
    return "" if since is None else human_duration(now - since)


def human_duration(delta: timedelta) -> str:
    """As kubectl rounds: two units while the first is small, then one."""
    seconds = int(delta.total_seconds())
    if seconds < 0:
        return "0s"
    minutes, hours, days = seconds // 60, seconds // 3_600, seconds // 86_400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return _two(minutes, "m", seconds % 60, "s")
    if minutes < 180:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    return _two(days, "d", hours % 24, "h") if days < 8 else f"{days}d"


def _two(first: int, first_unit: str, second: int, second_unit: str) -> str:
    return f"{first}{first_unit}" + (f"{second}{second_unit}" if second else "")


def as_list(items: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """A List as kubectl prints it, without managedFields."""
    return {"apiVersion": "v1", "kind": "List", "items": [tidy(item) for item in items], **more}


def tidy(item: Mapping[str, Any]) -> dict[str, Any]:
    """The object without its managedFields."""
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return {**item, "metadata": metadata}


def document(value: Any, output: Format) -> str:
    """The value as JSON or YAML."""
    if output is Format.JSON:
        return json.dumps(value, indent=4)
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True).rstrip("\n")


def names(resource: Resource, items: Iterable[Mapping[str, Any]]) -> str:
    """One `kind.group/name` a line."""
    return "\n".join(describe(resource, item["metadata"]["name"]) for item in items)
