"""`python -m llmkube.verifier`: the program of a verifier pod.

Reads its request from LLMKUBE_CHECK, dials, and writes the report to the termination log. Exit
status 0 means that a report was written; with anything else the termination log holds a sentence
for the admin instead, which the controller shows under `VerifierFailed`.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from llmkube.clock import SystemClock
from llmkube.verifier.dialback import run_check
from llmkube.verifier.protocol import (
    CHECK_VARIABLE,
    TERMINATION_LOG,
    TERMINATION_LOG_VARIABLE,
    decode_request,
    encode_report,
)


def main() -> int:
    """Run one check; the exit status."""
    # The first process of a container has no default signal handlers: without this one a deleted
    # pod would linger for its whole grace period.
    signal.signal(signal.SIGTERM, _stop)
    try:
        request = decode_request(os.environ.get(CHECK_VARIABLE, ""))
        text, status = encode_report(run_check(request, SystemClock())), 0
    except ValueError as error:
        text, status = f"The verifier cannot use {CHECK_VARIABLE}: {error}", 2
    try:
        _write(text)
    except OSError as error:
        sys.stderr.write(f"The verifier cannot write its report: {error}\n")
        return 3
    sys.stdout.write(text + "\n")
    return status


def _write(text: str) -> None:
    path = os.environ.get(TERMINATION_LOG_VARIABLE) or TERMINATION_LOG
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
