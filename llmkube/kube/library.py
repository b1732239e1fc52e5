"""kubernetes_asyncio's configuration, without its generated API client.

The library's packages import 700 generated models when any part of them is imported: 37 MB and
half a second that a controller with a memory budget, an agent on a Mac and every call of the
command line would pay for classes that none of them uses. The configuration needs one small class
of the client. So while it is imported, the two packages around it are bare shells with the same
path; afterwards they are taken away, and whoever imports the whole library gets the whole library.
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


@contextmanager
def _without_models() -> Iterator[None]:
    """Import parts of the library inside the block, and leave no trace of the shells."""
    spec = importlib.util.find_spec(_LIBRARY)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{_LIBRARY} is not installed")
    root = spec.submodule_search_locations[0]
    before = {name: module for name, module in sys.modules.items() if _is_part(name)}
    _forget()
    shell, client = ModuleType(_LIBRARY), ModuleType(_CLIENT)
    shell.__path__, client.__path__ = [root], [f"{root}/client"]
    sys.modules.update({_LIBRARY: shell, _CLIENT: client})
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


with _without_models():
    Configuration: Any = import_module(f"{_CLIENT}.configuration").Configuration
    ConfigException: Any = import_module(f"{_LIBRARY}.config.config_exception").ConfigException
    _incluster = import_module(f"{_LIBRARY}.config.incluster_config")
    _kubeconfig = import_module(f"{_LIBRARY}.config.kube_config")
    _exec = import_module(f"{_LIBRARY}.config.exec_provider")

InClusterConfigLoader: Any = _incluster.InClusterConfigLoader
KubeConfigLoader: Any = _kubeconfig.KubeConfigLoader
KubeConfigMerger: Any = _kubeconfig.KubeConfigMerger
ExecProvider: Any = _exec.ExecProvider
ConfigNode: Any = _kubeconfig.ConfigNode
