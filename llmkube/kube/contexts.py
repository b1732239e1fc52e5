"""Reading kubeconfig files: from context to `Access`.

kubernetes_asyncio merges the files, runs exec plugins and refreshes the legacy auth providers.
What it picks is then read here, strictly, because its own loader leaves certificates in temporary
files, takes garbage for base64, stops at an empty `certificate-authority-data`, goes on
anonymously when an exec plugin fails, and quotes whole users, tokens included, in its messages.
Precedence follows client-go. Messages name keys and files, never values.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import yaml

from llmkube.kube.credentials import Access, ClientCertificate, Credential, ServerTrust
from llmkube.kube.errors import ConfigError
from llmkube.kube.execplugin import run_exec_plugin
from llmkube.kube.library import (
    ConfigException,
    Configuration,
    KubeConfigLoader,
    KubeConfigMerger,
)

AUTH_PROVIDER_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Section:
    """One mapping of a kubeconfig, with the file it came from and its name for messages."""

    title: str
    values: Mapping[str, Any]
    file: Path

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.file}: {self.title}: {problem}")

    def text(self, key: str) -> str | None:
        """The string under `key`; None if it is absent or empty."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{key} must be a string")
        return value.strip() or None if value is not None else None

    def flag(self, key: str) -> bool:
        value = self.values.get(key) or False
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false")
        return value

    def mapping(self, key: str) -> Section | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"{key} must be a mapping")
        return Section(f"{self.title}, {key}", value, self.file) if value else None

    def path(self, key: str) -> Path | None:
        """A file named by the kubeconfig, relative to the kubeconfig's own folder."""
        value = self.text(key)
        return self.file.parent / Path(value).expanduser() if value else None

    def content(self, key: str) -> bytes | None:
        """`KEY-data`, decoded, or else the content of the file that `KEY` names."""
        if encoded := self.text(f"{key}-data"):
            try:
                return base64.b64decode("".join(encoded.split()), validate=True)
            except (binascii.Error, ValueError) as error:
                raise self.error(f"{key}-data is not valid base64") from error
        path = self.path(key)
        return self.read(key, path) if path else None

    def read(self, key: str, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.error(f"{key}: cannot read {path} ({error.strerror})") from error


async def load_kubeconfig(paths: str, context: str | None = None) -> Access:
    """The access of a context, the current one unless named. Raises ConfigError.

    `paths` is one file, or several joined as in $KUBECONFIG; earlier files win.
    """
    merged, files = _merge(paths)
    chosen = _pick(merged, "contexts", "context", _context_name(merged, context, files), files)
    cluster = _pick(merged, "clusters", "cluster", chosen.text("cluster"), files)
    user_name = chosen.text("user")
    user = _pick(merged, "users", "user", user_name, files) if user_name else None
    origin = f"{chosen.file}, {chosen.title}"
    server = _server(cluster)
    trust = _trust(cluster)
    credential, credential_files = await _credential(user, cluster) if user else (Credential(), [])
    named = [cluster.path("certificate-authority"), *credential_files]
    return Access(
        server=server,
        namespace=chosen.text("namespace") or "default",
        origin=origin,
        trust=trust,
        credential=credential,
        files=(*files, *(path for path in named if path)),
        reload=lambda: load_kubeconfig(paths, context),
        proxy=_proxy(cluster, server),
    )


def _merge(paths: str) -> tuple[Mapping[str, Any], list[Path]]:
    files = [Path(part).expanduser() for part in paths.split(os.pathsep) if part]
    present = [file.absolute() for file in files if file.exists()]
    if not present:
        raise ConfigError(f"no such kubeconfig: {paths}")
    chosen = [_check_shape(file).get("current-context") for file in present]
    node = KubeConfigMerger(os.pathsep.join(map(str, present))).config
    merged = node.value if node is not None else {}
    # As for kubectl, the first file that sets it wins; for the library it is the last.
    return {**merged, "current-context": next(filter(None, chosen), None)}, present


def _check_shape(file: Path) -> Mapping[str, Any]:
    """The file's content. The library trusts its shape, so that is settled before."""
    try:
        document = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" near line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{file}: is not valid YAML{where}") from None  # it quotes the line
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: is not a kubeconfig (it is empty or not a mapping)")
    for key, item in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
        entries = document.get(key) or []
        if not isinstance(entries, list) or not all(_is_entry(entry, item) for entry in entries):
            raise ConfigError(f"{file}: {key} must be a list of entries with name and {item}")
    return document


def _is_entry(entry: Any, item: str) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get(item) or {}, dict)
    )


def _context_name(merged: Mapping[str, Any], wanted: str | None, files: list[Path]) -> str:
    name = wanted or merged.get("current-context")
    if name and isinstance(name, str):
        return name
    raise ConfigError(
        f"{_join(files)}: no current-context is set: choose one with --context or "
        "`kubectl config use-context NAME`"
    )


def _pick(
    merged: Mapping[str, Any], plural: str, item: str, name: str | None, files: list[Path]
) -> Section:
    names = []
    for node in merged.get(plural) or []:
        if node.value["name"] == name:
            values = node.value.get(item) or {}
            return Section(f"{item} {name!r}", values, Path(node.path))
        names.append(node.value["name"])
    known = ", ".join(sorted(names)) or "none"
    raise ConfigError(f"{_join(files)}: there is no {item} named {name!r} (there are: {known})")


def _join(files: list[Path]) -> str:
    return os.pathsep.join(map(str, files))


def _server(cluster: Section) -> str:
    server = cluster.text("server")
    if not server:
        raise cluster.error("server is missing: set the URL of the API server")
    try:
        parts = urlsplit(server)
        valid = parts.scheme in ("https", "http") and parts.hostname and (parts.port or True)
    except ValueError:
        valid = False
    if not valid or parts.username or parts.query or parts.fragment:
        raise cluster.error("server must be a URL like https://HOST:PORT")
    return server.rstrip("/")


def _trust(cluster: Section) -> ServerTrust:
    verify = not cluster.flag("insecure-skip-tls-verify")
    ca_pem = cluster.content("certificate-authority")
    if not verify and ca_pem:
        raise cluster.error(
            "certificate-authority and insecure-skip-tls-verify exclude each other: "
            "remove insecure-skip-tls-verify"
        )
    return ServerTrust(ca_pem, cluster.text("tls-server-name"), verify)


def _proxy(cluster: Section, server: str) -> str | None:
    """`proxy-url`, or what HTTPS_PROXY and NO_PROXY say; read once, not at each request."""
    parts = urlsplit(server)
    proxy = cluster.text("proxy-url")
    if proxy is None and not is_loopback(parts.hostname or "") and not proxy_bypass(parts.netloc):
        proxy = getproxies().get(parts.scheme)
    if proxy and not (proxy.startswith("http://") and urlsplit(proxy).hostname):
        raise cluster.error("only proxies of the form http://HOST:PORT are supported")
    return proxy


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


async def _credential(user: Section, cluster: Section) -> tuple[Credential, list[Path | None]]:
    """The user's credential, and the files it was read from."""
    if any(user.values.get(key) for key in ("as", "as-uid", "as-groups", "as-user-extra")):
        raise user.error("impersonation (as, as-groups) is not supported: use another context")
    certificate = _client_certificate(user)
    files = [user.path("client-certificate"), user.path("client-key"), user.path("tokenFile")]
    if authorization := _static_authorization(user):
        return Credential(authorization, certificate), files
    if plugin := user.mapping("exec"):
        found = await run_exec_plugin(plugin.values, plugin.file.parent, user.error)
        return replace(found, certificate=found.certificate or certificate), files
    if user.mapping("auth-provider"):
        return Credential(await _provider_token(user, cluster), certificate), files
    return Credential(certificate=certificate), files


def _client_certificate(user: Section) -> ClientCertificate | None:
    chain, key = user.content("client-certificate"), user.content("client-key")
    if bool(chain) != bool(key):
        missing = "client-key" if chain else "client-certificate"
        raise user.error(f"{missing} is missing: a client certificate needs both")
    return ClientCertificate(chain, key) if chain and key else None


def _static_authorization(user: Section) -> str | None:
    """A token file wins over a token, as in client-go: the file is the one that is renewed."""
    token = user.text("token")
    if path := user.path("tokenFile"):
        try:
            token = user.read("tokenFile", path).decode("ascii").strip() or token
        except ValueError as error:
            raise user.error(f"tokenFile: {path} does not hold a token") from error
        if not token:
            raise user.error(f"tokenFile: {path} is empty")
    if token:
        if not re.fullmatch(r"[\x21-\x7e]+", token):
            raise user.error("the token holds characters that no token has")
        return f"Bearer {token}"
    name, password = user.text("username"), user.values.get("password")
    if name and isinstance(password, str):
        return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
    return None


async def _provider_token(user: Section, cluster: Section) -> str:
    """The legacy `auth-provider` (oidc, gcp): left to the library, which also refreshes it."""
    name = str(user.values["auth-provider"].get("name"))
    config = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": cluster.text("server")}}],
        "users": [{"name": "x", "user": {"auth-provider": user.values["auth-provider"]}}],
    }
    configuration = Configuration()
    try:
        loader = KubeConfigLoader(config, config_base_path=str(user.file.parent))
        async with asyncio.timeout(AUTH_PROVIDER_TIMEOUT.total_seconds()):
            await loader.load_and_set(configuration)
    except (ConfigException, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        raise user.error(
            f"auth-provider {name!r} gave no token ({type(error).__name__}): log in again, "
            "or use an exec plugin"
        ) from None  # its text may quote the configuration
    token = configuration.api_key.get("BearerToken")
    if not token:
        raise user.error(f"auth-provider {name!r} gave no token: use an exec plugin")
    return str(token)
