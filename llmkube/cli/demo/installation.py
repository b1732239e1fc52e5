"""The cluster that the demo plays in: a local control plane, or one that exists already."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkube.api.names import COMPONENT_LABEL, VERIFIER_COMMAND, VERIFIER_COMPONENT
from llmkube.cli.errors import CliError
from llmkube.kube.config import load_access

if TYPE_CHECKING:
    from devcluster.controlplane import ControlPlane

INSTALLED = ("namespace", "crd", "rbac", "admission")
"""What `kubectl apply -k config/default` installs, but for the Deployment: the demo runs the
controller in front of you."""
TOKEN_LIFE = "24h"  # noqa: S105 - a duration


def checkout() -> Path:
    """The root of the checkout. Raises CliError where there is none."""
    try:
        import devcluster
    except ImportError as error:
        raise CliError(
            "the demo runs from a checkout of the project: clone it and run `make demo` there"
        ) from error
    return Path(devcluster.__file__).resolve().parent.parent


def _only_verifiers(pod: Mapping[str, Any]) -> str | None:
    """This machine is no node: it starts nothing but verifiers, which send no byte."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(COMPONENT_LABEL) == VERIFIER_COMPONENT:
        command = pod["spec"]["containers"][0].get("command")
        if command == list(VERIFIER_COMMAND):
            return None
    return "The demo runs verifier pods only: it has no nodes for others."


@dataclass(slots=True)
class Installation:
    """A cluster with our manifests. `local` is None if it is not ours to stop."""

    folder: Path
    kubeconfig: Path
    context: str | None
    local: ControlPlane | None

    @staticmethod
    @asynccontextmanager
    async def open(
        folder: Path,
        kubeconfig: Path | None,
        *,
        context: str | None,
        audit_log: Path | None,
    ) -> AsyncIterator[Installation]:
        """The existing cluster, or a control plane and a kubelet stand-in while the block runs.

        Raises ConfigError for a kubeconfig that cannot be used.
        """
        checkout()
        if kubeconfig is not None:
            await load_access(kubeconfig, context)
            yield Installation(folder, kubeconfig, context, None)
            return
        from devcluster.controlplane import ControlPlane, Options
        from devcluster.kubelet import Kubelet

        async with AsyncExitStack() as stack:
            options = Options(audit=audit_log is not None)
            cluster = await stack.enter_async_context(ControlPlane.start(options))
            kubelet = Kubelet.start(cluster.admin_kubeconfig, refuses=_only_verifiers)
            await stack.enter_async_context(kubelet)
            yield Installation(folder, cluster.admin_kubeconfig, None, cluster)
            if audit_log is not None:
                shutil.copyfile(cluster.audit_log, audit_log)

    async def install(self) -> None:
        """Apply the manifests and wait until both kinds are served."""
        config = checkout() / "config"
        for part in INSTALLED:
            await self.kubectl("apply", "--server-side", "-k", str(config / part))
        await self.kubectl(
            "wait", "--for=condition=Established", "--timeout=60s", "-f", str(config / "crd/bases")
        )
        edge = str(config / "edge" / "rbac.yaml")
        await self.kubectl("apply", "--server-side", "-n", "llmkube-system", "-f", edge)

    async def account_kubeconfig(self, namespace: str, account: str) -> Path:
        """A kubeconfig of that ServiceAccount, in the demo's own folder."""
        from devcluster import kubectl

        return await kubectl.account_kubeconfig(
            self.kubeconfig,
            namespace,
            account,
            folder=self.folder,
            life=TOKEN_LIFE,
            context=self.context,
        )

    async def kubectl(self, *args: str) -> str:
        """Run kubectl as admin; returns what it prints. Raises ProcessFailed."""
        from devcluster import kubectl

        return (await kubectl.run(self.kubeconfig, *args, context=self.context)).stdout
