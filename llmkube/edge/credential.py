"""The datacenter's credential where it may be written: the file itself, or a working copy.

The edge renews its token in the file. A Secret that is mounted into a pod is read-only, so there
the edge works on a copy in a folder that outlives the pod. Whenever the original changes (the
admin rotated the credential) it replaces the copy. Neighbour: `llmkube.kube.renewal`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from llmkube.kube.errors import ConfigError
from llmkube.kube.filesignature import FileSignature, file_signature
from llmkube.kube.kubeconfig import write_private
from llmkube.log import get_logger

log = get_logger(__name__)


@dataclass(slots=True)
class WorkingCopy:
    """A copy of `source` in `folder`. Which original it came from is remembered beside it."""

    source: Path
    folder: Path
    _seen: FileSignature | None = None

    @property
    def path(self) -> Path:
        """The file to use, and to renew the token in."""
        return self.folder / "kubeconfig"

    @property
    def _marker(self) -> Path:
        return self.folder / "kubeconfig.origin"

    def refresh(self) -> bool:
        """Take the original over if it is another one than last time; True if so.

        Raises ConfigError if neither an original nor a copy can be used.
        """
        try:
            signature = file_signature(self.source)
            if signature == self._seen:
                return False
            content = self.source.read_bytes()
            adopted = self._adopt(content)
        except OSError as error:
            if self.path.exists():
                return False  # the copy is as good; the original may come back
            raise ConfigError(f"{error.filename or self.source}: {error.strerror}") from error
        self._seen = signature
        return adopted

    def _adopt(self, content: bytes) -> bool:
        origin = hashlib.sha256(content).hexdigest()
        if self.path.exists() and self._marker.exists() and self._marker.read_text() == origin:
            return False
        write_private(self.path, content)
        write_private(self._marker, origin.encode())
        log.info("took over the credential", source=str(self.source), copy=str(self.path))
        return True
