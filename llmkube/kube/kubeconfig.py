"""Writing kubeconfig files that hold a secret: whole or not at all, and for the owner's eyes only.

A file is written beside its place with mode 0600, flushed to the disk and renamed, so that a full
disk or a power cut leaves the old one. Nothing is written *through* a symbolic link. Reading is
`llmkube.kube.contexts`; renewing the token in a file is `llmkube.kube.renewal`.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import yaml

from llmkube.kube.errors import ConfigError
from llmkube.kube.filesignature import FileSignature, file_signature

_TEMPLATE = """\
# A credential of LLMKube. Keep it secret.
apiVersion: v1
kind: Config
clusters:
- name: {cluster}
  cluster:
    server: {server}
    certificate-authority-data: {ca}
contexts:
- name: {user}
  context:
    cluster: {cluster}
    namespace: {namespace}
    user: {user}
current-context: {user}
users:
- name: {user}
  user:
    token: {token}
"""


def render_kubeconfig(
    *, server: str, ca_pem: bytes | None, namespace: str, user: str, token: str
) -> str:
    """A kubeconfig with one context, its CA embedded. `ca_pem` None: the system's authorities."""
    parts = {
        "cluster": "llmkube",
        "server": server,
        "namespace": namespace,
        "user": user,
        "token": token,
    }
    quoted = {key: _quoted(value) for key, value in parts.items()}
    if ca_pem is None:
        return _TEMPLATE.replace("    certificate-authority-data: {ca}\n", "").format(**quoted)
    return _TEMPLATE.format(ca=base64.b64encode(ca_pem).decode(), **quoted)


def _quoted(value: str) -> str:
    """A YAML string: a JSON one, but for JSON's surrogate pairs, which YAML does not know."""
    return json.dumps(value, ensure_ascii=False)


def write_kubeconfig(
    path: Path, *, server: str, ca_pem: bytes | None, namespace: str, user: str, token: str
) -> None:
    """Write a new kubeconfig, replacing what is at `path` (a symbolic link itself, not its
    target). Raises OSError; the old file is then untouched."""
    text = render_kubeconfig(
        server=server, ca_pem=ca_pem, namespace=namespace, user=user, token=token
    )
    write_private(path, text.encode())


def replace_token(path: Path, token: str, *, replacing: str | None = None) -> None:
    """Put a new token in place of the current context's, leaving every other byte as it is.

    `path` may be a link to the file. With `replacing`, the file must still hold that token: a
    file that someone has meanwhile replaced is left alone. Raises ConfigError if there is no such
    token to replace, OSError if the file cannot be written; the old file is then untouched.
    """
    real = path.resolve()
    try:
        read = file_signature(real)
        text = real.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    start, end, old = _find_token(text, path)
    if replacing is not None and old != replacing:
        raise ConfigError(f"{path}: holds another token by now, which is kept")
    changed = text[:start] + _quoted(token) + text[end:]
    if _find_token(changed, path)[2] != token:
        raise ConfigError(f"{path}: the token cannot be replaced; write it as a plain string")
    write_private(real, changed.encode(), renews=read)


def current_token(path: Path) -> str:
    """The token of the file's current context. Raises ConfigError."""
    try:
        return _find_token(path.read_bytes().decode(), path)[2]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _find_token(text: str, path: Path) -> tuple[int, int, str]:
    """Where the current context's token stands in the text, and what it is."""
    try:
        root = yaml.compose(text, yaml.SafeLoader)
        context = _named(_child(root, "contexts"), _scalar(_child(root, "current-context")))
        name = _scalar(_child(_child(context, "context"), "user"))
        node = _child(_child(_named(_child(root, "users"), name), "user"), "token")
        token = _scalar(node)
    except (yaml.YAMLError, LookupError, RecursionError):
        raise ConfigError(
            f"{path}: its current context has no user with a token of its own"
        ) from None
    return node.start_mark.index, node.end_mark.index, token


def _child(node: yaml.Node | None, key: str) -> yaml.Node:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == key:
                return value  # type: ignore[no-any-return]
    raise LookupError(key)


def _named(node: yaml.Node, name: str) -> yaml.Node:
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            if _scalar(_child(entry, "name")) == name:
                return entry  # type: ignore[no-any-return]
    raise LookupError(name)


def _scalar(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    raise LookupError(node.tag)


def write_private(path: Path, content: bytes, *, renews: FileSignature | None = None) -> None:
    """Write a file with mode 0600, whole or not at all. Raises OSError.

    `renews` is the file that `content` was made from: its owner is kept, and if another one has
    taken its place meanwhile, ConfigError is raised, and that one stays.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:  # mkstemp made it 0600
            if renews is not None:
                _keep_owner(descriptor, path)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        if renews is not None and file_signature(path) != renews:
            raise ConfigError(f"{path}: was replaced or removed just now, and is kept so")
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def _keep_owner(descriptor: int, path: Path) -> None:
    """A file that root renews for a service's own user must stay readable to that user."""
    with suppress(OSError):
        found = path.lstat()
        os.fchown(descriptor, found.st_uid, found.st_gid)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut; some filesystems cannot, which is no failure."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
