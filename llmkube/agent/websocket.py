"""A WebSocket through the ingress: messages pass both ways until one side closes.

Two handshakes, one with the LLM server and, once that has agreed, one with the client; so
extensions and framing are each side's own. `llmkube.agent.relay` has checked the token before.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp import WSMessage, WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from llmkube.agent.httprules import websocket_headers
from llmkube.log import get_logger

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
PING_SECONDS: Final = 30.0

Side = web.WebSocketResponse | aiohttp.ClientWebSocketResponse

log = get_logger(__name__)


async def relay_websocket(
    request: web.BaseRequest,
    session: aiohttp.ClientSession,
    url: str,
    headers: CIMultiDict[str],
) -> web.StreamResponse:
    """Relay until either side is gone. Raises nothing: a refusal is answered with its status."""
    try:
        far = await session.ws_connect(
            URL(url, encoded=True),
            headers=websocket_headers(headers),
            protocols=_offered(request),
            max_msg_size=MAX_MESSAGE_BYTES,
            heartbeat=PING_SECONDS,
        )
    except aiohttp.WSServerHandshakeError as error:
        return _refused(error.status, "the LLM server does not take the WebSocket")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.info("no WebSocket to the LLM server", why=str(error))
        return _refused(502, "the LLM server does not answer")
    async with far:
        near = web.WebSocketResponse(
            protocols=[far.protocol] if far.protocol else [],
            max_msg_size=MAX_MESSAGE_BYTES,
            heartbeat=PING_SECONDS,
            compress=False,
        )
        await near.prepare(request)
        await _join(near, far)
        return near


def _refused(status: int, text: str) -> web.Response:
    response = web.Response(status=status if 400 <= status < 600 else 502, text=text + "\n")
    response.force_close()
    return response


def _offered(request: web.BaseRequest) -> tuple[str, ...]:
    values = request.headers.getall("Sec-WebSocket-Protocol", [])
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())


async def _join(near: web.WebSocketResponse, far: aiohttp.ClientWebSocketResponse) -> None:
    """Two pumps; the one that ends closes the other side, which ends the other pump."""
    async with asyncio.TaskGroup() as group:
        group.create_task(_pump(near, far))
        group.create_task(_pump(far, near))


async def _pump(source: Side, sink: Side) -> None:
    try:
        async for message in source:
            await _pass_on(message, sink)
    except (ConnectionError, aiohttp.ClientError) as error:
        log.debug("a WebSocket broke off", why=str(error))
    finally:
        await sink.close(code=source.close_code or aiohttp.WSCloseCode.GOING_AWAY)


async def _pass_on(message: WSMessage, sink: Side) -> None:
    if message.type is WSMsgType.TEXT:
        await sink.send_str(message.data)
    elif message.type is WSMsgType.BINARY:
        await sink.send_bytes(message.data)
