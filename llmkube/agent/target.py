"""Which MetalNode this machine is: from the flags, or else from the credential itself."""

from __future__ import annotations

from dataclasses import dataclass

from llmkube.api.names import METAL_ACCOUNT_PREFIX
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ConfigError
from llmkube.kube.renewal import read_claims


@dataclass(frozen=True, slots=True)
class Target:
    """Namespace and name of a MetalNode."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the flags say; None where they say nothing."""

    namespace: str | None = None
    name: str | None = None

    def target(self, access: Access) -> Target:
        """The MetalNode that flags and credential name together. Raises ConfigError.

        A credential made by `llmkube metal token create NAME` belongs to the account
        llmkube-metal-NAME, so it names its MetalNode by itself.
        """
        claims = read_claims((access.credential.authorization or "").removeprefix("Bearer "))
        account = claims.account if claims is not None else ""
        name = self.name
        if name is None and account.startswith(METAL_ACCOUNT_PREFIX):
            name = account.removeprefix(METAL_ACCOUNT_PREFIX)
        if not name:
            raise ConfigError(
                f"{access.origin}: this credential was not made by `llmkube metal token create`, "
                "so it does not say which MetalNode this machine is: give --name"
            )
        return Target(self.namespace or access.namespace, name)

    def describe(self, access: Access) -> str:
        """How the command line names the MetalNode: NAME -n NAMESPACE."""
        try:
            target = self.target(access)
        except ConfigError:
            return f"{self.name or 'NAME'} -n {self.namespace or access.namespace}"
        return f"{target.name} -n {target.namespace}"
