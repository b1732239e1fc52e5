"""The identity on disk: made once, and an error in every state that is not whole."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import ssl
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llmkube.agent.identity import (
    CERTIFICATE_FILE,
    IDENTITY_FILE,
    Identity,
    certificate_for,
    load_certificate,
    load_identity,
    open_identity,
)
from llmkube.agent.ingress import tls_context
from llmkube.agent.reporter import make_report
from llmkube.agent.statedir import StateDir, StateError
from llmkube.api.report import ReportedCapacity, parse_report, render_report

NOW = datetime(2026, 11, 30, tzinfo=UTC)
UID = "6f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"
OTHER = "7f1c2a34-5b6d-4e7f-8a9b-0c1d2e3f4a5b"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


def made(folder: Path) -> Identity:
    with StateDir.open(folder) as state:
        identity = open_identity(state)
        certificate_for(state, identity, UID, NOW)
        return identity


class TestMadeOnce:
    def test_key_and_holder_survive_a_restart(self, folder: Path) -> None:
        first, second = made(folder), made(folder)
        assert (first.holder, first.spki) == (second.holder, second.spki)
        assert len(first.spki) == 32

    def test_files_are_for_the_owner_only(self, folder: Path) -> None:
        made(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        for path in folder.iterdir():
            assert path.stat().st_mode & 0o777 == 0o600, path

    def test_the_key_is_p256_that_openssl_reads(self, folder: Path) -> None:
        made(folder)
        command = ["openssl", "pkey", "-in", str(folder / IDENTITY_FILE), "-noout", "-text"]
        assert "prime256v1" in subprocess.run(command, capture_output=True, text=True).stdout

    def test_a_state_folder_serves_one_agent_at_a_time(self, folder: Path) -> None:
        with (
            StateDir.open(folder),
            pytest.raises(StateError, match="another agent is running"),
            StateDir.open(folder),
        ):
            pass
        with StateDir.open(folder):
            pass

    def test_what_a_crash_left_half_written_is_swept(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        leftover = folder / f".{IDENTITY_FILE}.0123.tmp"
        leftover.write_bytes(b"-----BEGIN PRIV")
        made(folder)
        assert not leftover.exists()

    def test_a_kill_at_any_moment_leaves_no_half_identity(self, folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        for delay in range(12):
            process = context.Process(target=made, args=(folder,))
            process.start()
            process.join(delay * 0.001)
            process.kill()
            process.join()
        pins = {made(folder).spki for _ in range(2)}
        assert len(pins) == 1


class TestCertificate:
    def test_it_names_one_uid_and_carries_the_key(self, folder: Path) -> None:
        with StateDir.open(folder) as state:
            identity = open_identity(state)
            issued = certificate_for(state, identity, UID, NOW)
        certificate = x509.load_der_x509_certificate(issued.der)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(names) == [x509.UniformResourceIdentifier(f"urn:uuid:{UID}")]
        public = certificate.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        assert hashlib.sha256(public).digest() == identity.spki
        assert len(issued.der) < 1024

    def test_it_stays_until_the_uid_changes_and_then_the_key_stays(self, folder: Path) -> None:
        with StateDir.open(folder) as state:
            identity = open_identity(state)
            first = certificate_for(state, identity, UID, NOW)
            assert certificate_for(state, identity, UID, NOW) == first
            second = certificate_for(state, identity, OTHER, NOW)
            assert second.der != first.der
            assert load_certificate(folder, identity) == second

    def test_a_report_made_of_it_is_valid(self, folder: Path) -> None:
        with StateDir.open(folder) as state:
            identity = open_identity(state)
            certificate = certificate_for(state, identity, UID, NOW)
        report = make_report(certificate, identity, 9443, (), ReportedCapacity("Apple M5 Max"))
        assert parse_report(render_report(report)) == report

    def test_key_and_certificate_fit_for_tls(self, folder: Path) -> None:
        with StateDir.open(folder) as state:
            identity = open_identity(state)
            context = tls_context(certificate_for(state, identity, UID, NOW), identity.path)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.maximum_version == ssl.TLSVersion.TLSv1_3


def foreign_key() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1())
    return b"# holder: 0a0a0a0a-0b0b-4c0c-8d0d-0e0e0e0e0e0e\n" + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "garbage": lambda path: path.write_bytes(os.urandom(300)),
    "huge": lambda path: path.write_bytes(path.read_bytes() + b"#" * 100_000),
    "readable by others": lambda path: path.chmod(0o644),
    "a link": lambda path: (
        path.rename(path.with_suffix(".real")) and path.symlink_to(path.with_suffix(".real"))
    ),
    "a folder": lambda path: path.unlink() or path.mkdir(),
    "a pipe": lambda path: path.unlink() or os.mkfifo(path, 0o600),
}


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
    @pytest.mark.parametrize("name", [IDENTITY_FILE, CERTIFICATE_FILE])
    def test_it_is_an_error_that_says_what_to_do(self, folder: Path, name: str, damage) -> None:  # type: ignore[no-untyped-def]
        made(folder)
        damage(folder / name)
        before = sorted(os.listdir(folder))
        with pytest.raises(StateError) as told:
            made(folder)
        assert name in str(told.value)
        assert any(word in str(told.value) for word in ("back", "emove", "chmod", "never writes"))
        assert sorted(os.listdir(folder)) == before

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(foreign_key(), id="another curve"),
            pytest.param(foreign_key().partition(b"\n")[2], id="no holder"),
            pytest.param(b"# holder: 00000000\n", id="no key"),
        ],
    )
    def test_an_identity_that_is_not_ours(self, folder: Path, content: bytes) -> None:
        made(folder)
        (folder / IDENTITY_FILE).write_bytes(content)
        with pytest.raises(StateError, match="is damaged"):
            made(folder)

    def test_a_lost_key_is_never_replaced_silently(self, folder: Path) -> None:
        made(folder)
        (folder / IDENTITY_FILE).unlink()
        with pytest.raises(StateError, match="Put it back from a backup"):
            made(folder)
        assert load_identity(folder) is None

    def test_a_certificate_of_another_key(self, folder: Path, tmp_path: Path) -> None:
        made(folder)
        made(tmp_path / "other")
        (tmp_path / "other" / CERTIFICATE_FILE).replace(folder / CERTIFICATE_FILE)
        with pytest.raises(StateError, match="belongs to another key"):
            made(folder)

    def test_a_lost_certificate_is_issued_anew(self, folder: Path) -> None:
        """It is derived from the key, which is what the cluster pins."""
        pin = made(folder).spki
        (folder / CERTIFICATE_FILE).unlink()
        assert made(folder).spki == pin

    @pytest.mark.parametrize("mode", [0o777, 0o730, 0o722])
    def test_a_folder_that_others_write_to(self, folder: Path, mode: int) -> None:
        made(folder)
        folder.chmod(mode)
        with pytest.raises(StateError, match="chmod 700"):
            made(folder)

    @pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
    @pytest.mark.parametrize("name", [IDENTITY_FILE, "."])
    def test_what_belongs_to_another_user(self, folder: Path, name: str) -> None:
        made(folder)
        os.chown(folder / name, 12345, -1)
        with pytest.raises(StateError, match="belongs to user 12345"):
            made(folder)

    def test_a_folder_that_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StateError, match="--state-dir"):
            StateDir.open(tmp_path / "file")
