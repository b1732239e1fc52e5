"""Fixtures: one site for the whole run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import requirements, site
from e2e.images import Images
from e2e.kube import SYSTEM, Kube
from e2e.macs import NAMESPACE, TAILNET, Mac, drop_incoming, join

CONFIG = Path(__file__).resolve().parent.parent / "config" / "default"


@pytest.fixture(scope="session")
def images() -> Images:
    """The images that `python -m e2e` has built."""
    if problems := requirements.missing():
        pytest.skip("; ".join(problems))
    folder = os.environ.get("LLMKUBE_E2E_IMAGES")
    if not folder:
        pytest.skip("no images: run `make e2e`")
    return Images(Path(folder))


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


@pytest.fixture(scope="session")
def the_site(images: Images, runner: asyncio.Runner) -> Iterator[site.Site]:
    """Control plane, scheduler and node, with nothing of LLMKube installed."""
    starting = site.running(images)
    running = runner.run(starting.__aenter__())
    try:
        yield running
    finally:
        runner.run(starting.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def installed(the_site: site.Site, runner: asyncio.Runner) -> Kube:
    """LLMKube as a user installs it: `kubectl apply -k config/default`, and nothing else."""
    kube = Kube(the_site.cluster)
    runner.run(_install(kube))
    return kube


async def _install(kube: Kube) -> None:
    # Twice at most: kinds that the first call defines may not be served yet when it uses them.
    for _ in range(2):
        done = await kube.kubectl("apply", "--server-side", "-k", str(CONFIG), check=False)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    await kube.wait("deployment/llmkube-controller", "condition=Available", SYSTEM)


# The Macs that several proofs look at ------------------------------------------------------------
@pytest.fixture(scope="session")
def namespace(installed: Kube, runner: asyncio.Runner) -> str:
    """Where the Macs live: restricted, as a careful admin has it."""
    metadata = {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}
    document = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    runner.run(installed.apply(document))
    return NAMESPACE


@pytest.fixture(scope="session")
def studio(the_site: site.Site, namespace: str, runner: asyncio.Runner) -> Mac:
    """An ordinary Mac."""
    return runner.run(join(the_site, "studio", namespace))


@pytest.fixture(scope="session")
def laptop(the_site: site.Site, namespace: str, runner: asyncio.Runner) -> Mac:
    """A Mac in a tailnet that the pod network does not reach, and on a LAN that it does."""
    return runner.run(join(the_site, "laptop", namespace, tailnet=TAILNET))


@pytest.fixture(scope="session")
def hidden(the_site: site.Site, namespace: str, runner: asyncio.Runner) -> Mac:
    """A Mac behind a firewall that drops what comes in."""
    mac = runner.run(join(the_site, "hidden", namespace))
    drop_incoming(mac)
    return mac
