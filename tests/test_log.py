"""Logs are readable by machines and never carry a credential."""

from __future__ import annotations

import json
import logging

import pytest
import structlog

from llmkube.log import REDACTED, LogFormat, configure, redact

TOKEN = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrdWJlIn0.c2lnbmF0dXJl"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"token {TOKEN} refused", id="a token in a sentence"),
        pytest.param("Authorization: Bearer abcdefgh12345678", id="a header"),
        pytest.param("Authorization: basic YWJjZGVmZ2g6cHc=", id="a header with a password"),
        pytest.param("https://user:hunter2@registry/x", id="a URL with a password"),
        pytest.param("https://user:hun@ter2@registry/x", id="a URL whose password has an @"),
        pytest.param("https://hunter2@registry/x", id="a URL with a token"),
        pytest.param(
            "-----BEGIN EC PRIVATE KEY-----\nAAAA\n-----END EC PRIVATE KEY-----", id="a key"
        ),
        pytest.param("-----BEGIN PRIVATE KEY-----\nAAAA", id="half a key"),
    ],
)
def test_credentials_are_cut_out(text: str) -> None:
    redacted = redact(text)
    assert REDACTED in redacted
    assert not any(
        secret in redacted for secret in (TOKEN, "abcdefgh", "YWJj", "hunter2", "ter2", "AAAA")
    )


@pytest.mark.parametrize(
    "text",
    [
        "pin q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA= changed",
        "https://127.0.0.1:6443/api/v1/namespaces/x/events refused",
        "write to admin@example.com, or see https://example.com/a?to=b@c",
        "a bearer of news",
    ],
)
def test_what_is_no_credential_stays(text: str) -> None:
    assert redact(text) == text


def test_every_value_of_every_record_is_redacted(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogFormat.JSON, "info")
    log = structlog.get_logger("test")
    try:
        raise RuntimeError(f"failed with {TOKEN}")
    except RuntimeError:
        log.exception(
            "went wrong",
            url=f"https://x/?t={TOKEN}",
            headers={"a": TOKEN},
            count=3,
            names=("a", TOKEN),
        )
    logging.getLogger("library").warning("said %s", TOKEN)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["went wrong", f"said {REDACTED}"]
    assert lines[0]["count"] == 3
    assert lines[0]["names"] == ["a", REDACTED]
    assert lines[0]["level"] == "error"
    assert "RuntimeError" in lines[0]["exception"]
    assert TOKEN not in json.dumps(lines)


def test_an_unknown_level_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="debug, info, warning or error"):
        configure(LogFormat.JSON, "chatty")
