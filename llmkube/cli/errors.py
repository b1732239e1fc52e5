"""What a failure looks like to the user: one line that says what to do, and an exit code.

Commands raise `CliError` for what they find themselves; everything that `llmkube.kube` raises is
put into words here, once. Neighbour: `main`, which prints the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import typer.exceptions

from llmkube.kube import errors as kube


class ExitCode(IntEnum):
    """Exit codes, part of the public contract."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    DENIED = 4
    TAKEN = 5
    UNREACHABLE = 6
    NEGATIVE = 7
    INTERRUPTED = 130


EXIT_CODES_HELP = (
    "Exit codes: 0 done; 1 the API server refused, or an unexpected error; 2 wrong usage or "
    "configuration; 3 not found (an object, or the CRDs); 4 not allowed, or the credential is "
    "expired or revoked; 5 the name is taken by something llmkube did not make; 6 the API server "
    "cannot be reached; 7 waited for an answer, and it is no (metal verify --wait); "
    "130 interrupted."
)


class CliError(Exception):
    """A failure that the command itself found. The message tells the user what to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class NameTaken(CliError):
    """An object of the wanted name exists and was not made by llmkube for this owner."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.TAKEN)


@dataclass(frozen=True, slots=True)
class Failure:
    """What to print on stderr ("" for nothing), and the exit code."""

    message: str
    exit_code: int


def describe_failure(error: BaseException) -> Failure:
    """Put any exception into one line and an exit code."""
    error = _first_cause(error)
    match error:
        case KeyboardInterrupt():
            return Failure("", ExitCode.INTERRUPTED)
        case CliError():
            return _failure(str(error), error.exit_code)
        case kube.ConfigError():
            return _failure(str(error), ExitCode.USAGE)
        case kube.ApiError():
            return _describe_api_error(error)
        case typer.exceptions.TyperException():
            return _describe_usage_error(error)
        case OSError():
            return _failure(_describe_os_error(error), ExitCode.FAILED)
        case _:
            return _failure(
                f"unexpected {type(error).__name__}: {error}; run again with --debug for the "
                "traceback, and please report it",
                ExitCode.FAILED,
            )


def _failure(message: str, code: int) -> Failure:
    return Failure(f"error: {one_line(message)}", code)


def one_line(text: str) -> str:
    """The text on one line; control characters (the server may quote a user) become spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _first_cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _describe_usage_error(error: typer.exceptions.TyperException) -> Failure:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        return Failure(error.format_message(), ExitCode.USAGE)
    hint = f"; see '{context.command_path} --help'" if context is not None else ""
    return _failure(error.format_message().rstrip(".") + hint, error.exit_code)


def _describe_os_error(error: OSError) -> str:
    if error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}; choose another path or change its permissions"


def _describe_api_error(error: kube.ApiError) -> Failure:
    said = error.message.rstrip(".")
    match error:
        case kube.Unauthorized():
            return _failure(
                "the API server refused the credential: it is missing, expired or revoked; log "
                "in again, or choose another --kubeconfig or --context",
                ExitCode.DENIED,
            )
        case kube.Forbidden():
            return _failure(
                f"the API server does not allow it: {said}; ask a cluster admin for this right",
                ExitCode.DENIED,
            )
        case kube.NotFound():
            return _failure(_describe_not_found(error, said), ExitCode.NOT_FOUND)
        case kube.AlreadyExists() | kube.Conflict():
            return _failure(
                f"somebody else changed it at the same time: {said}; run the command again",
                ExitCode.FAILED,
            )
        case kube.TooManyRequests():
            return _failure(
                f"the API server is overloaded: {said}; run the command again in a minute",
                ExitCode.UNREACHABLE,
            )
        case kube.Unavailable():
            return _failure(
                f"the API server cannot be reached, or failed: {said}; check the network and the "
                "server's URL in the kubeconfig, then run the command again",
                ExitCode.UNREACHABLE,
            )
        case _:
            return _failure(f"the API server refused: {said}", ExitCode.FAILED)


def is_missing_kind(error: kube.NotFound) -> bool:
    """True if the cluster does not serve the kind at all, rather than this one object.

    The API server has words for an unknown kind of a known group, and plain text for an unknown
    group.
    """
    return (
        "could not find the requested resource" in error.message
        or "page not found" in error.message
    )


def _describe_not_found(error: kube.NotFound, said: str) -> str:
    if is_missing_kind(error):
        return (
            "this cluster does not know LLMKube's kinds: install them with "
            "`kubectl apply --server-side -k config/crd`, or choose another --context"
        )
    return f"{said}; check the name, --namespace and --context"
