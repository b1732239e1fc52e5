"""Kubeconfig files and pod accounts: what they may hold, and what is wrong with bad ones."""

from __future__ import annotations

import base64
import json
import os
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster import pki
from devcluster.controlplane import ControlPlane
from llmkube.clock import SystemClock
from llmkube.kube import execplugin
from llmkube.kube.client import KubeClient
from llmkube.kube.config import load_access, load_in_cluster
from llmkube.kube.credentials import Access
from llmkube.kube.errors import ConfigError, Unauthorized

AUTHORITY = pki.Authority("a cluster")
CA = base64.b64encode(AUTHORITY.pem).decode()
CERTIFICATE, KEY = AUTHORITY.issue("someone")
SERVER = "https://cluster.example:6443"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def kubeconfig(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> dict:
    """A kubeconfig with one context, changed where a test wants it."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "main",
        "clusters": [
            {
                "name": "c",
                "cluster": {"server": SERVER, "certificate-authority-data": CA} | (cluster or {}),
            }
        ],
        "contexts": [{"name": "main", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {"token": "s3cret-token"} if user is None else user}],
    }


def write(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


async def load(path: Path, document: Any) -> Access:
    return await load_access(write(path / "config", document))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# What a kubeconfig may hold ---------------------------------------------------------------------


async def test_a_plain_kubeconfig_is_read(tmp_path: Path) -> None:
    access = await load(tmp_path, kubeconfig())
    assert access.server == SERVER
    assert access.ca_pem == AUTHORITY.pem
    assert access.namespace == "default"
    assert access.credential.authorization == "Bearer s3cret-token"
    assert access.ssl_context().get_ca_certs()
    assert "s3cret" not in repr(access)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        pytest.param({"server": SERVER + "/"}, {"server": SERVER}, id="a trailing slash"),
        pytest.param(
            {"server": "https://rancher.example/k8s/clusters/c-1"},
            {"server": "https://rancher.example/k8s/clusters/c-1"},
            id="a path before the API's",
        ),
        pytest.param(
            {"proxy-url": "http://proxy:3128"}, {"proxy": "http://proxy:3128"}, id="proxy"
        ),
        pytest.param(
            {"certificate-authority-data": "", "certificate-authority": "ca.pem"},
            {"ca_pem": AUTHORITY.pem},
            id="empty CA data, then the file counts",
        ),
        pytest.param(
            {"certificate-authority-data": CA[:60] + "\n" + CA[60:]},
            {"ca_pem": AUTHORITY.pem},
            id="CA data with line breaks",
        ),
        pytest.param({"certificate-authority-data": None}, {"ca_pem": None}, id="no CA at all"),
    ],
)
async def test_clusters(tmp_path: Path, cluster: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "ca.pem").write_bytes(AUTHORITY.pem)
    access = await load(tmp_path, kubeconfig(cluster))
    access.ssl_context()
    assert {name: getattr(access, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("user", "authorization"),
    [
        pytest.param({"tokenFile": "token"}, "Bearer from-file", id="a token file, trimmed"),
        pytest.param(
            {"tokenFile": "token", "token": "old"}, "Bearer from-file", id="the file is renewed"
        ),
        pytest.param(
            {"username": "me", "password": "pw"}, "Basic " + b64(b"me:pw"), id="name and password"
        ),
        pytest.param({}, None, id="nobody"),
    ],
)
async def test_users(tmp_path: Path, user: dict[str, Any], authorization: str | None) -> None:
    (tmp_path / "token").write_text("  from-file\n")
    access = await load(tmp_path, kubeconfig(user=user))
    assert access.credential.authorization == authorization


async def test_contexts_are_chosen_by_name(tmp_path: Path) -> None:
    document = kubeconfig()
    document["contexts"].append(
        {"name": "other", "context": {"cluster": "c", "user": "u", "namespace": "team"}}
    )
    path = write(tmp_path / "config", document)
    assert (await load_access(path, "other")).namespace == "team"
    with pytest.raises(ConfigError, match=r"no context named 'third' .*main, other"):
        await load_access(path, "third")


async def test_files_are_merged_and_paths_are_relative_to_their_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    (tmp_path / "two" / "token").write_text("of-two")
    one = kubeconfig()
    del one["users"]
    write(tmp_path / "one" / "config", one)
    write(tmp_path / "two" / "config", {"users": [{"name": "u", "user": {"tokenFile": "token"}}]})
    paths = [str(tmp_path / folder / "config") for folder in ("one", "two", "missing")]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(paths))
    access = await load_access()
    assert access.credential.authorization == "Bearer of-two"


async def test_the_first_file_that_chooses_a_context_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for kubectl; kubernetes_asyncio would take the last."""
    first = {"current-context": "main"}
    second = kubeconfig() | {"current-context": "other"}
    paths = [str(write(tmp_path / name, d)) for name, d in (("1", first), ("2", second))]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(paths))
    assert "context 'main'" in (await load_access()).origin


async def test_certificates_leave_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    user = {"client-certificate-data": b64(CERTIFICATE), "client-key-data": b64(KEY)}
    access = await load(tmp_path, kubeconfig(user=user))
    access.ssl_context()
    assert access.credential.certificate is not None
    assert not list(scratch.iterdir())


# What is wrong with it --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        pytest.param("", "empty or not a mapping", id="an empty file"),
        pytest.param("a: b: c: s3cret", "not valid YAML near line 1", id="no YAML"),
        pytest.param("[1, 2]", "not a mapping", id="a list"),
        pytest.param({"clusters": {"a": 1}}, "clusters must be a list", id="no list"),
        pytest.param({"users": [{"user": {}}]}, "users must be a list of entries", id="no name"),
        pytest.param({}, "no current-context", id="no context chosen"),
        pytest.param({"current-context": "main"}, "no context named 'main'", id="no such context"),
        pytest.param(
            kubeconfig() | {"clusters": []},
            r"no cluster named 'c' \(there are: none",
            id="no cluster",
        ),
        pytest.param(kubeconfig() | {"users": []}, "no user named 'u'", id="no such user"),
        pytest.param(kubeconfig({"server": None}), "server is missing", id="no server"),
        pytest.param(kubeconfig({"server": "cluster:6443"}), "must be a URL", id="no URL"),
        pytest.param(kubeconfig({"server": 6443}), "server must be a string", id="a number"),
        pytest.param(
            kubeconfig({"certificate-authority-data": "no base64!"}),
            "certificate-authority-data is not valid base64",
            id="garbage for base64",
        ),
        pytest.param(
            kubeconfig({"certificate-authority-data": None, "certificate-authority": "gone.pem"}),
            r"certificate-authority: cannot read .*gone\.pem",
            id="the CA file is missing",
        ),
        pytest.param(
            kubeconfig({"insecure-skip-tls-verify": True}), "exclude each other", id="CA and none"
        ),
        pytest.param(
            kubeconfig({"insecure-skip-tls-verify": "yes please"}), "true or false", id="no flag"
        ),
        pytest.param(kubeconfig({"proxy-url": "socks5://x"}), "only proxies", id="SOCKS"),
        pytest.param(kubeconfig(user={"tokenFile": "gone"}), "cannot read", id="no token file"),
        pytest.param(kubeconfig(user={"tokenFile": "empty"}), "is empty", id="empty token file"),
        pytest.param(kubeconfig(user={"token": "s3cret\nX: y"}), "no token has", id="two lines"),
        pytest.param(kubeconfig(user={"token": 5}), "token must be a string", id="token a number"),
        pytest.param(
            kubeconfig(user={"client-certificate-data": b64(CERTIFICATE)}),
            "client-key is missing",
            id="a certificate without key",
        ),
        pytest.param(
            kubeconfig(user={"token": "s3cret", "as": "admin"}), "impersonation", id="impersonation"
        ),
        pytest.param(
            kubeconfig(user={"exec": {"command": "x"}}),
            "command and apiVersion",
            id="half a plugin",
        ),
        pytest.param(
            kubeconfig(user={"auth-provider": {"name": "oidc", "config": {"secret": "s3cret"}}}),
            "auth-provider 'oidc' gave no token",
            id="a log-in that has lapsed",
        ),
    ],
)
async def test_a_bad_kubeconfig_is_explained(tmp_path: Path, document: Any, complaint: str) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=complaint) as caught:
        await load(tmp_path, document)
    assert str(tmp_path) in str(caught.value), "it says which file"
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in str(caught.value.__cause__ or "")


@pytest.mark.parametrize(
    ("cluster", "user", "complaint"),
    [
        pytest.param(
            {"certificate-authority-data": b64(b"no PEM")}, None, "PEM certificates", id="CA"
        ),
        pytest.param(
            {},
            {"client-certificate-data": b64(CERTIFICATE), "client-key-data": b64(b"no key")},
            "do not fit or are not PEM",
            id="key",
        ),
        pytest.param(
            {},
            {
                "client-certificate-data": b64(CERTIFICATE),
                "client-key-data": b64(AUTHORITY.issue("someone else")[1]),
            },
            "do not fit",
            id="another's key",
        ),
    ],
)
async def test_bad_pem_is_explained_when_a_client_is_made(
    tmp_path: Path, cluster: dict[str, Any], user: dict[str, Any] | None, complaint: str
) -> None:
    access = await load(tmp_path, kubeconfig(cluster, user))
    with pytest.raises(ConfigError, match=complaint):
        KubeClient(access, clock=SystemClock())


async def test_nothing_to_talk_to_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --kubeconfig FILE"):
        await load_access()
    with pytest.raises(ConfigError, match="no such kubeconfig"):
        await load_access(tmp_path / "gone")


# Where it is looked for -------------------------------------------------------------------------


async def test_the_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / ".kube"
    home.mkdir(parents=True)
    for path, namespace in ((home / "config", "home"), (tmp_path / "env", "env")):
        document = kubeconfig()
        document["contexts"][0]["context"]["namespace"] = namespace
        write(path, document)
    assert (await load_access()).namespace == "home"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError, match="ServiceAccount"):
        await load_access()
    assert (await load_access(context="main")).namespace == "home", "pods have no contexts"
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "env"))
    assert (await load_access()).namespace == "env"
    assert (await load_access(home / "config")).namespace == "home"


async def test_a_pods_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "ca.crt").write_bytes(AUTHORITY.pem)
    (tmp_path / "token").write_text("tok\n")
    (tmp_path / "namespace").write_text("team\n")
    access = await load_in_cluster(tmp_path)
    assert access.server == "https://[fd00::1]:443"
    assert access.namespace == "team"
    assert access.credential.authorization == "Bearer tok"
    assert access.ca_pem == AUTHORITY.pem
    (tmp_path / "token").write_text("new")
    assert (await access.reload()).credential.authorization == "Bearer new"
    (tmp_path / "token").unlink()
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        await access.reload()


# Exec plugins -----------------------------------------------------------------------------------


def plugin(folder: Path, script: str, **more: Any) -> dict[str, Any]:
    """A user whose plugin is this Python script, named relative to the kubeconfig."""
    path = folder / "plugin"
    path.write_text(f"#!{sys.executable}\n{script}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    exec_section = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./plugin",
        "interactiveMode": "Never",
        **more,
    }
    return {"exec": exec_section}


def answering(status: dict[str, Any]) -> str:
    answer = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": status,
    }
    return f"print({json.dumps(answer)!r})"


async def test_a_plugin_gives_a_token_with_an_end(tmp_path: Path) -> None:
    expires = datetime(2030, 1, 1, tzinfo=UTC)
    script = answering({"token": "from-plugin", "expirationTimestamp": "2030-01-01T00:00:00Z"})
    access = await load(tmp_path, kubeconfig(user=plugin(tmp_path, script)))
    assert access.credential.authorization == "Bearer from-plugin"
    assert access.credential.expires_at == expires


async def test_a_plugin_gives_a_certificate(tmp_path: Path) -> None:
    script = answering(
        {"clientCertificateData": CERTIFICATE.decode(), "clientKeyData": KEY.decode()}
    )
    access = await load(tmp_path, kubeconfig(user=plugin(tmp_path, script)))
    assert access.credential.authorization is None
    assert access.credential.certificate is not None
    access.ssl_context()


async def test_a_plugin_gets_its_arguments_and_environment(tmp_path: Path) -> None:
    script = (
        "import json, os, sys\n"
        "token = sys.argv[1] + os.environ['SUFFIX']\n"
        "info = json.loads(os.environ['KUBERNETES_EXEC_INFO'])\n"
        "print(json.dumps({'apiVersion': info['apiVersion'], 'kind': 'ExecCredential',"
        " 'status': {'token': token}}))"
    )
    user = plugin(tmp_path, script, args=["a"], env=[{"name": "SUFFIX", "value": "b"}])
    access = await load(tmp_path, kubeconfig(user=user))
    assert access.credential.authorization == "Bearer ab"


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        pytest.param("import sys; sys.exit('no login')", "by hand.*no login", id="it fails"),
        pytest.param("print('hello')", "neither a token", id="no JSON"),
        pytest.param(
            "import sys; sys.stderr.write('x' * 200_000); sys.exit(1)", "exit code 1", id="it rants"
        ),
        pytest.param(answering({}), "neither a token nor a certificate", id="an empty status"),
        pytest.param(answering({"token": ""}), "neither", id="an empty token"),
        pytest.param(
            answering({"clientCertificateData": "x"}), "without key", id="a certificate alone"
        ),
        pytest.param("import time; time.sleep(60)", "did not end within", id="it hangs"),
    ],
)
async def test_a_plugin_that_fails_never_ends_in_anonymous_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, complaint: str
) -> None:
    seconds = 0.5 if "sleep" in script else 60
    monkeypatch.setattr(execplugin, "EXEC_TIMEOUT", timedelta(seconds=seconds))
    with pytest.raises(ConfigError, match=complaint):
        await load(tmp_path, kubeconfig(user=plugin(tmp_path, script)))
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(tmp_path / "plugin") not in listed.stdout, "it must not be left running"


async def test_a_missing_plugin_says_how_to_install_it(tmp_path: Path) -> None:
    section = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "no-such-plugin",
        "installHint": "brew install it",
    }
    with pytest.raises(ConfigError, match="not found: brew install it"):
        await load(tmp_path, kubeconfig(user={"exec": section}))


# Against the real API server --------------------------------------------------------------------


@pytest.mark.cluster
async def test_each_kind_of_credential_is_accepted(
    control_plane: ControlPlane, admin: KubeClient, namespace: str, tmp_path: Path
) -> None:
    issued = await admin.request_token("default", namespace, ttl=timedelta(minutes=10))
    files = control_plane.folder
    certificate, key = (files / "admin.crt").read_bytes(), (files / "admin.key").read_bytes()
    (tmp_path / "token").write_text(issued.token)
    (tmp_path / "ca.pem").write_bytes(control_plane.ca_pem)
    account = f"system:serviceaccount:{namespace}:default"
    by_certificate = answering(
        {"clientCertificateData": certificate.decode(), "clientKeyData": key.decode()}
    )
    users: list[tuple[dict[str, Any], str]] = [
        ({"token": issued.token}, account),
        ({"tokenFile": "token"}, account),
        ({"client-certificate-data": b64(certificate), "client-key-data": b64(key)}, "admin"),
        (plugin(tmp_path, by_certificate), "admin"),
    ]
    cluster = {
        "server": control_plane.server,
        "certificate-authority-data": "",
        "certificate-authority": "ca.pem",
    }
    for user, expected in users:
        access = await load(tmp_path, kubeconfig(cluster, user))
        async with KubeClient(access, clock=SystemClock()) as client:
            assert (await client.whoami()).username == expected


@pytest.mark.cluster
@pytest.mark.parametrize("user", [{}, {"token": "made-up"}], ids=["no credential", "a wrong one"])
async def test_an_anonymous_client_notices(
    control_plane: ControlPlane, tmp_path: Path, user: dict[str, Any]
) -> None:
    cluster = {
        "server": control_plane.server,
        "certificate-authority-data": b64(control_plane.ca_pem),
    }
    access = await load(tmp_path, kubeconfig(cluster, user))
    async with KubeClient(access, clock=SystemClock()) as client:
        with pytest.raises(Unauthorized):
            await client.whoami()


def test_the_reader_is_imported_late() -> None:
    """The library behind it costs half a second and 40 MB: not for `--help`."""
    code = "import sys, llmkube.kube.config; print('kubernetes_asyncio' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
