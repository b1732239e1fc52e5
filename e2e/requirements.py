"""What a machine needs for the end-to-end proofs, and how to get it."""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
from pathlib import Path

from e2e import addresses

CNI_PLUGINS = Path("/usr/lib/cni")
PACKAGES = {
    "buildah": "buildah",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "prometheus": "prometheus",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
}


def missing() -> list[str]:
    """What stands in the way here, in words for the person who typed `make e2e`."""
    if os.uname().sysname != "Linux" or not _is_debian_12():
        return ["it needs Debian 12 (a container or a virtual machine will do)"]
    if os.geteuid() != 0:
        return ["it needs root, for namespaces and containerd: sudo make e2e"]
    absent = {package for name, package in PACKAGES.items() if not shutil.which(name)}
    problems = []
    if absent:
        packages = " ".join(sorted(absent))
        problems.append(f"programs are missing: apt-get install --no-install-recommends {packages}")
    elif taken := _taken_networks():
        problems.append(f"this machine already routes {', '.join(taken)}, which the proofs use")
    return problems


def _is_debian_12() -> bool:
    try:
        lines = Path("/etc/os-release").read_text().splitlines()
    except OSError:
        return False
    return "ID=debian" in lines and 'VERSION_ID="12"' in lines


def _taken_networks() -> list[str]:
    routed = _routed_networks()
    return [str(own) for own in addresses.NETWORKS if any(own.overlaps(net) for net in routed)]


def _routed_networks() -> list[ipaddress.IPv4Network]:
    routes = subprocess.run(["ip", "-4", "route"], capture_output=True, text=True, check=True)
    words = [line.split()[0] for line in routes.stdout.splitlines() if line]
    return [ipaddress.IPv4Network(word) for word in words if word[0].isdigit()]
