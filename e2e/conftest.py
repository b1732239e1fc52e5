"""Fixtures: one site for the whole run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e import requirements, site
from e2e.images import Images


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
