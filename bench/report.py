"""One table for people, one JSON file for machines."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. `target` is an upper bound in the same unit, None where there is none."""

    part: str
    name: str
    subject: str
    value: float
    unit: str
    target: float | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "ok" if self.value <= self.target else "MISSED"


def median_of(runs: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The median over runs of each figure, in the order of the first run."""
    values: dict[tuple[str, str, str], list[float]] = {}
    for figure in (figure for run in runs for figure in run):
        values.setdefault((figure.part, figure.name, figure.subject), []).append(figure.value)
    return [
        Figure(
            one.part,
            one.name,
            one.subject,
            statistics.median(values[one.part, one.name, one.subject]),
            one.unit,
            one.target,
        )
        for one in (runs[0] if runs else ())
    ]


_SIZED = re.compile(r"(cold start|resident memory), (\d+) (\w+)").fullmatch


def growth(figures: Sequence[Figure]) -> list[Figure]:
    """How cost grows from the smallest to the largest number of objects: bytes of memory for each,
    and the power of their number with which a cold start grows. Nothing for one size."""
    sizes: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for one in figures:
        if found := _SIZED(one.name):
            kind = (one.part, one.subject, found[1], found[3])
            sizes.setdefault(kind, {})[int(found[2])] = one.value
    return [_growth(*kind, by_size) for kind, by_size in sizes.items() if len(by_size) > 1]


def _growth(part: str, subject: str, name: str, objects: str, by_size: dict[int, float]) -> Figure:
    low, high = min(by_size), max(by_size)
    over = f"from {low} to {high} {objects}"
    if name == "resident memory":
        each = (by_size[high] - by_size[low]) * 1e3 / (high - low)
        target = _PER_OBJECT if subject == "llmkube" else None
        return Figure(part, f"memory for each more, {over}", subject, each, "KB", target)
    power = math.log(by_size[high] / by_size[low]) / math.log(high / low)
    return Figure(part, f"cold start grows with the power, {over}", subject, power, "")


_PER_OBJECT = 4.0  # KB


def percentile(values: Iterable[float], share: float) -> float:
    """The value that `share` (0 to 1) of the values do not exceed; NaN if there are none."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(figures: Sequence[Figure], environment: Mapping[str, str]) -> Path:
    """Print the table and write bench/results/latest.json."""
    table = Table("part", "figure", "subject", "value", "target", "", title="LLMKube benchmarks")
    for one in figures:
        target = "" if one.target is None else f"≤ {one.target:,.4g} {one.unit}"
        value = f"{one.value:,.4g} {one.unit}"
        table.add_row(one.part, one.name, one.subject, value, target, one.verdict)
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "latest.json"
    rows = [
        {name: getattr(one, name) for name in Figure.__slots__} | {"verdict": one.verdict}
        for one in figures
    ]
    path.write_text(json.dumps({"environment": dict(environment), "figures": rows}, indent=1))
    return path
