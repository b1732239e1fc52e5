"""The library's configuration comes without its models, and without harm to the library."""

from __future__ import annotations

import subprocess
import sys

_SLIM = """
import sys
import llmkube.kube.contexts
assert not [name for name in sys.modules if name.startswith("kubernetes_asyncio")]
"""
_WHOLE = """
import llmkube.kube.contexts
import kubernetes_asyncio
from kubernetes_asyncio import client, config
assert client.V1Pod(kind="Pod").kind == "Pod"
assert config.kube_config.ApiClient is client.ApiClient
"""
_WHOLE_FIRST = """
import kubernetes_asyncio
before = kubernetes_asyncio.client
import llmkube.kube.contexts
import kubernetes_asyncio.client
assert kubernetes_asyncio.client is before
"""


def test_none_of_the_models_is_imported() -> None:
    _run(_SLIM)


def test_whoever_imports_the_whole_library_gets_it() -> None:
    _run(_WHOLE)


def test_whoever_had_the_whole_library_keeps_it() -> None:
    _run(_WHOLE_FIRST)


def _run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)
