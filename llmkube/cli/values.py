"""Values as users write them on the command line, parsed into the types the code speaks.

Pure. Every parser raises `typer.BadParameter` with an example of what is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import StrEnum
from urllib.parse import urlsplit

import typer

from llmkube.api.names import EDGE_ACCOUNT_PREFIX, METAL_ACCOUNT_PREFIX
from llmkube.verifier.policy import parse_address


class Format(StrEnum):
    """Output formats; TABLE is what one gets without -o."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"([0-9]{1,9})([dhms])")
_LABEL_KEY = re.compile(
    r"(?:[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
_SUBDOMAIN = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
MAX_NAME = 253
MIN_TTL = timedelta(minutes=10)
"""The API server issues no shorter token."""

Toleration = Mapping[str, str]


def parse_output_format(text: str | Format) -> Format:
    try:
        return Format(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is none of json, yaml, wide, name") from None


def parse_duration(text: str | timedelta) -> timedelta:
    """`30d`, `12h`, `1h30m`."""
    if isinstance(text, timedelta):
        return text
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise typer.BadParameter(f"{text!r} is no duration; write for example 30d, 12h or 1h30m")
    return timedelta(seconds=sum(int(number) * _UNITS[unit] for number, unit in parts))


def parse_ttl(text: str | timedelta) -> timedelta:
    """The life of a token; the API server takes 10 minutes to 2^32 seconds."""
    ttl = parse_duration(text)
    if not MIN_TTL <= ttl <= timedelta(seconds=2**32):
        raise typer.BadParameter("a token lives at least 10m and at most 49710d; 30d is usual")
    return ttl


def parse_ip(text: str) -> str:
    """One IP address, in its canonical form; "" is none."""
    try:
        return str(parse_address(text)) if text else ""
    except ValueError as error:
        raise typer.BadParameter(
            f"{text!r} {error}; write one plain address, for example 192.168.1.20"
        ) from None


def parse_interval(text: str | timedelta) -> timedelta:
    """How often an edge pushes: whole seconds, at least 5 s."""
    interval = parse_duration(text)
    if not timedelta(seconds=5) <= interval <= timedelta(seconds=2**31 - 1):
        raise typer.BadParameter("an edge pushes at most every 5s; 30s is usual")
    return interval


def parse_metal_name(name: str) -> str:
    """A MetalNode's name."""
    return parse_object_name(name, METAL_ACCOUNT_PREFIX)


def parse_site_name(name: str) -> str:
    """A FederatedCluster's name."""
    return parse_object_name(name, EDGE_ACCOUNT_PREFIX)


def parse_object_name(name: str, prefix: str) -> str:
    """A name that fits itself and, behind the prefix, the account that is named after it."""
    longest = MAX_NAME - len(prefix)
    if _SUBDOMAIN.fullmatch(name) is None or len(name) > longest:
        raise typer.BadParameter(
            f"{name!r} is no valid name: use lower-case letters, digits, '-' and '.', beginning "
            f"and ending with a letter or digit, at most {longest} characters, e.g. mac-studio-1"
        )
    return name


def parse_server(url: str) -> str:
    """An API server's URL, without a trailing slash."""
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname or parts.query or parts.username:
        raise typer.BadParameter(
            f"{url!r} is no API server URL; write for example https://api.example.com:6443"
        )
    return url.rstrip("/")


def parse_node_selector(given: Iterable[str]) -> dict[str, str]:
    """`key=value` of each; `[""]` is the empty selector."""
    return dict(_parse_label(text) for text in _without_empty(given))


def _parse_label(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        raise typer.BadParameter(
            f"{text!r} is no node label; write for example kubernetes.io/hostname=relay-1"
        )
    return key, value


def parse_tolerations(given: Iterable[str]) -> tuple[Toleration, ...]:
    """`key[=value][:effect]` of each, as kubectl writes taints; `*` tolerates everything."""
    return tuple(_parse_toleration(text) for text in _without_empty(given))


def _parse_toleration(text: str) -> Toleration:
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    tail = {"effect": effect} if effect else {}
    if effect and effect not in _EFFECTS:
        raise typer.BadParameter(f"{effect!r} is no taint effect; use {', '.join(_EFFECTS)}")
    if key == "*" and not equals:
        return {"operator": "Exists", **tail}
    if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
        raise typer.BadParameter(
            f"{text!r} is no toleration; write for example dedicated=relay:NoSchedule, "
            "dedicated:NoSchedule or *"
        )
    if equals:
        return {"key": key, "operator": "Equal", "value": value, **tail}
    return {"key": key, "operator": "Exists", **tail}


def _without_empty(given: Iterable[str]) -> list[str]:
    return [text for text in given if text]
