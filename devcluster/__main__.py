"""`python -m devcluster`: a bare local control plane until Ctrl-C, for trying things by hand."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from devcluster.controlplane import ControlPlane


async def main() -> None:
    """Start it, say how to reach it, and wait for SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ControlPlane.start() as cluster:
        print(f"export KUBECONFIG={cluster.admin_kubeconfig}", flush=True)
        print("No nodes: pods stay Pending. Ctrl-C stops and removes everything.", flush=True)
        await stop.wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
