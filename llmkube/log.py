"""Structured logs: one JSON object a line for machines, or aligned text for people.

Every program calls `configure` once, at start; every module logs through `get_logger`. Whatever
looks like a credential is cut out of every line, whoever logged it: tokens, passwords and private
keys never reach a log. Events are cleaned by the same `redact`.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import msgspec


@contextmanager
def _pretending_without(name: str) -> Iterator[None]:
    """Modules that are imported inside the block do not find that package."""
    found = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if found is not None:
            sys.modules[name] = found


with _pretending_without("rich"):  # structlog needs it for pretty tracebacks, which ours are not:
    import structlog  # 70 ms of each start, and 4 MB

_SECRETS = re.compile(
    r"eyJ[\w-]{8,}\.[\w-]+\.[\w-]*"  # a JSON web token
    r"|(\b(?i:bearer|basic)\s+)[\w.~+/=-]{8,}"  # an Authorization header; its kind stays
    r"|(?<=://)[^\s/?#]+(?=@)"  # user and password in a URL
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
REDACTED = "[redacted]"
get_logger = structlog.get_logger


class LogFormat(StrEnum):
    JSON = "json"
    CONSOLE = "console"


def redact(text: str) -> str:
    """The text with everything that looks like a credential cut out."""
    return _SECRETS.sub(rf"\1{REDACTED}", text)


def configure(log_format: LogFormat, level: str) -> None:
    """Send structlog's and the standard library's records to standard error.

    `level` is one of debug, info, warning, error; raises ValueError for any other word.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}: use debug, info, warning or error")
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    final = _final_processors(log_format)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=final)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.INFO))  # libraries' debug output would carry headers


def _final_processors(log_format: LogFormat) -> list[Any]:
    head: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        _expand_exception,
        _redact_values,
    ]
    if log_format is LogFormat.JSON:
        return [*head, structlog.processors.JSONRenderer(serializer=_encode)]
    return [*head, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


_expand_exception = structlog.processors.ExceptionRenderer()


def _redact_values(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for key, value in event.items():
        event[key] = _redacted(value)
    return event


def _redacted(value: Any) -> Any:
    """The value as JSON can hold it, without credentials."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, (int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_redacted(one) for one in value]
    return redact(str(value))


def _encode(event: Any, **_options: Any) -> str:
    return msgspec.json.encode(event).decode()
