"""Who has which address.

    Macs 10.213.N.10 ── node 10.213.N.1 … 10.213.0.2 ── 10.213.0.1 control plane
                              │
                              └── pods 10.244.0.0/24

The node routes between all of them, as a site's router would.
"""

from __future__ import annotations

from ipaddress import ip_network

CONTROL_PLANE = "10.213.0.1"
NODE = "10.213.0.2"
SERVICES = ip_network("10.96.0.0/16")
API_SERVICE = "10.96.0.1"
PODS = ip_network("10.244.0.0/24")
MACS = ip_network("10.213.0.0/16")
NETWORKS = (PODS, MACS)


def gateway(number: int) -> str:
    """The node's address on the subnet of Mac `number`, from 1."""
    return f"10.213.{number}.1"


def mac(number: int) -> str:
    """The address of Mac `number`, from 1."""
    return f"10.213.{number}.10"
