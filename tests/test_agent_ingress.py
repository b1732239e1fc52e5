"""The agent's ingress over real TLS: who gets in, and what reaches the LLM server how."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType, web

from llmkube.agent.gate import ClosedGate, OpenGate
from llmkube.agent.settings import IngressSettings
from llmkube.clock import SystemClock
from llmkube.verifier.dialback import run_check
from llmkube.verifier.protocol import CheckRequest, Outcome
from tests.support.agents import (
    TOKEN,
    UID,
    RunningIngress,
    http_upstream,
    raw_upstream,
    running_ingress,
    trusting_context,
)
from tests.support.ingresses import issue
from tests.support.wait import eventually

AUTH = f"X-LLMKube-Relay-Token: {TOKEN}\r\n"
GET = "GET {path} HTTP/1.1\r\nHost: mac\r\nConnection: close\r\n{headers}\r\n"


def get(path: str = "/v1/models", headers: str = AUTH) -> bytes:
    return GET.format(path=path, headers=headers).encode()


async def echo(request: web.Request) -> web.Response:
    """What the LLM server saw, as JSON."""
    body = await request.read()
    return web.json_response(
        {
            "method": request.method,
            "target": request.raw_path,
            "headers": [[name, value] for name, value in request.headers.items()],
            "body": body.decode("latin-1"),
        },
        headers={"X-Upstream": "yes"},
    )


class TestWhoGetsIn:
    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            pytest.param(get(), 200, id="the token opens"),
            pytest.param(get(headers=""), 401, id="no token"),
            pytest.param(get(headers=AUTH.replace("a relay", "A relay")), 401, id="wrong token"),
            pytest.param(get(headers=AUTH.strip() + "x\r\n"), 401, id="a longer token"),
            pytest.param(get(headers=AUTH[:-5] + "\r\n"), 401, id="a prefix of the token"),
            pytest.param(get(headers=AUTH + AUTH), 401, id="the token twice"),
            pytest.param(get(headers="X-LLMKube-Relay-Token:\r\n"), 401, id="an empty token"),
            pytest.param(get(headers="Authorization: Bearer x\r\n"), 401, id="another scheme"),
            pytest.param(get("/_llmkube/ready", ""), 200, id="readiness needs no token"),
            pytest.param(get("/_llmkube/ready?x=1", ""), 200, id="readiness with a query"),
            pytest.param(get("/_llmkube/ready/", ""), 401, id="not quite readiness: slash"),
            pytest.param(get("/_llmkube/ready/../v1", ""), 401, id="readiness and up again"),
            pytest.param(get("//_llmkube/ready", ""), 401, id="two slashes"),
            pytest.param(get("/%5fllmkube/ready", ""), 401, id="percent-encoded readiness"),
            pytest.param(get("http://x/_llmkube/ready", ""), 401, id="readiness in absolute form"),
            pytest.param(
                get("/_llmkube/ready", "").replace(b"GET", b"POST"), 401, id="POST to readiness"
            ),
            pytest.param(get("/_llmkube/ready/x"), 404, id="our prefix is never passed on"),
            pytest.param(get("/_llmkube"), 404, id="nor the prefix itself"),
        ],
    )
    async def test_table(self, tmp_path: Path, raw: bytes, status: int) -> None:
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            answer = await running.ask(raw)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert (b"X-Upstream" in answer) == (status == 200 and b"ready" not in raw)

    async def test_without_a_file_nobody_and_insecurely_everybody(self, tmp_path: Path) -> None:
        async with http_upstream(echo) as upstream:
            for gate, status in ((ClosedGate(), b"401"), (OpenGate(), b"200")):
                async with running_ingress(tmp_path, upstream, gate=gate) as running:
                    for headers in ("", AUTH):
                        assert status in (await running.ask(get(headers=headers)))[:16]

    async def test_a_new_token_counts_at_once_and_a_lost_one_closes(self, tmp_path: Path) -> None:
        newer = AUTH.replace("a relay", "another relay")
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            running.token_file.write_text(TOKEN.replace("a relay", "another relay"))
            assert b"401" in (await running.ask(get()))[:16]
            assert b"200" in (await running.ask(get(headers=newer)))[:16]
            for spoil in (lambda f: f.write_text("\n"), lambda f: f.unlink()):
                spoil(running.token_file)
                assert b"401" in (await running.ask(get(headers=newer)))[:16]
                assert (
                    b"401" in (await running.ask(get(headers="X-LLMKube-Relay-Token: \r\n")))[:16]
                )

    async def test_a_refused_upload_is_not_read(self, tmp_path: Path) -> None:
        settings = IngressSettings(close_timeout=timedelta(milliseconds=200))
        async with (
            http_upstream(echo) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
        ):
            head = b"POST / HTTP/1.1\r\nHost: m\r\nContent-Length: 900000000000\r\n\r\n"
            assert (await running.ask(head + bytes(100_000))).startswith(b"HTTP/1.1 401")


class TestTls:
    async def test_only_tls_1_3(self, tmp_path: Path) -> None:
        context = trusting_context()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await running.connect(context)
            _, writer = await running.connect()
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            writer.transport.abort()

    async def test_a_new_uid_changes_the_certificate_of_new_connections_only(
        self, tmp_path: Path
    ) -> None:
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            reader, writer = await running.connect()
            before = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            renewed = running.use(UID.replace("6", "7"))
            _, second = await running.connect()
            assert second.get_extra_info("ssl_object").getpeercert(binary_form=True) == renewed
            assert before != renewed
            writer.write(get())
            assert b"200 OK" in await reader.read()
            second.transport.abort()

    async def test_the_clusters_verifier_is_convinced_by_this_key_and_certificate_only(
        self, tmp_path: Path
    ) -> None:
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            first = running.use(UID)
            assert await dial_back(running, first) == Outcome.REACHABLE
            second = running.use(UID.replace("6", "7"))
            assert await dial_back(running, first) == Outcome.CERTIFICATE_MISMATCH
            assert await dial_back(running, second) == Outcome.REACHABLE
            stranger = issue(uid=UID)
            assert await dial_back(running, stranger.der, stranger.spki) == Outcome.PIN_MISMATCH

    async def test_no_session_is_resumed(self, tmp_path: Path) -> None:
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            context = trusting_context()
            reader, writer = await running.connect(context)
            writer.write(get())
            await reader.read()
            session = writer.get_extra_info("ssl_object").session
            assert session is None or not session.has_ticket
            writer.transport.abort()


async def dial_back(running: RunningIngress, certificate: bytes, pin: bytes = b"") -> Outcome:
    """What the verifier that the cluster sends finds at the ingress."""
    request = CheckRequest(
        input_hash="hash",
        spki=pin or running.identity.spki,
        certificate=certificate,
        port=running.port,
        addresses=("127.0.0.1",),
        allow=(ip_network("127.0.0.0/8"),),
    )
    report = await asyncio.to_thread(run_check, request, SystemClock())
    return report.results[0].result


class TestWhatTheUpstreamSees:
    async def test_end_to_end_headers_and_nothing_else(self, tmp_path: Path) -> None:
        headers = (
            AUTH + "Connection: keep-alive, X-Private\r\nX-Private: 1\r\nTE: trailers\r\n"
            "Proxy-Authorization: x\r\nKeep-Alive: 5\r\nX-Forwarded-For: 6.6.6.6\r\n"
            "Forwarded: for=6.6.6.6\r\nX-Real-IP: 6.6.6.6\r\nAccept-Encoding: br\r\n"
            "Authorization: Bearer llm\r\nX-Twice: 1\r\nX-Twice: 2\r\n"
        )
        async with (
            http_upstream(echo) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
        ):
            raw = await running.ask(get("/a%2Fb//c/../d?x=%20&y", headers))
            assert b"200 OK" in raw
            async with session.get("/") as answer:
                assert answer.status == 200
        seen = json.loads(raw.partition(b"\r\n\r\n")[2])
        names = {name.lower() for name, _ in seen["headers"]}
        assert seen["target"] == "/a%2Fb//c/../d?x=%20&y"
        assert names == {
            "host",
            "authorization",
            "accept-encoding",
            "connection",  # the ingress's own, towards the upstream
            "x-twice",
            "x-forwarded-for",
            "x-forwarded-host",
            "x-forwarded-proto",
        }
        pairs = [tuple(pair) for pair in seen["headers"]]
        assert ("X-Forwarded-For", "127.0.0.1") in pairs
        assert ("Host", upstream.removeprefix("http://")) in pairs
        assert [value for name, value in pairs if name == "X-Twice"] == ["1", "2"]

    @pytest.mark.parametrize(
        "target",
        ["/", "/a//b/./../c;x=1?d=%zz%00", '/"<>^`{|}[]\\~\'()*!$&,+=:@?"<>', "/%2e%2e/"],
    )
    async def test_the_target_passes_byte_for_byte(self, tmp_path: Path, target: str) -> None:
        seen: list[bytes] = []

        async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        async with (
            raw_upstream(conversation) as upstream,
            running_ingress(tmp_path, upstream) as running,
        ):
            assert (await running.ask(get(target))).startswith(b"HTTP/1.1 200")
        assert seen == [b"GET " + target.encode() + b" HTTP/1.1\r\n"]

    @pytest.mark.parametrize("chunked", [True, False])
    @pytest.mark.parametrize("size", [0, 1, 200_000])
    async def test_bodies_arrive_whole(self, tmp_path: Path, size: int, chunked: bool) -> None:
        body = os.urandom(size)

        async def handler(request: web.Request) -> web.Response:
            if size:  # an empty body is an empty body
                assert (request.headers.get("Transfer-Encoding") == "chunked") == chunked
                assert (request.headers.get("Content-Length") == str(size)) != chunked
            return web.Response(body=await request.read())

        async def pieces():  # type: ignore[no-untyped-def]
            yield body

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.post("/", data=pieces() if chunked else body) as answer,
        ):
            assert answer.status == 200
            assert await answer.read() == body

    async def test_compressed_bodies_pass_untouched_both_ways(self, tmp_path: Path) -> None:
        packed = gzip.compress(b"x" * 1000)

        async def handler(request: web.Request) -> web.Response:
            assert await request.read() == packed
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.post("/", data=packed, headers={"Content-Encoding": "gzip"}) as answer,
        ):
            assert answer.headers["Content-Encoding"] == "gzip"
            assert answer.headers["Content-Length"] == str(len(packed))
            assert await answer.read() == packed

    @pytest.mark.parametrize(
        ("method", "status", "length"), [("HEAD", 200, "5"), ("GET", 204, None), ("GET", 304, None)]
    )
    async def test_answers_without_a_body(
        self, tmp_path: Path, method: str, status: int, length: str | None
    ) -> None:
        async def handler(_: web.Request) -> web.Response:
            return web.Response(status=status, body=b"hello" if status == 200 else None)

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
        ):
            for _ in range(2):  # the second proves that the framing of the first was right
                async with session.request(method, "/") as answer:
                    assert answer.status == status
                    assert await answer.read() == b""
                    if length:
                        assert answer.headers["Content-Length"] == length

    async def test_redirects_and_cookies_are_the_clients_business(self, tmp_path: Path) -> None:
        async def handler(_: web.Request) -> web.Response:
            answer = web.Response(status=302, headers={"Location": "http://elsewhere/"})
            answer.headers.add("Set-Cookie", "a=1")
            answer.headers.add("Set-Cookie", "b=2")
            return answer

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.get("/", allow_redirects=False) as answer,
        ):
            assert answer.status == 302
            assert answer.headers["Location"] == "http://elsewhere/"
            assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]

    async def test_expect_100_continue(self, tmp_path: Path) -> None:
        head = (
            f"POST / HTTP/1.1\r\nHost: m\r\n{AUTH}Content-Length: 3\r\nConnection: close\r\n"
            "Expect: 100-continue\r\n\r\n"
        )
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            reader, writer = await running.connect()
            writer.write(head.encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"abc")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200")
            assert b'"body": "abc"' in answer


POST = b"POST / HTTP/1.1\r\nHost: m\r\n%s"


class TestSmuggling:
    @pytest.mark.parametrize(
        "raw",
        [
            pytest.param(
                POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
                id="both lengths",
            ),
            pytest.param(
                POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcd",
                id="two different lengths",
            ),
            pytest.param(
                POST + b"Content-Length: +4\r\n\r\nabcd",
                id="signed length",
            ),
            pytest.param(
                POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
                id="an unknown encoding",
            ),
            pytest.param(
                POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
                id="a space before the colon",
            ),
            pytest.param(
                POST + b"Transfer-Encoding: chunked\r\n\r\n5\nabcde\r\n0\r\n\r\n",
                id="a bare LF in a chunk",
            ),
            pytest.param(
                b"GET / HTTP/1.1\r\nHost: m\r\n%s folded: 1\r\n\r\n", id="a folded header"
            ),
            pytest.param(b"GET / HTTP/1.1\r\nHost: m\r\n%sX: a\0b\r\n\r\n", id="NUL in a header"),
            pytest.param(b"GET / HTTP/1.1\r\nHost: m\r\n%sX: a\rb\r\n\r\n", id="CR in a header"),
            pytest.param(b"GET /a b HTTP/1.1\r\nHost: m\r\n%s\r\n", id="a space in the target"),
            pytest.param(b"GET /#x HTTP/1.1\r\nHost: m\r\n%s\r\n", id="a fragment"),
            pytest.param(b"GET http://evil/ HTTP/1.1\r\nHost: m\r\n%s\r\n", id="another host"),
            pytest.param(
                POST + b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: 34\r\n\r\n"
                b"GET /smuggled HTTP/1.1\r\nHost: m\r\n\r\n",
                id="a request in the body of an upgrade",
            ),
            pytest.param(
                b"GET / HTTP/1.1\r\nHost: m\r\n%sConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Content-Length: 34\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: m\r\n\r\n",
                id="a GET upgrade with a body",
            ),
            pytest.param(b"CONNECT evil:443 HTTP/1.1\r\nHost: m\r\n%s\r\n", id="CONNECT"),
            pytest.param(b"TRACE / HTTP/1.1\r\nHost: m\r\n%s\r\n", id="TRACE"),
            pytest.param(
                b"GET / HTTP/1.1\r\n%sHost: m\r\n" + b"A: b\r\n" * 200 + b"\r\n", id="many"
            ),
            pytest.param(
                b"GET / HTTP/1.1\r\nHost: m\r\n%sX: " + b"a" * 20_000 + b"\r\n\r\n",
                id="a long header",
            ),
            pytest.param(
                b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: m\r\n%s\r\n", id="a long target"
            ),
        ],
    )
    async def test_it_never_reaches_the_upstream(self, tmp_path: Path, raw: bytes) -> None:
        reached: list[bytes] = []

        async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            reached.append(await reader.read(65536))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        settings = IngressSettings(
            request_timeout=timedelta(seconds=2), close_timeout=timedelta(seconds=1)
        )
        async with (
            raw_upstream(conversation) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
        ):
            answer = await running.ask(raw.replace(b"%s", AUTH.encode()))
        assert not answer.startswith(b"HTTP/1.1 2"), answer
        assert answer.count(b"HTTP/1.1 ") <= 1, "one request, one answer"
        whole = [seen for seen in reached if b"\r\n0\r\n\r\n" in seen or b"abcd" in seen]
        assert not whole
        assert "chunk" in raw.decode("latin-1") or not reached

    async def test_an_h2c_upgrade_is_an_ordinary_request(self, tmp_path: Path) -> None:
        headers = AUTH + "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            raw = get(headers=headers).replace(b"Connection: close", b"Connection: Upgrade, close")
            answer = await running.ask(raw)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"h2c" not in answer.lower()

    async def test_connection_tokens_cannot_strip_the_framing(self, tmp_path: Path) -> None:
        raw = (
            f"POST / HTTP/1.1\r\nHost: m\r\n{AUTH}Content-Length: 5\r\n"
            "Connection: close, Content-Length, Host, X-LLMKube-Relay-Token\r\n\r\nhello"
        )
        async with http_upstream(echo) as upstream, running_ingress(tmp_path, upstream) as running:
            answer = await running.ask(raw.encode())
        assert b'"body": "hello"' in answer
        assert TOKEN.encode() not in answer


SIZE = 256 * 1024 * 1024


class Flow:
    """SIZE bytes in pieces, and how many of them have been taken."""

    def __init__(self) -> None:
        self.sent = 0

    async def pieces(self) -> AsyncIterator[bytes]:
        block = bytes(1024 * 1024)
        while self.sent < SIZE:
            yield block
            self.sent += len(block)

    async def stops(self) -> None:
        """Until nothing more is taken; by then only buffers may be full."""

        async def stopped() -> bool:
            before = self.sent
            await asyncio.sleep(0.5)
            return 0 < self.sent == before

        await eventually(stopped, "the stream comes to a stop")
        assert self.sent < SIZE / 4


async def count(stream: aiohttp.StreamReader) -> int:
    return sum([len(chunk) async for chunk in stream.iter_any()])


class TestStreaming:
    async def test_each_event_arrives_as_it_is_sent(self, tmp_path: Path) -> None:
        go_on = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for number in range(5):
                await go_on.wait()
                go_on.clear()
                await response.write(b"data: %d\n\n" % number)
            return response

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.get("/", timeout=aiohttp.ClientTimeout(total=20)) as answer,
        ):
            assert answer.content_type == "text/event-stream"  # before the first event
            for number in range(5):
                go_on.set()
                assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            assert await answer.content.read() == b""

    async def test_request_and_answer_stream_at_the_same_time(self, tmp_path: Path) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            async for chunk in request.content.iter_any():
                await response.write(chunk.upper())
            return response

        heard = asyncio.Queue[bytes]()

        async def words():  # type: ignore[no-untyped-def]
            yield b"first"
            assert await heard.get() == b"FIRST"
            yield b"second"
            assert await heard.get() == b"SECOND"

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.post("/", data=words()) as answer,
        ):
            async for chunk in answer.content.iter_any():
                heard.put_nowait(chunk)

    async def test_a_client_that_leaves_stops_the_llm(self, tmp_path: Path) -> None:
        started, cancelled = asyncio.Event(), asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return response

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
        ):
            _, writer = await running.connect()
            writer.write(get())
            async with asyncio.timeout(20):
                await started.wait()
                writer.transport.abort()
                await cancelled.wait()
            await eventually(lambda: running.ingress.connections == 0, "the connection is gone")

    async def test_an_upload_cut_short_is_not_passed_on_as_whole(self, tmp_path: Path) -> None:
        seen, ended = bytearray(), asyncio.Event()

        async def conversation(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            while chunk := await reader.read(65536):
                seen.extend(chunk)
            ended.set()

        async with (
            raw_upstream(conversation) as upstream,
            running_ingress(tmp_path, upstream) as running,
        ):
            _, writer = await running.connect()
            writer.write(
                f"POST / HTTP/1.1\r\nHost: m\r\n{AUTH}Transfer-Encoding: chunked\r\n\r\n"
                "5\r\nhello\r\n".encode()
            )
            await eventually(lambda: b"hello" in seen, "the first chunk arrives")
            writer.transport.abort()
            async with asyncio.timeout(20):
                await ended.wait()
        assert not seen.endswith(b"0\r\n\r\n")

    @pytest.mark.parametrize(
        "answer",
        [
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", id="by length"),
            pytest.param(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", id="chunked"
            ),
        ],
    )
    async def test_a_broken_answer_is_broken_for_the_client(
        self, tmp_path: Path, answer: bytes
    ) -> None:
        async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

        async with (
            raw_upstream(conversation) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.get("/") as response,
        ):
            with pytest.raises(aiohttp.ClientError):
                await response.read()

    async def test_an_upload_waits_for_a_slow_llm(self, tmp_path: Path) -> None:
        """Back-pressure: what is not taken is not read, whatever its size."""
        flow, resume = Flow(), asyncio.Event()

        async def handler(request: web.Request) -> web.Response:
            await resume.wait()
            return web.Response(text=str(await count(request.content)))

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            asyncio.TaskGroup() as group,
        ):

            async def exchange() -> str:
                async with session.post("/", data=flow.pieces()) as answer:
                    return await answer.text()

            task = group.create_task(exchange())
            await flow.stops()
            resume.set()
            assert await task == str(SIZE)

    async def test_an_answer_waits_for_a_slow_client(self, tmp_path: Path) -> None:
        flow, resume = Flow(), asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Length": str(SIZE)})
            await response.prepare(request)
            async for piece in flow.pieces():
                await response.write(piece)
            return response

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            asyncio.TaskGroup() as group,
        ):

            async def exchange() -> int:
                async with session.get("/") as answer:
                    await resume.wait()
                    return await count(answer.content)

            task = group.create_task(exchange())
            await flow.stops()
            resume.set()
            assert await task == SIZE

    async def test_websockets_pass(self, tmp_path: Path) -> None:
        async def handler(request: web.Request) -> web.WebSocketResponse:
            assert "X-LLMKube-Relay-Token" not in request.headers
            ws = web.WebSocketResponse(protocols=["realtime"])
            await ws.prepare(request)
            async for message in ws:
                if message.type is WSMsgType.TEXT:
                    await ws.send_str(message.data.upper())
                else:
                    await ws.send_bytes(message.data[::-1])
                    await ws.close(code=4001)
            return ws

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.ws_connect("/v1/realtime", protocols=["other", "realtime"]) as ws,
        ):
            assert ws.protocol == "realtime"
            await ws.send_str("hello")
            assert await ws.receive_str(timeout=20) == "HELLO"
            await ws.send_bytes(b"\x01\x02")
            assert await ws.receive_bytes(timeout=20) == b"\x02\x01"
            assert (await ws.receive(timeout=20)).type is WSMsgType.CLOSE
            assert ws.close_code == 4001

    @pytest.mark.parametrize(("token", "status"), [(TOKEN, 502), ("no", 401)])
    async def test_a_websocket_needs_the_token_and_a_willing_upstream(
        self, tmp_path: Path, token: str, status: int
    ) -> None:
        async with (
            http_upstream(echo) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await session.ws_connect("/", headers={"X-LLMKube-Relay-Token": token})
            assert refused.value.status == status


class TestEndurance:
    async def test_a_silent_stranger_is_cut_off(self, tmp_path: Path) -> None:
        settings = IngressSettings(request_timeout=timedelta(milliseconds=300))
        drip = b"GET / HTTP/1.1\r\nHost: m\r\n"
        async with (
            http_upstream(echo) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
        ):
            for said in (b"", drip):
                reader, writer = await running.connect()
                writer.write(said)
                async with asyncio.timeout(20):
                    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                        await reader.readexactly(1)
                writer.transport.abort()
            await eventually(lambda: running.ingress.connections == 0, "all are gone")

    async def test_a_handshake_that_never_ends_is_cut_off(self, tmp_path: Path) -> None:
        settings = IngressSettings(handshake_timeout=timedelta(milliseconds=300))
        async with (
            http_upstream(echo) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
            async with asyncio.timeout(20):
                assert await reader.read() == b""
            writer.transport.abort()
            await eventually(lambda: running.ingress.connections == 0, "it is gone")

    async def test_at_the_cap_strangers_make_room_and_known_ones_stay(self, tmp_path: Path) -> None:
        settings = IngressSettings(max_connections=4)
        forever = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            await forever.wait()
            return web.Response(text="done")

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
        ):
            reader, known = await running.connect()
            known.write(get())
            await eventually(lambda: running.ingress.known == 1, "one is known")
            strangers = [
                await asyncio.open_connection("127.0.0.1", running.port) for _ in range(20)
            ]
            probe = await running.ask(get("/_llmkube/ready", ""))
            assert probe.startswith(b"HTTP/1.1 200")
            assert running.ingress.connections <= 4
            forever.set()
            assert b"done" in await reader.read()
            for _, writer in strangers:
                writer.transport.abort()

    async def test_an_upstream_that_is_down_says_what_to_do(self, tmp_path: Path) -> None:
        async with (
            running_ingress(tmp_path, "http://127.0.0.1:1") as running,
            running.session() as session,
            session.get("/") as answer,
        ):
            assert answer.status == 502
            assert "--upstream" in await answer.text()

    @pytest.mark.parametrize(
        "answer", [b"garbage\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
    )
    async def test_an_upstream_that_talks_nonsense_is_a_502(
        self, tmp_path: Path, answer: bytes
    ) -> None:
        async def conversation(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)

        async with (
            raw_upstream(conversation) as upstream,
            running_ingress(tmp_path, upstream) as running,
            running.session() as session,
            session.get("/") as response,
        ):
            assert response.status == 502

    async def test_a_silent_upstream_is_a_504(self, tmp_path: Path) -> None:
        settings = IngressSettings(upstream_silence=timedelta(milliseconds=300))

        async def handler(_: web.Request) -> web.StreamResponse:
            await asyncio.Event().wait()
            raise AssertionError

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream, settings) as running,
            running.session() as session,
            session.get("/") as response,
        ):
            assert response.status == 504

    async def test_draining_lets_a_running_answer_end(self, tmp_path: Path) -> None:
        go_on, started = asyncio.Event(), asyncio.Event()

        async def handler(_: web.Request) -> web.StreamResponse:
            started.set()
            await go_on.wait()
            return web.Response(text="done")

        async with (
            http_upstream(handler) as upstream,
            running_ingress(tmp_path, upstream) as running,
        ):
            reader, writer = await running.connect()
            writer.write(get())
            await started.wait()
            running.ingress.drain()
            await eventually(lambda: refused(running.port), "nobody new gets in")
            go_on.set()
            assert b"done" in await reader.read()
            writer.transport.abort()


async def refused(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return True
    writer.transport.abort()
    return False
