"""Serving: JSON control calls from a table of routes, and the data plane over WebSockets.

    route table ─▶ body decoded, limits checked ─▶ handler(body, params) ─▶ JSON, or an ErrorBody with its status
    WebSocket   ─▶ frames in order of arrival   ─▶ handler(request, payload, connection) ─▶ frame, in any order

Only loopback addresses are served: there is no access control yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from ..protocol.control import ErrorBody, encode_json
from ..protocol.errors import (
    BrokerGroupUnknownError,
    FencedError,
    FrameError,
    GroupBusyError,
    GroupUnknownError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OperationRunningError,
    PartitionUnknownError,
    QueueUnknownError,
    RefusedError,
    Retry,
    SessionUnknownError,
    StaticSubjectError,
    StrategyMismatchError,
    SubjectExistsError,
    SubjectNotStaticError,
    SubjectUnknownError,
)
from ..protocol.frames import Answer, Request, decode_request, encode_frame, refusal
from ..protocol.limits import (
    CONNECTIONS_MAX,
    CONTROL_BYTES_MAX,
    FRAME_BYTES_MAX,
    IN_FLIGHT_PER_CONNECTION_MAX,
)
from .http_network import DATA_PATH, HEARTBEAT_SECONDS
from .listening import cannot_listen, check_loopback, check_port

log = logging.getLogger("keylane.rpc")

Params = Mapping[str, str]
DataHandler = Callable[[Request, memoryview], Awaitable[tuple[Answer, bytes]]]

_STATUS: dict[type[KeylaneError], int] = {
    SubjectUnknownError: 404,
    GroupUnknownError: 404,
    PartitionUnknownError: 404,
    BrokerGroupUnknownError: 404,
    SubjectExistsError: 409,
    StrategyMismatchError: 409,
    OperationRunningError: 409,
    StaticSubjectError: 409,
    SubjectNotStaticError: 409,
    QueueUnknownError: 404,
    GroupBusyError: 409,
    FencedError: 409,
    SessionUnknownError: 410,
    MessageTooLargeError: 413,
}


@dataclass(frozen=True, slots=True)
class ControlRoute:
    """One control call: `path` in aiohttp's form, `body` the struct to decode, None for none."""

    method: str
    path: str
    body: type[msgspec.Struct] | None
    handler: Callable[[object, Params], Awaitable[object]]


def status_of(error: KeylaneError) -> int:
    """The HTTP status of an error."""
    status = _STATUS.get(type(error))
    if status is not None:
        return status
    if not isinstance(error, RefusedError):
        return 500
    return 503 if error.retry is Retry.LATER else 400


def _error_response(error: KeylaneError, status: int | None = None) -> web.Response:
    return web.Response(
        body=encode_json(ErrorBody.of(error)),
        status=status or status_of(error),
        content_type="application/json",
    )


def _control_handler(route: ControlRoute) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body: object = None
            if route.body is not None:
                body = msgspec.json.decode(await request.read(), type=route.body)
            params = dict(request.query) | dict(request.match_info)
            answer = await route.handler(body, params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _error_response(InvalidRequestError(f"{route.method} {route.path}: {error}"))
        except KeylaneError as error:
            return _error_response(error)
        return web.Response(body=encode_json(answer), content_type="application/json")

    return handle


@web.middleware
async def _typed_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(
            MessageTooLargeError(
                f"{request.method} {request.path[:200]}: the body is over {CONTROL_BYTES_MAX} bytes",
                limit_bytes=CONTROL_BYTES_MAX,
            )
        )
    except web.HTTPException as error:
        text = f"{request.method} {request.path[:200]!r}: {error.status} {error.reason}"
        return _error_response(InvalidRequestError(text), error.status)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error_response(InternalError())


class _DataPlane:
    """Serves WebSocket connections; one bad frame ends its connection, with a typed word, and no other."""

    def __init__(self, handler: DataHandler) -> None:
        self._handler = handler
        self._sockets: set[web.WebSocketResponse] = set()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if len(self._sockets) >= CONNECTIONS_MAX:
            raise web.HTTPServiceUnavailable(reason="too many connections")
        socket = web.WebSocketResponse(
            max_msg_size=FRAME_BYTES_MAX, compress=False, heartbeat=HEARTBEAT_SECONDS, timeout=1.0
        )
        await socket.prepare(request)
        self._sockets.add(socket)
        room = asyncio.Semaphore(IN_FLIGHT_PER_CONNECTION_MAX)
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for message in socket:
                if message.type is WSMsgType.ERROR:  # aiohttp has closed the socket, with a code
                    log.warning("a broken WebSocket message: %s", message.data)
                    break
                try:
                    if message.type is not WSMsgType.BINARY:
                        raise FrameError("a text frame on the data plane")
                    asked, payload = decode_request(message.data)
                except FrameError as error:
                    await self._refuse(socket, error)
                    break
                await room.acquire()
                task = asyncio.create_task(self._answer(socket, asked, payload, room))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            self._sockets.discard(socket)
            for task in tasks:
                task.cancel()
        return socket

    @staticmethod
    async def _refuse(socket: web.WebSocketResponse, error: FrameError) -> None:
        try:
            await socket.send_bytes(encode_frame(refusal(0, error)))
            await socket.close(code=WSCloseCode.PROTOCOL_ERROR, message=b"FrameError")
        except (ConnectionError, RuntimeError):
            log.debug("the client left before it was refused")

    async def _answer(
        self,
        socket: web.WebSocketResponse,
        asked: Request,
        payload: memoryview,
        room: asyncio.Semaphore,
    ) -> None:
        try:
            try:
                frame = encode_frame(*await self._handler(asked, payload))
            except KeylaneError as error:
                frame = encode_frame(refusal(asked.correlation_id, error))
            except Exception:
                log.exception("%s failed", type(asked).__name__)
                frame = encode_frame(refusal(asked.correlation_id, InternalError()))
            if not socket.closed:
                await socket.send_bytes(frame)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")
        finally:
            room.release()

    async def close(self, _app: web.Application) -> None:
        closing = [
            socket.close(code=WSCloseCode.GOING_AWAY, message=b"stopping")
            for socket in list(self._sockets)
        ]
        await asyncio.gather(*closing, return_exceptions=True)


class Server:
    """A running server; `port` is the one bound, also when 0 was asked for."""

    def __init__(
        self, routes: Sequence[ControlRoute], *, data_handler: DataHandler | None = None
    ) -> None:
        app = web.Application(middlewares=[_typed_errors], client_max_size=CONTROL_BYTES_MAX)
        for route in routes:
            app.router.add_route(route.method, route.path, _control_handler(route))
        if data_handler is not None:
            plane = _DataPlane(data_handler)
            app.router.add_get(DATA_PATH, plane.serve)
            app.on_shutdown.append(plane.close)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    async def start(self, host: str, port: int) -> None:
        """
        Bind and serve.

        Raises:
            HostError: not loopback.
            AddressError: no port, in use, or not allowed.
        """
        check_loopback(host)
        check_port(port)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024, reuse_address=True)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(host, port, error) from error
        self.host = host
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close connections and stop serving."""
        await self._runner.cleanup()
