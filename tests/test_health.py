"""What kubelet and Prometheus are told."""

from __future__ import annotations

import aiohttp
import pytest

from llmkube.health import BadAddress, BindAddress, Checks, health_routes, metrics_routes, serving


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(":8080", BindAddress(None, 8080), id="every interface"),
        pytest.param(
            "127.0.0.1:0", BindAddress("127.0.0.1", 0), id="a port of the kernel's choice"
        ),
        pytest.param("[::1]:8081", BindAddress("::1", 8081), id="IPv6 in brackets"),
        pytest.param("0", None, id="zero switches it off"),
        pytest.param("", None, id="empty switches it off"),
    ],
)
def test_bind_address(text: str, expected: BindAddress | None) -> None:
    assert BindAddress.parse(text) == expected


@pytest.mark.parametrize("text", ["8080", "host:", "host:http", ":70000", ":-1", ":８０"])
def test_bad_bind_address_says_what_to_write(text: str) -> None:
    with pytest.raises(BadAddress, match="HOST:PORT"):
        BindAddress.parse(text)


async def test_checks_answer_as_kubernetes_components_do() -> None:
    live, ready = Checks(), Checks()
    trouble: list[str] = []
    live.add("loop", lambda: None)
    ready.add("leases", lambda: trouble[0] if trouble else None)
    async with serving(BindAddress("127.0.0.1", 0), health_routes(live, ready)) as port:
        assert await _get(port, "/healthz") == (200, "ok")
        assert await _get(port, "/readyz?verbose") == (200, "[+]leases ok\n")
        trouble.append("403 since start")
        assert await _get(port, "/readyz") == (500, "[-]leases failed: 403 since start\n")
        assert await _get(port, "/healthz") == (200, "ok")


async def test_metrics_keep_the_content_type_of_the_exposition() -> None:
    routes = metrics_routes(lambda: (b"up 1\n", "text/plain; version=1.0.0; charset=utf-8"))
    async with serving(BindAddress("127.0.0.1", 0), routes) as port:
        assert await _get(port, "/metrics") == (200, "up 1\n")


async def test_zero_does_not_listen() -> None:
    async with serving(None, []) as port:
        assert port == 0


async def _get(port: int, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}{path}") as answer,
    ):
        return answer.status, await answer.text()
