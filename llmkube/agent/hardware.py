"""The hardware behind the ingress: chip, GPU cores, memory, Metal version.

Pure functions over recorded output (`sysctl` and `system_profiler` on macOS, /proc on Linux), and
`read_capacity`, which fetches that output. What cannot be found out is left out of the report,
never guessed; every text is capped and stripped as the report's contract asks.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from llmkube.agent.command import run_command
from llmkube.api.report import ReportedCapacity
from llmkube.log import get_logger

SYSCTL: Final = ("/usr/sbin/sysctl", "machdep.cpu.brand_string", "hw.memsize")
DISPLAYS: Final = ("/usr/sbin/system_profiler", "-json", "SPDisplaysDataType")
SYSCTL_TIMEOUT: Final = timedelta(seconds=10)
PROFILER_TIMEOUT: Final = timedelta(minutes=1)  # it takes seconds, more right after login

MAX_CHIP: Final = 128
MAX_METAL_VERSION: Final = 32
MAX_GPU_CORES: Final = 2**31 - 1
MAX_MEMORY_BYTES: Final = 2**63 - 1

log = get_logger(__name__)


async def read_capacity() -> ReportedCapacity:
    """This machine's hardware, as far as it tells."""
    if sys.platform == "darwin":
        sysctl = await _ask(SYSCTL, SYSCTL_TIMEOUT)
        return parse_macos(sysctl, await _ask(DISPLAYS, PROFILER_TIMEOUT))
    return await asyncio.to_thread(_read_linux)


async def _ask(argv: tuple[str, ...], timeout: timedelta) -> str:
    try:
        return await run_command(argv, timeout)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("part of the hardware is not reported", program=argv[0], error=str(error))
        return ""


def parse_macos(sysctl: str, displays: str) -> ReportedCapacity:
    """Read the output of SYSCTL and DISPLAYS; either may be empty or damaged."""
    values = dict(re.findall(r"^([\w.]+): (.*)$", sysctl, re.MULTILINE))
    gpu = _pick_gpu(displays)
    return ReportedCapacity(
        chip=_text(values.get("machdep.cpu.brand_string"), MAX_CHIP),
        gpu_cores=_count(gpu.get("sppci_cores"), MAX_GPU_CORES),
        memory_bytes=_count(values.get("hw.memsize"), MAX_MEMORY_BYTES),
        metal_version=_metal_version(gpu),
    )


def _pick_gpu(displays: str) -> dict[str, Any]:
    """The GPU that serves: the one with a core count (Apple's), else the first."""
    try:
        document = json.loads(displays)
    except (ValueError, RecursionError):
        return {}
    entries = document.get("SPDisplaysDataType") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        return {}
    gpus = [entry for entry in entries if isinstance(entry, dict)]
    return next((gpu for gpu in gpus if "sppci_cores" in gpu), gpus[0] if gpus else {})


def _metal_version(gpu: dict[str, Any]) -> str | None:
    """`spdisplays_metal4` is Metal 4; macOS before 13 tells a GPU family instead of a version."""
    raw = gpu.get("spdisplays_mtlgpufamilysupport") or gpu.get("spdisplays_metal")
    if not isinstance(raw, str):
        return None
    if found := re.fullmatch(r"spdisplays_metal(\d{1,3})", raw):
        return f"Metal {found.group(1)}"
    if found := re.fullmatch(r"spdisplays_mtlgpufamilyapple(\d{1,3})", raw):
        return f"Metal, Apple family {found.group(1)}"
    return "Metal" if raw == "spdisplays_supported" else None


def _read_linux() -> ReportedCapacity:
    model = _slurp("/proc/device-tree/model") or _slurp("/sys/class/dmi/id/product_name")
    return parse_linux(_slurp("/proc/cpuinfo"), _slurp("/proc/meminfo"), model)


def _slurp(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(1024 * 1024).decode("utf-8", "replace")
    except OSError:
        return ""


def parse_linux(cpuinfo: str, meminfo: str, model: str = "") -> ReportedCapacity:
    """Read /proc/cpuinfo and /proc/meminfo; `model` names the board where the CPU has no name."""
    names = re.findall(r"^(?:model name|Hardware)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d{1,15}) kB$", meminfo, re.MULTILINE)
    return ReportedCapacity(
        chip=_text(names[0] if names else model, MAX_CHIP),
        memory_bytes=int(memory.group(1)) * 1024 if memory else None,
    )


def _text(raw: object, limit: int) -> str | None:
    if not isinstance(raw, str):
        return None
    printable = "".join(char if char.isprintable() else " " for char in raw)
    return " ".join(printable.split())[:limit].rstrip() or None


def _count(raw: object, limit: int) -> int | None:
    if not isinstance(raw, str) or not re.fullmatch(r"[0-9]{1,19}", raw.strip()):
        return None
    value = int(raw)
    return value if 0 < value <= limit else None
