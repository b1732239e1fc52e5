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
_QUICK = """
import sys
import llmkube.kube.contexts
assert "aiohttp" not in sys.modules
assert "urllib3" not in sys.modules
"""
_OPENID = """
from llmkube.kube import library
requestor = library._kubeconfig.OpenIDRequestor("id", "secret", "https://issuer.example")
assert type(requestor).__module__ == "kubernetes_asyncio.config.openid"
catches = requestor.refresh_token.__func__.__globals__["ConfigException"]
assert catches is library.ConfigException
"""
_BASIC = """
from llmkube.kube.library import Configuration
configuration = Configuration()
configuration.username, configuration.password = "ada", "secret"
assert configuration.get_basic_auth_token() == "Basic YWRhOnNlY3JldA=="
"""


def test_what_is_hardly_ever_used_is_not_imported() -> None:
    _run(_QUICK)


def test_openid_tokens_are_refreshed_by_the_library_all_the_same() -> None:
    _run(_OPENID)


def test_basic_authentication_is_encoded_by_urllib3_all_the_same() -> None:
    _run(_BASIC)


def test_none_of_the_models_is_imported() -> None:
    _run(_SLIM)


def test_whoever_imports_the_whole_library_gets_it() -> None:
    _run(_WHOLE)


def test_whoever_had_the_whole_library_keeps_it() -> None:
    _run(_WHOLE_FIRST)


def _run(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)
