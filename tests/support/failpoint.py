"""The real controller, with a crash built in: `python -m tests.support.failpoint controller …`.

It is killed by SIGKILL right after its N-th write about MetalNodes or pods has been answered; N is
in the environment variable KILL_AFTER_WRITE. Nothing of it is in the product.
"""

from __future__ import annotations

import os
import signal

from llmkube.cli.main import main
from llmkube.kube import client as kube

KILL_AFTER_WRITE = "LLMKUBE_TEST_KILL_AFTER_WRITE"


def install(limit: int) -> None:
    """Crash after that many writes."""
    send = kube.KubeClient._send
    done = 0

    async def send_and_maybe_die(self: kube.KubeClient, call: kube.Call) -> bytes:
        nonlocal done
        answer = await send(self, call)
        if "/metalnodes/" in call.target or "/pods" in call.target:
            done += 1
            if done == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return answer

    kube.KubeClient._send = send_and_maybe_die  # type: ignore[method-assign]


if __name__ == "__main__":
    install(int(os.environ[KILL_AFTER_WRITE]))
    main()
