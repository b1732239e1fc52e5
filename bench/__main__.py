"""`python -m bench [PART…]`: measure, print a table, write JSON. The parts are in PARTS."""

from __future__ import annotations

import argparse
import asyncio
import compileall
import os
import platform
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import llmkube
from bench import engine, hub, macs, report, simulation, verifications, verifier
from bench.report import Figure
from devcluster.controlplane import ControlPlane
from tests.conftest import install_crds, open_client

PARTS = ("hub", "macs", "verifications", "engine", "simulation", "verifier")


async def measure(
    parts: Sequence[str], sizes: Sequence[int], seconds: float, only: Sequence[str]
) -> list[Figure]:
    """All asked-for parts that need the real world once, on one control plane."""
    figures: list[Figure] = await asyncio.to_thread(verifier.run) if "verifier" in parts else []
    if not set(parts) - {"verifier", "simulation"}:
        return figures
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(ControlPlane.start())
        await install_crds(cluster)
        client = await open_client(stack, cluster.admin_kubeconfig)
        if "hub" in parts:
            for size in sizes:
                hub_plan = hub.Plan(sites=size, seconds=seconds)
                figures += await hub.run(cluster, client, hub_plan, only)
        if "macs" in parts:
            for size in sizes:
                rate = max(200.0, size / macs.BEAT_SECONDS)
                mac_plan = macs.Plan(macs=size, rate=rate, seconds=max(seconds, 60.0))
                figures += await macs.run(cluster, client, mac_plan, only)
        if "verifications" in parts:
            figures += await verifications.run(cluster, client, verifications.Plan())
        if "engine" in parts:
            figures += await engine.run(cluster, client, engine.Plan(seconds=seconds))
    return figures


def compile_package() -> None:
    """Compile llmkube, as installed packages and images are: a checkout may not be, and with
    PYTHONDONTWRITEBYTECODE in the environment it never is."""
    compileall.compile_dir(Path(llmkube.__file__).parent, quiet=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2000], help="objects")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each load")
    parser.add_argument("--runs", type=int, default=1, help="medians are taken over so many runs")
    parser.add_argument("--only", nargs="+", default=[], help="subjects of hub and macs; or all")
    parser.add_argument(
        "--simulated-macs", type=int, default=100_000, help="Macs of the simulation (100,000)"
    )
    options = parser.parse_args()
    parts = options.parts or PARTS
    compile_package()
    runs = [
        asyncio.run(measure(parts, options.sizes, options.seconds, options.only))
        for _ in range(options.runs)
    ]
    figures = report.median_of(runs)
    figures += report.growth(figures)
    if "simulation" in parts:  # the same in every run, and on an event loop of its own
        figures += simulation.run(simulation.Plan(macs=options.simulated_macs))
    environment = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
        "runs": str(options.runs),
    }
    path = report.show(figures, environment)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
