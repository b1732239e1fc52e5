"""What a verifier costs before and while it dials: each pod is a process that lives for a moment.

Against a real TLS ingress on loopback, so that the network costs nothing. The bare interpreter is
the floor under the start-up time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from bench.report import Figure
from llmkube.verifier.policy import parse_network
from llmkube.verifier.protocol import CheckRequest, encode_request
from tests.support.ingresses import Credential, issue, listening, tls

PROGRAM = (sys.executable, "-m", "llmkube.verifier")
FLOOR = (sys.executable, "-c", "pass")
# As the process itself sees it: ru_maxrss would count what we had before it ran (Linux).
PEAK = """
import re
from llmkube.verifier.__main__ import main
main()
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: how long it lived, and its CPU time."""

    wall: timedelta
    cpu: timedelta


def run(processes: int = 15) -> list[Figure]:
    """Medians over so many processes of each kind, one at a time."""
    mac = issue()
    with listening(tls(mac.server_context())) as peer:
        check = encode_request(_request(mac, peer.port))
        dialled = [_once(PROGRAM, check) for _ in range(processes)]
        peak = _peak_mebibytes(check)
    idle = [_once(PROGRAM, "") for _ in range(processes)]
    bare = [_once(FLOOR, "") for _ in range(processes)]
    part = "verifier"
    return [
        Figure(part, "start to report, one reachable address", "llmkube", _ms(dialled), "ms"),
        Figure(part, "start-up (no question asked)", "llmkube", _ms(idle), "ms"),
        Figure(part, "start-up (no question asked)", "bare Python", _ms(bare), "ms"),
        Figure(part, "CPU of one check", "llmkube", _cpu(dialled), "ms"),
        Figure(part, "peak memory (the pod has 64 MiB)", "llmkube", peak, "MiB", 64),
    ]


def _request(mac: Credential, port: int) -> CheckRequest:
    allow = (parse_network("127.0.0.0/8"),)
    return CheckRequest("bench", mac.spki, mac.der, port, ("127.0.0.1",), allow)


def _once(command: Sequence[str], check: str) -> Run:
    start = time.perf_counter()
    child = subprocess.Popen(command, env=_environment(check), stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(child.pid, 0)
    child.returncode = 0  # reaped here, for its resource usage
    wall = timedelta(seconds=time.perf_counter() - start)
    return Run(wall, timedelta(seconds=usage.ru_utime + usage.ru_stime))


def _peak_mebibytes(check: str) -> float:
    command = [sys.executable, "-c", PEAK]
    done = subprocess.run(
        command, env=_environment(check), capture_output=True, text=True, check=True
    )
    return int(done.stdout.split()[-1]) / 1024


def _environment(check: str) -> dict[str, str]:
    return {**os.environ, "LLMKUBE_CHECK": check, "LLMKUBE_TERMINATION_LOG": os.devnull}


def _ms(runs: Sequence[Run]) -> float:
    return statistics.median(one.wall / timedelta(milliseconds=1) for one in runs)


def _cpu(runs: Sequence[Run]) -> float:
    return statistics.median(one.cpu / timedelta(milliseconds=1) for one in runs)
