"""Where the API server is and who we are: `load_access`.

The order is the ecosystem's: an explicit kubeconfig, then $KUBECONFIG, then the pod's own
ServiceAccount, then ~/.kube/config. Every failure is a `ConfigError` that says what to change.
A kubeconfig is read by `llmkube.kube.contexts`; this module reads a pod's files.
"""

from __future__ import annotations

import os
from pathlib import Path

from llmkube.kube.credentials import Access, Credential, ServerTrust
from llmkube.kube.errors import ConfigError

__all__ = ["Access", "load_access", "load_in_cluster"]

POD_FILES = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_KUBECONFIG = "~/.kube/config"


async def load_access(kubeconfig: Path | None = None, context: str | None = None) -> Access:
    """The access that flags and environment ask for. Raises ConfigError.

    `context` names a context of the kubeconfig; asking for one also rules out the pod's own
    account, which has none.
    """
    # Imported late: `llmkube --help` can spare the library behind it.
    from llmkube.kube.contexts import load_kubeconfig

    if kubeconfig is not None:
        return await load_kubeconfig(str(kubeconfig), context)
    if from_environment := os.environ.get("KUBECONFIG"):
        return await load_kubeconfig(from_environment, context)
    if context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
        return await load_in_cluster()
    if not _default_exists():
        raise ConfigError(
            "no cluster to talk to: give --kubeconfig FILE, set KUBECONFIG, or create "
            f"{DEFAULT_KUBECONFIG}"
        )
    return await load_kubeconfig(DEFAULT_KUBECONFIG, context)


async def load_in_cluster(files: Path = POD_FILES) -> Access:
    """The access of a pod's ServiceAccount, from the files mounted into it.

    Raises ConfigError when this is no pod, or one with `automountServiceAccountToken: false`.
    """
    from llmkube.kube.library import ConfigException, Configuration, InClusterConfigLoader

    token_file, ca_file, namespace_file = files / "token", files / "ca.crt", files / "namespace"
    configuration = Configuration()
    try:
        InClusterConfigLoader(
            token_filename=str(token_file),
            cert_filename=str(ca_file),
            try_refresh_token=False,  # the transport re-reads, and at once after a 401
        ).load_and_set(configuration)
        token = token_file.read_text().strip()
        ca_pem = ca_file.read_bytes()
        namespace = namespace_file.read_text().strip() if namespace_file.exists() else "default"
    except (ConfigException, OSError, ValueError) as error:
        raise ConfigError(
            f"the pod's ServiceAccount cannot be used ({error}): check that "
            f"automountServiceAccountToken is not false and that {files} is readable"
        ) from error
    if not token:
        raise ConfigError(f"{token_file} holds no token")
    return Access(
        server=str(configuration.host),
        namespace=namespace,
        origin="the pod's ServiceAccount",
        trust=ServerTrust(ca_pem),
        credential=Credential(authorization=f"Bearer {token}"),
        files=(token_file, ca_file),
        reload=lambda: load_in_cluster(files),
    )


def _default_exists() -> bool:
    return Path(DEFAULT_KUBECONFIG).expanduser().exists()
