"""A process that contends for a Lease and, while it leads, writes its name into a ConfigMap.

Run as `python -m tests.support.contender KUBECONFIG NAMESPACE NAME`. It prints what happens to it,
one word a line: `leading`, `wrote`, `refused` (the gate), `lost`. The writes carry the
resourceVersion that they are based on, as all of LLMKube's do.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

from llmkube.clock import SystemClock
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access
from llmkube.kube.errors import ApiError, NotLeader
from llmkube.kube.resources import CONFIGMAPS
from llmkube.leader import LeaderElector, LeaderSettings

LEASE = "contended"
RECORD = "record"
SETTINGS = LeaderSettings(
    lease_duration=timedelta(seconds=5),
    renew_deadline=timedelta(seconds=3),
    retry_period=timedelta(milliseconds=300),
)


def say(word: str) -> None:
    print(word, flush=True)


async def work(client: KubeClient, namespace: str, name: str) -> None:
    """Write without a pause, so that whatever moment the process is stopped at is a bad one."""
    say("leading")
    try:
        while True:
            try:
                record = await client.get(CONFIGMAPS, RECORD, namespace)
                await client.update(CONFIGMAPS, {**record, "data": {"writer": name}})
                say("wrote")
            except NotLeader:
                say("refused")
                await asyncio.sleep(0.02)
            except ApiError:
                await asyncio.sleep(0.02)
    finally:
        say("lost")


async def main(kubeconfig: str, namespace: str, name: str) -> None:
    clock = SystemClock()
    async with KubeClient(await load_access(Path(kubeconfig)), clock=clock) as client:
        elector = LeaderElector(
            client, clock, namespace=namespace, name=LEASE, identity=name, settings=SETTINGS
        )
        client.write_gate = elector.check_can_write
        await elector.run(lambda: work(client, namespace, name))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
