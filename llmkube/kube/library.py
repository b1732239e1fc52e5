"""kubernetes_asyncio's configuration, without its generated API client.

The library's packages import 700 generated models when any part of them is imported: 37 MB and
half a second that a controller with a memory budget, an agent on a Mac and every call of the
command line would pay for classes that none of them uses. The configuration needs one small class
of the client. So while it is imported, the two packages around it are bare shells with the same
path; afterwards they are taken away, and whoever imports the whole library gets the whole library.

Two more modules stand in for what is hardly ever used and costs 150 ms of each start: urllib3 (for
basic authentication), and the refreshing of OpenID tokens with its aiohttp. Both import the real
thing when they are asked for it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

_LIBRARY = "kubernetes_asyncio"
_CLIENT = f"{_LIBRARY}.client"
_OPENID = f"{_LIBRARY}.config.openid"
_EXCEPTION = f"{_LIBRARY}.config.config_exception"
_URLLIB3 = "urllib3"


@contextmanager
def _without_models() -> Iterator[None]:
    """Import parts of the library inside the block, and leave no trace of the shells."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{_LIBRARY} is not installed")
    root = spec.submodule_search_locations[0]
    before = {name: module for name, module in sys.modules.items() if _is_part(name)}
    _forget()
    shell, client, openid = ModuleType(_LIBRARY), ModuleType(_CLIENT), ModuleType(_OPENID)
    shell.__path__, client.__path__ = [root], [f"{root}/client"]
    vars(openid).update(OpenIDRequestor=_open_id_requestor)
    sys.modules.update({_LIBRARY: shell, _CLIENT: client, _OPENID: openid})
    sys.modules.setdefault(_URLLIB3, _Deferred(_URLLIB3))
    try:
        configuration = import_module(f"{_CLIENT}.configuration")
        vars(client).update(Configuration=configuration.Configuration, ApiClient=object)
        yield
    finally:
        _forget()
        sys.modules.update(before)


def _is_part(name: str) -> bool:
    return name == _LIBRARY or name.startswith(f"{_LIBRARY}.")


def _forget() -> None:
    for name in [name for name in sys.modules if _is_part(name)]:
        del sys.modules[name]
    if isinstance(sys.modules.get(_URLLIB3), _Deferred):
        del sys.modules[_URLLIB3]


class _Deferred(ModuleType):
    """Stands for a module that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def _open_id_requestor(*args: Any, **options: Any) -> Any:
    """The library's OpenIDRequestor, which raises the ConfigException that we know."""
    with _without_models():
        del sys.modules[_OPENID]
        sys.modules[_EXCEPTION] = _exception
        return import_module(_OPENID).OpenIDRequestor(*args, **options)


with _without_models():
    Configuration: Any = import_module(f"{_CLIENT}.configuration").Configuration
    _exception = import_module(_EXCEPTION)
    _incluster = import_module(f"{_LIBRARY}.config.incluster_config")
    _kubeconfig = import_module(f"{_LIBRARY}.config.kube_config")
    _exec = import_module(f"{_LIBRARY}.config.exec_provider")

ConfigException: Any = _exception.ConfigException
InClusterConfigLoader: Any = _incluster.InClusterConfigLoader
KubeConfigLoader: Any = _kubeconfig.KubeConfigLoader
KubeConfigMerger: Any = _kubeconfig.KubeConfigMerger
ExecProvider: Any = _exec.ExecProvider
ConfigNode: Any = _kubeconfig.ConfigNode
