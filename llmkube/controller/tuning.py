"""Every duration and limit of the controller, and the file that changes them.

The defaults are the ones that the documentation states. `--config FILE` (YAML or JSON) overrides
any of them by the names used here, durations written as in Go and Kubernetes ("90s", "1h30m"):

    heartbeat: {write_interval: 30s}
    checks: {spacing: 10s, backoff_cap: 5m}

Tests use the same file to make hours pass in seconds.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from llmkube.controller.sense import nonsense, settings_of
from llmkube.informers.options import ReflectorSettings
from llmkube.leader import LeaderSettings
from llmkube.rules.checks import CheckSettings
from llmkube.rules.heartbeat import HeartbeatSettings
from llmkube.rules.phase import PhaseSettings

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)(h|ms|m|s|us|µs))")
_UNITS = {
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
    "us": timedelta(microseconds=1),
    "µs": timedelta(microseconds=1),
}


class BadTuning(ValueError):
    """The file cannot be used; the message names it, the setting, and what is wrong."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Back-off of a failing key, and how many keys are worked on at once."""

    backoff_base: timedelta = timedelta(milliseconds=5)
    backoff_cap: timedelta = timedelta(seconds=1000)
    workers: int = 32
    """Of each controller. The API server is the bottleneck, not these."""
    run_limit: timedelta = timedelta(minutes=2)
    """A reconcile that takes longer is ended, and tried again."""


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """Starting, stopping, and being probed."""

    request_timeout: timedelta = timedelta(seconds=30)
    coalescing: timedelta = timedelta(milliseconds=200)
    """Events about Leases and MetalNodes are gathered this long before they are read: nobody minds
    it of a heartbeat of 30 s, and nearly all of an event's cost is waking up for it."""
    no_attempt_limit: timedelta = timedelta(minutes=3)
    """`/healthz` fails when a reflector has had no stream and made no attempt for so long."""
    filling_limit: timedelta = timedelta(seconds=60)
    """How long caches may fill at the start with the garbage collector off."""
    loop_stall_limit: timedelta = timedelta(seconds=10)
    """`/healthz` fails when the event loop is stuck for longer."""
    drain: timedelta = timedelta(seconds=7)
    """How long a stop waits for the reconciles in hand."""
    last_events: timedelta = timedelta(seconds=1)
    """How long a stop then waits for Events that are not written yet. With `leader.release_timeout`
    and the end of open scrapes that makes 10 s in all, half of the Deployment's grace period."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """All settings that are no flags of their own. Raises BadTuning if they cannot work."""

    reflector: ReflectorSettings = field(default_factory=ReflectorSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    leader: LeaderSettings = field(default_factory=LeaderSettings)
    heartbeat: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    phase: PhaseSettings = field(default_factory=PhaseSettings)
    checks: CheckSettings = field(default_factory=CheckSettings)
    life: LifeSettings = field(default_factory=LifeSettings)

    def __post_init__(self) -> None:
        if (why := nonsense(dict(settings_of(self)))) is not None:
            raise BadTuning(why)


def load_tuning(path: Path | None) -> Tuning:
    """The defaults, changed by the file if there is one. Raises BadTuning."""
    if path is None:
        return Tuning()
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadTuning(f"{path}: {' '.join(str(error).split())}") from error
    return parse_tuning(document, str(path))


def parse_tuning(document: Any, origin: str) -> Tuning:
    """Read a decoded document; `origin` names it in errors. Raises BadTuning."""
    from pydantic import TypeAdapter  # only for those who have such a file: it costs 10 MB

    _refuse_unknown(document if document is not None else {}, Tuning, origin, ())
    try:
        changed = _merged(asdict(Tuning()), _with_durations(document or {}))
        return TypeAdapter(Tuning).validate_python(changed)
    except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
        raise BadTuning(f"{origin}: {_first_problem(error)}") from error


def parse_duration(text: str) -> timedelta:
    """Read "1h30m", "90s", "250ms". Raises ValueError."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is no duration: write it like 90s, 1h30m or 250ms")
    try:
        return sum((float(number) * _UNITS[unit] for number, unit in parts), timedelta())
    except OverflowError as error:
        raise ValueError(f"{text!r} is longer than anything: write something shorter") from error


def _with_durations(value: Any) -> Any:
    """Strings that look like durations become timedeltas; everything else stays as it is."""
    if isinstance(value, dict):
        return {key: _with_durations(one) for key, one in value.items()}
    if isinstance(value, str) and _DURATION.match(value):
        return parse_duration(value)
    return value


def _merged(defaults: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The defaults with those settings replaced that the changes name, at any depth."""
    nested = {
        key: _merged(defaults[key], change) if isinstance(change, dict) else change
        for key, change in changes.items()
    }
    return {**defaults, **nested}


def _refuse_unknown(value: Any, kind: Any, origin: str, path: tuple[str, ...]) -> None:
    where = ".".join(path) or "the document"
    if not isinstance(value, dict):
        raise BadTuning(f"{origin}: {where} must be a mapping of settings")
    known = {one.name for one in fields(kind)}
    hints = get_type_hints(kind)
    for key, one in value.items():
        if key not in known:
            choices = ", ".join(sorted(known))
            raise BadTuning(f"{origin}: {where} has no setting {key!r}; it has: {choices}")
        if is_dataclass(hints[key]):
            _refuse_unknown(one, hints[key], origin, (*path, str(key)))


def _first_problem(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        said = first.get("ctx", {}).get("error", first["msg"])  # our own words, where they are ours
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), str(said))))
    return str(error)
