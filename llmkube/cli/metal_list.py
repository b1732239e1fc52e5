"""`llmkube metal list` and `llmkube metal token list`: one line for each Mac.

Columns are those of `kubectl get metalnodes`, so that both tools say the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from llmkube.api.names import ConditionType
from llmkube.api.times import format_time, parse_time
from llmkube.cli.metal_credentials import MetalAccount, list_metal_accounts
from llmkube.cli.output import Hint, age, as_list, document, names, table
from llmkube.cli.values import Format
from llmkube.kube.resources import METALNODES

if TYPE_CHECKING:
    from llmkube.kube.client import KubeClient

Object = dict[str, Any]
_COLUMNS = ("NAME", "CHIP", "MEMORY", "HOST-IP", "CONNECTED", "REACHABLE", "AGE")
_WIDE = ("AGENT-VERSION", "PORT", "GPU-CORES", "LAST-HEARTBEAT", "REASON")
_ACCOUNT_COLUMNS = ("NAME", "ACCOUNT", "STATE", "AGE", "LAST-HEARTBEAT")


async def show_nodes(
    client: KubeClient, namespace: str | None, output: Format, now: datetime
) -> str:
    """The Macs of a namespace, or of all (None), in the format asked for."""
    nodes = await client.list(METALNODES, namespace)
    match output:
        case Format.JSON | Format.YAML:
            return document(as_list(nodes), output)
        case Format.NAME:
            return names(METALNODES, nodes)
        case _ if not nodes:
            return _nothing("MetalNode", namespace, "llmkube metal token create NAME")
        case _:
            return nodes_table(
                nodes, now, wide=output is Format.WIDE, with_namespace=namespace is None
            )


def nodes_table(nodes: list[Object], now: datetime, *, wide: bool, with_namespace: bool) -> str:
    """The Macs as kubectl would print them."""
    headers = (*(("NAMESPACE",) if with_namespace else ()), *_COLUMNS, *(_WIDE if wide else ()))
    rows = []
    for node in nodes:
        namespace = [node["metadata"]["namespace"]] if with_namespace else []
        rows.append([*namespace, *_row(node, now), *(_wide(node, now) if wide else [])])
    return table(headers, rows)


def _row(node: Mapping[str, Any], now: datetime) -> list[object]:
    status = node.get("status") or {}
    capacity = status.get("capacity") or {}
    return [
        node["metadata"]["name"],
        capacity.get("chip"),
        capacity.get("memory"),
        status.get("hostIP"),
        condition(node, ConditionType.AGENT_CONNECTED).get("status"),
        condition(node, ConditionType.REACHABLE).get("status"),
        age(parse_time(node["metadata"].get("creationTimestamp")), now),
    ]


def _wide(node: Mapping[str, Any], now: datetime) -> list[object]:
    status = node.get("status") or {}
    return [
        status.get("agentVersion"),
        status.get("ingressPort"),
        (status.get("capacity") or {}).get("gpuCores"),
        age(parse_time(status.get("lastHeartbeatTime")), now),
        condition(node, ConditionType.REACHABLE).get("reason"),
    ]


def condition(node: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The condition of that type; empty if the controller has not written it."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((c for c in conditions if c["type"] == kind), {})


async def show_accounts(
    client: KubeClient, namespace: str | None, output: Format, now: datetime
) -> str:
    """The Macs' accounts of a namespace, or of all (None), in the format asked for."""
    accounts = await list_metal_accounts(client, namespace)
    match output:
        case Format.JSON | Format.YAML:
            return document([_as_dict(account) for account in accounts], output)
        case Format.NAME:
            return "\n".join(f"serviceaccount/{account.account}" for account in accounts)
        case _ if not accounts:
            return _nothing("Mac's account", namespace, "llmkube metal token create NAME")
        case _:
            return accounts_table(accounts, now, with_namespace=namespace is None)


def accounts_table(accounts: list[MetalAccount], now: datetime, *, with_namespace: bool) -> str:
    """One line for each account; no token is shown, nor is one stored anywhere."""
    headers = (*(("NAMESPACE",) if with_namespace else ()), *_ACCOUNT_COLUMNS)
    return table(
        headers,
        [
            [
                *([account.namespace] if with_namespace else []),
                account.node,
                account.account,
                account.state,
                age(account.created_at, now),
                age(account.last_heartbeat, now) or "never",
            ]
            for account in accounts
        ],
    )


def _as_dict(account: MetalAccount) -> Object:
    return {
        "namespace": account.namespace,
        "name": account.node,
        "serviceAccount": account.account,
        "state": account.state,
        "createdAt": account.created_at and format_time(account.created_at),
        "lastHeartbeat": account.last_heartbeat and format_time(account.last_heartbeat),
    }


def _nothing(what: str, namespace: str | None, advice: str) -> Hint:
    where = "in any namespace" if namespace is None else f"in namespace {namespace} (-A: in all)"
    target = "NAMESPACE" if namespace is None else namespace
    return Hint(f"No {what} {where}. Make one with `{advice} -n {target}`.")
