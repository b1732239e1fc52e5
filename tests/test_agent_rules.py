"""The agent's pure parts: what a beat writes, how retries are paced, which MetalNode it is."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from llmkube.agent.command import run_command
from llmkube.agent.gate import TOKEN_HEADER, TokenGate
from llmkube.agent.heartbeat import Answer, lease_patch, read_answer, retry_pause
from llmkube.agent.httprules import (
    Upstream,
    is_ready_probe,
    refuse,
    request_headers,
    response_headers,
)
from llmkube.agent.settings import HeartbeatSettings
from llmkube.agent.sleep import SleepWatch
from llmkube.agent.target import Target, Wanted
from llmkube.api.names import REPORT_ANNOTATION
from llmkube.clock import ZERO
from llmkube.kube.credentials import Access, Credential, ServerTrust
from llmkube.kube.errors import ConfigError, TooManyRequests, Unavailable
from tests.support.clock import FakeClock

NOW = datetime(2026, 11, 30, 20, 15, 0, 42, tzinfo=UTC)
RHYTHM = HeartbeatSettings()


class TestBeat:
    def test_a_beat_without_news_carries_the_time_only(self) -> None:
        assert lease_patch(NOW, "holder", RHYTHM, None) == {
            "spec": {
                "renewTime": "2026-11-30T20:15:00.000042Z",
                "leaseDurationSeconds": 120,
                "holderIdentity": "holder",
            }
        }

    def test_a_new_report_rides_along(self) -> None:
        patch = lease_patch(NOW, "holder", RHYTHM, "{}")
        assert patch["metadata"] == {"annotations": {REPORT_ANNOTATION: "{}"}}

    @pytest.mark.parametrize(
        ("annotations", "owners", "expected", "answer"),
        [
            pytest.param({}, [], None, Answer(None, False, False), id="an empty Lease"),
            pytest.param(None, None, None, Answer(None, False, False), id="a bare one"),
            pytest.param("ours", ["me"], "ours", Answer("ours", False, False), id="all as it was"),
            pytest.param("ours", ["me"], None, Answer("ours", False, False), id="just written"),
            pytest.param("theirs", ["me"], "ours", Answer("theirs", True, False), id="overwritten"),
            pytest.param({}, ["me"], "ours", Answer(None, True, False), id="removed"),
            pytest.param("ours", ["x"], "ours", Answer("ours", False, True), id="another owner"),
            pytest.param(
                "ours", ["x", "me"], "ours", Answer("ours", False, False), id="two owners"
            ),
        ],
    )
    def test_what_the_answer_shows(
        self, annotations: Any, owners: Any, expected: str | None, answer: Answer
    ) -> None:
        if isinstance(annotations, str):
            annotations = {REPORT_ANNOTATION: annotations}
        metadata = {
            "annotations": annotations,
            "ownerReferences": owners and [{"uid": owner} for owner in owners],
        }
        assert read_answer({"metadata": metadata}, "me", expected) == answer

    @given(st.integers(1, 10**9), st.integers(0, 86_400) | st.none())
    def test_a_retry_comes_within_the_cap(self, failures: int, asked: int | None) -> None:
        error = (
            Unavailable("down")
            if asked is None
            else TooManyRequests("busy", retry_after=timedelta(seconds=asked))
        )
        assert RHYTHM.first_retry <= retry_pause(failures, error, RHYTHM) <= RHYTHM.retry_cap

    def test_retries_slow_down_and_honour_retry_after(self) -> None:
        down, busy = Unavailable("down"), TooManyRequests("", retry_after=timedelta(seconds=7))
        pauses = [retry_pause(n, down, RHYTHM).total_seconds() for n in range(1, 7)]
        assert pauses == [1, 2, 4, 8, 15, 15]
        assert retry_pause(1, busy, RHYTHM) == timedelta(seconds=7)


class TestSleep:
    def test_only_a_sleep_is_a_sleep(self) -> None:
        clock, watch = FakeClock(), SleepWatch(timedelta(seconds=5))
        assert watch.look(clock) == ZERO
        for disturb in (
            lambda: clock.advance(timedelta(hours=3)),
            lambda: clock.step_wall(timedelta(days=-2)),
            lambda: clock.suspend(timedelta(seconds=1)),
        ):
            disturb()
            assert watch.look(clock) == ZERO
        clock.suspend(timedelta(hours=8))
        assert watch.look(clock) == timedelta(hours=8)
        assert watch.look(clock) == ZERO


def access(token: str = "", namespace: str = "default") -> Access:
    credential = Credential(authorization=f"Bearer {token}" if token else None)

    async def reload() -> Access:
        raise AssertionError

    return Access(
        "https://api", namespace, "/etc/mac.kubeconfig", ServerTrust(), credential, (), reload
    )


def token_of(account: str) -> str:
    claims = {
        "iat": 1,
        "exp": 2,
        "kubernetes.io": {"namespace": "macs", "serviceaccount": {"name": account}},
    }
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"e30.{payload}.x"


class TestTarget:
    def test_the_credential_names_the_metalnode(self) -> None:
        found = Wanted().target(access(token_of("llmkube-metal-studio.7"), "macs"))
        assert found == Target("macs", "studio.7")

    def test_flags_win(self) -> None:
        wanted = Wanted("elsewhere", "other")
        assert wanted.target(access(token_of("llmkube-metal-x"))) == Target("elsewhere", "other")
        assert wanted.target(access()) == Target("elsewhere", "other")

    @pytest.mark.parametrize(
        "token", ["", "opaque", token_of("default"), token_of("llmkube-metal-")]
    )
    def test_another_credential_needs_a_name(self, token: str) -> None:
        with pytest.raises(ConfigError, match="give --name"):
            Wanted().target(access(token))


class TestUpstream:
    @pytest.mark.parametrize(
        ("text", "authority", "local"),
        [
            ("http://127.0.0.1:11434", "127.0.0.1:11434", True),
            ("http://localhost:8080/", "localhost:8080", True),
            ("http://[::1]:8080", "[::1]:8080", True),
            ("http://127.0.0.1", "127.0.0.1:80", True),
            ("http://10.0.0.5:8000", "10.0.0.5:8000", False),
        ],
    )
    def test_taken(self, text: str, authority: str, local: bool) -> None:
        assert Upstream.parse(text) == Upstream(authority, local)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "127.0.0.1:8080",
            "https://127.0.0.1:8080",
            "unix:///run/llm.sock",
            "http://",
            "http://:8080",
            "http://user:secret@127.0.0.1:8080",
            "http://127.0.0.1:8080/v1",
            "http://127.0.0.1:8080?x",
            "http://127.0.0.1:99999",
            "http://127.0.0.1:x",
            "http://a b:80",
        ],
    )
    def test_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"http://HOST:PORT|valid host|[Pp]ort"):
            Upstream.parse(text)


class TestHttpRules:
    @given(st.text(), st.text())
    def test_only_the_one_probe_is_free(self, method: str, target: str) -> None:
        free = is_ready_probe(method, target)
        assert free == (method in ("GET", "HEAD") and target.split("?")[0] == "/_llmkube/ready")

    @given(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["Connection", "X-A", "TE", "Host", "Upgrade", "Content-Length", TOKEN_HEADER]
                )
                | st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}", fullmatch=True),
                st.from_regex(r"[ -~]{0,30}", fullmatch=True),
            )
        )
    )
    def test_no_hop_by_hop_header_and_no_token_passes(self, pairs: list[tuple[str, str]]) -> None:
        headers = CIMultiDict(pairs)
        named = {
            token.strip().lower()
            for value in headers.getall("Connection", [])
            for token in value.split(",")
        }
        upstream = Upstream("127.0.0.1:1", True)
        passed = {name.lower() for name in request_headers(headers, upstream, "10.0.0.1")}
        own = {"host", "x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"}
        assert not passed & {"connection", "te", "upgrade", "content-length", TOKEN_HEADER.lower()}
        assert not (passed - own) & named
        back = {name.lower() for name in response_headers(headers)}
        assert not back & {"connection", "te", "upgrade"}

    @given(st.text(max_size=30), st.text(max_size=60))
    def test_any_request_is_judged(self, method: str, target: str) -> None:
        verdict = refuse(method, target, CIMultiDict())
        assert verdict is None or 400 <= verdict.status < 600
        if verdict is None:
            assert target.isprintable()
            assert target.startswith("/") or target == "*"


class TestGate:
    @given(st.text(min_size=1, max_size=40).filter(lambda text: text.strip() == text))
    def test_exactly_the_token_opens(self, token: str) -> None:
        path = Path("/tmp") / f"llmkube-gate-{id(token)}"
        with suppress(UnicodeEncodeError):
            path.write_bytes(token.encode())
            path.chmod(0o600)
            gate = TokenGate(path)
            assert gate.admits([token]) == bool(token.encode().strip())
            assert not gate.admits([token + "x"])
            assert not gate.admits([token[:-1]])
            assert not gate.admits([])
            assert not gate.admits([token, token])
        path.unlink(missing_ok=True)

    def test_a_pipe_is_no_token_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert not TokenGate(tmp_path / "pipe").admits([""])


class TestCommand:
    async def test_output(self) -> None:
        assert await run_command(("/bin/echo", "hello"), timedelta(seconds=20)) == "hello\n"

    @pytest.mark.parametrize(
        ("argv", "error"),
        [
            (("/bin/false",), ValueError),
            (("/nonexistent",), OSError),
            (("/bin/cat", "/dev/zero"), ValueError),
        ],
    )
    async def test_failure(self, argv: tuple[str, ...], error: type[Exception]) -> None:
        with pytest.raises(error):
            await run_command(argv, timedelta(seconds=20))

    async def test_a_program_that_hangs_is_killed(self) -> None:
        async with asyncio.timeout(20):
            with pytest.raises(TimeoutError):
                await run_command(("/bin/sleep", "1000"), timedelta(milliseconds=50))
