"""The library's configuration comes without its models, and without harm to the library."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_SLIM, id="none of the models is imported"),
        pytest.param(_QUICK, id="what is hardly ever used is not imported"),
        pytest.param(_OPENID, id="the library refreshes OpenID tokens all the same"),
        pytest.param(_BASIC, id="urllib3 encodes basic authentication all the same"),
        pytest.param(_WHOLE, id="whoever imports the whole library gets it"),
        pytest.param(_WHOLE_FIRST, id="whoever had the whole library keeps it"),
    ],
)
def test_in_a_fresh_interpreter(script: str) -> None:
    subprocess.run([sys.executable, "-c", script], check=True)
