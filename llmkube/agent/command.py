"""Ask the operating system by one of its own programs (macOS has no files to read instead)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from datetime import timedelta

MAX_OUTPUT_BYTES = 4 * 1024 * 1024


async def run_command(argv: Sequence[str], timeout: timedelta) -> str:
    """The standard output of a program. Raises OSError, TimeoutError, or ValueError (exit code).

    The program runs with the C locale, no standard input and a bounded output.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C", "HOME": os.devnull},
    )
    if process.stdout is None:
        raise ValueError("no output pipe")
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            output = await _read_bounded(process.stdout)
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code != 0:
        raise ValueError(f"exit code {code}")
    return output.decode("utf-8", "replace")


async def _read_bounded(stream: asyncio.StreamReader) -> bytes:
    output = bytearray()
    while chunk := await stream.read(65536):
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise ValueError(f"more than {MAX_OUTPUT_BYTES} bytes of output")
    return bytes(output)
