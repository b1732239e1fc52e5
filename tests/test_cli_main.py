"""The command as a whole: help, errors, exit codes, completion, start-up, values."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from llmkube.cli import output, values
from llmkube.cli.errors import CliError, ExitCode, NameTaken, describe_failure
from llmkube.cli.main import SUBCOMMANDS, run
from llmkube.cli.ownership import removals
from llmkube.kube import errors as kube
from tests.support.command import run_llmkube


async def test_help_lists_everything_without_importing_it() -> None:
    ran = await run_llmkube("--help")
    assert ran.code == 0
    for name in SUBCOMMANDS:
        assert f"\n  {name} " in ran.out
    assert "Exit codes:" in ran.out
    code = (
        "import sys; from llmkube.cli.main import run; run(['--help']); run(['metal', '--help']);"
        "heavy = {'aiohttp', 'kubernetes_asyncio', 'prometheus_client', 'rich', 'yaml',"
        " 'llmkube.controller'} & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_listing_macs_does_not_import_the_controller_or_the_official_client() -> None:
    code = (
        "import sys; import llmkube.cli.metal_list, llmkube.kube.client, llmkube.kube.config;"
        "heavy = {'kubernetes_asyncio', 'llmkube.controller', 'llmkube.reconcilers'}"
        " & set(sys.modules); sys.exit(str(heavy) if heavy else 0)"
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_version_and_no_colour_in_a_pipe() -> None:
    ran = await run_llmkube("--version")
    assert (ran.code, ran.out) == (0, "llmkube 0.1.0\n")


@pytest.mark.parametrize("name", sorted(SUBCOMMANDS))
async def test_every_subcommand_has_help(name: str) -> None:
    ran = await run_llmkube(name, "--help")
    assert ran.code == 0, ran.err
    assert "--help" in ran.out
    assert "\x1b" not in ran.all


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["metl"], "Did you mean 'metal'?"),
        (["--nonsense"], "No such option"),
        (["metal", "token", "create"], "Missing argument 'NAME'"),
        (["metal", "token", "create", "UPPER"], "lower-case letters"),
        (["metal", "token", "create", "a" * 240], "at most 239 characters"),
        (["metal", "token", "create", "m", "--ttl", "5m"], "at least 10m"),
        (["metal", "token", "create", "m", "--ttl", "soon"], "write for example 30d"),
        (["metal", "token", "create", "m", "--host-ip", "mac.local"], "one plain address"),
        (["metal", "token", "create", "m", "--host-ip", "010.0.0.1"], "one plain address"),
        (["metal", "token", "create", "m", "--server", "http://x"], "https://api.example.com"),
        (["metal", "token", "create", "m", "--verifier-toleration", "a=b:Sometimes"], "NoExecute"),
        (["metal", "token", "create", "m", "--verifier-node-selector", "a"], "no node label"),
        (["metal", "list", "-o", "xml"], "json, yaml, wide, name"),
        (["fleet", "register", "s", "--heartbeat-interval", "4s"], "at most every 5s"),
        (["edge", "--cluster-name", "s"], "Missing option '--datacenter-kubeconfig'"),
    ],
)
async def test_wrong_usage_is_one_line_with_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(run, arguments)
    told = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert told.out == ""
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1
    assert words in told.err


async def test_completion_offers_subcommands() -> None:
    ran = await run_llmkube(
        _LLMKUBE_COMPLETE="complete_bash", COMP_WORDS="llmkube fl", COMP_CWORD="1"
    )
    assert ran.out.split() == ["fleet"]
    deeper = await run_llmkube(
        _LLMKUBE_COMPLETE="complete_bash", COMP_WORDS="llmkube metal token re", COMP_CWORD="3"
    )
    assert deeper.out.split() == ["revoke"]


async def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    quiet = await run_llmkube("metal", "list", kubeconfig=missing)
    assert "Traceback" not in quiet.err
    for loud in (
        await run_llmkube("--debug", "metal", "list", kubeconfig=missing),
        await run_llmkube("metal", "list", kubeconfig=missing, LLMKUBE_DEBUG="1"),
    ):
        assert "Traceback" in loud.err
        assert loud.code == quiet.code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (CliError("do this"), 1, "error: do this"),
        (NameTaken("taken"), 5, "taken"),
        (kube.ConfigError("no file"), 2, "no file"),
        (kube.Unauthorized("Unauthorized"), 4, "expired or revoked"),
        (kube.Forbidden('nodes is forbidden: User "x"'), 4, "ask a cluster admin"),
        (kube.NotFound('metalnodes "x" not found'), 3, "check the name"),
        (
            kube.NotFound("the server could not find the requested resource"),
            3,
            "kubectl apply --server-side -k config/crd",
        ),
        (kube.Conflict("changed"), 1, "run the command again"),
        (kube.TooManyRequests("slow down"), 6, "in a minute"),
        (kube.Unavailable("https://x: cannot connect"), 6, "cannot be reached"),
        (kube.Invalid("spec.x: Invalid value"), 1, "spec.x"),
        (PermissionError(13, "Permission denied", "/etc/x"), 1, "/etc/x: Permission denied"),
        (RuntimeError("boom"), 1, "--debug"),
        (ExceptionGroup("many", [ExceptionGroup("more", [kube.Forbidden("no")])]), 4, "admin"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_failure_is_one_line_and_an_exit_code(
    error: BaseException, code: int, words: str
) -> None:
    failure = describe_failure(error)
    assert failure.exit_code == code
    assert words in failure.message
    assert "\n" not in failure.message


@given(st.text())
def test_no_message_reaches_the_terminal_with_control_characters(text: str) -> None:
    message = describe_failure(CliError(text)).message
    assert all(character.isprintable() for character in message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", {"operator": "Exists"}),
        ("*:NoExecute", {"operator": "Exists", "effect": "NoExecute"}),
        ("gpu", {"key": "gpu", "operator": "Exists"}),
        ("gpu:NoSchedule", {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}),
        ("gpu=", {"key": "gpu", "operator": "Equal", "value": ""}),
        (
            "example.com/gpu=yes:PreferNoSchedule",
            {
                "key": "example.com/gpu",
                "operator": "Equal",
                "value": "yes",
                "effect": "PreferNoSchedule",
            },
        ),
        ("", None),
        ("=x", ValueError),
        ("a b", ValueError),
        ("gpu=yes:Never", ValueError),
    ],
)
def test_tolerations(text: str, expected: Any) -> None:
    if expected is ValueError:
        with pytest.raises(typer.BadParameter):
            values.parse_tolerations([text])
    else:
        assert values.parse_tolerations([text]) == (() if expected is None else (expected,))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("1h30m", 5_400), ("90s", 90), ("0s", 0)],
)
def test_durations(text: str, seconds: int) -> None:
    assert values.parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "30", "d", "-1h", "1.5h", "1h 30m", "h1", "30D", "١h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        values.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0s"),
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (600, "10m"),
        (3 * 3600, "3h"),
        (5 * 3600 + 600, "5h10m"),
        (26 * 3600, "26h"),
        (3 * 86_400 + 4 * 3600, "3d4h"),
        (12 * 86_400, "12d"),
    ],
)
def test_ages_are_rounded_as_kubectl_rounds_them(seconds: int, text: str) -> None:
    assert output.human_duration(timedelta(seconds=seconds)) == text


def test_a_table_shows_no_control_characters_and_marks_what_is_missing() -> None:
    text = output.table(("NAME", "CHIP"), [("mac\x1b[31m-1", None), ("m2", "M5")])
    assert text.splitlines() == ["NAME         CHIP", "mac [31m-1   <none>", "m2           M5"]
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert output.age(None, now) == ""


JSON = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(max_size=2), JSON), st.dictionaries(st.text(max_size=2), JSON))
def test_removals_take_out_exactly_what_is_not_wanted(
    actual: dict[str, Any], wanted: dict[str, Any]
) -> None:
    def merge(target: Any, patch: Any) -> Any:
        """RFC 7386."""
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge(result.get(key), value)
        return result

    def keys(value: Any, prefix: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        if not isinstance(value, dict):
            return {prefix}
        return {prefix}.union(*(keys(inner, (*prefix, key)) for key, inner in value.items()))

    cleaned = merge(actual, removals(actual, wanted))
    left = merge(cleaned, wanted)
    assert left == wanted or keys(left) <= keys(wanted) | keys(cleaned)
    assert not removals(wanted, wanted)
    for key in cleaned:
        assert key in wanted
