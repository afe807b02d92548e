"""Serves JSON control calls from a table of routes, and the data plane over WebSockets.

    route table ─▶ body decoded, limits checked ─▶ handler(body, params) ─▶ JSON, or an ErrorBody with its status
    WebSocket   ─▶ the data plane (`data_plane`)

Only loopback addresses are served, because there is no access control yet.  A user's browser is on loopback too, so
requests that it makes for a page of another site are refused (`origin`).  Callers have limits of time and number
(`intake`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import ClientConnectionResetError, web

from ..protocol.control import ErrorBody, encode_json
from ..protocol.endpoints import Endpoint
from ..protocol.errors import (
    BrokerGroupTakenError,
    BrokerGroupUnknownError,
    FencedError,
    ForeignHostError,
    GroupBusyError,
    GroupUnknownError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OperationRunningError,
    OriginError,
    PartitionUnknownError,
    QueueUnknownError,
    RefusedError,
    RequestTooSlowError,
    Retry,
    SessionUnknownError,
    StaticSubjectError,
    StrategyMismatchError,
    SubjectExistsError,
    SubjectNotStaticError,
    SubjectUnknownError,
)
from ..protocol.ids import MAX_I64
from ..protocol.limits import CONTROL_BYTES_MAX
from .answer_room import AnswerRoom
from .data_plane import STUCK_S, DataHandler, DataPlane
from .http_network import DATA_PATH
from .intake import ENCODINGS, HttpLimits, LimitedSite, decoded_body
from .listening import cannot_listen, check_loopback, check_port
from .origin import check_fetch_site, check_host, check_origins

log = logging.getLogger("keylane.rpc")

Params = Mapping[str, str]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: dict[type[KeylaneError], int] = {
    OriginError: 403,
    ForeignHostError: 421,
    RequestTooSlowError: 408,
    BrokerGroupTakenError: 409,
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
    """
    A control call and its handler.

    `handler` takes the decoded body, None if the endpoint has none, and the parameters of path and query.
    """

    endpoint: Endpoint[Any]
    handler: Callable[[Any, Params], Awaitable[object]]


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


async def _read_body(request: web.Request, body_s: float) -> bytes:
    """
    The decoded body; over `CONTROL_BYTES_MAX` decoded bytes are refused while they are read.

    Raises:
        RequestTooSlowError: the body did not come whole within `body_s` seconds.
        InvalidRequestError: the body is not what the headers say.
        HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType
    """
    encoding = ", ".join(request.headers.getall("Content-Encoding", ("identity",))).lower()
    if encoding not in ENCODINGS:
        raise web.HTTPUnsupportedMediaType(reason=f"the encoding {encoding!r:.40} is unknown")
    try:
        async with asyncio.timeout(body_s):
            data = await request.read()
    except TimeoutError:
        raise RequestTooSlowError(
            f"{request.method} {request.path[:200]!r}: the body was not there in {body_s:g} s",
            limit_ms=int(body_s * 1000),
        ) from None
    except web.RequestPayloadError as error:
        raise InvalidRequestError(
            f"{request.method} {request.path[:200]!r}: the body cannot be read: {error}"
        ) from None
    return decoded_body(data, encoding)


def _control_handler(
    route: ControlRoute, body_s: float
) -> Callable[[web.Request], Awaitable[web.Response]]:
    endpoint = route.endpoint

    async def handle(request: web.Request) -> web.Response:
        try:
            body: object = None
            if endpoint.request is not None:
                data = await _read_body(request, body_s)
                body = msgspec.json.decode(data, type=endpoint.request)
            params = dict(request.query) | dict(request.match_info)
            answer = await route.handler(body, params)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _error_response(
                InvalidRequestError(f"{endpoint.method} {endpoint.path}: {error}")
            )
        except KeylaneError as error:
            return _error_response(error)
        return web.Response(body=encode_json(answer), content_type="application/json")

    return handle


@web.middleware
async def _typed_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except KeylaneError as error:
        return _error_response(error)
    except web.HTTPRequestEntityTooLarge:
        return _error_response(
            MessageTooLargeError(
                f"{request.method} {request.path[:200]}: the body is over {CONTROL_BYTES_MAX} bytes",
                limit_bytes=CONTROL_BYTES_MAX,
            )
        )
    except web.HTTPException as error:
        text = f"{request.method} {request.path[:200]!r}: {error.status} {error.reason}"
        if error.status == 404:
            text += "; this server is another program than was meant, or of another version"
        return _error_response(InvalidRequestError(text), error.status)
    except ClientConnectionResetError:  # the client has left before its answer, or in the handshake
        return _error_response(InternalError())
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error_response(InternalError())


class Server:
    """A running server; `port` is the port that it listens on, also if 0 was asked for."""

    def __init__(
        self,
        routes: Sequence[ControlRoute],
        *,
        data_handler: DataHandler | None = None,
        room: AnswerRoom | None = None,
        stuck_s: float = STUCK_S,
        limits: HttpLimits | None = None,
    ) -> None:
        self._plane: DataPlane | None = None
        self._limits = limits or HttpLimits()
        app = web.Application(
            middlewares=[self._answers_in_time, _typed_errors, self._own_callers],
            client_max_size=CONTROL_BYTES_MAX,
        )
        for route in routes:
            handler = _control_handler(route, self._limits.body_s)
            app.router.add_route(route.endpoint.method, route.endpoint.path, handler)
        if data_handler is not None:
            self._plane = DataPlane(data_handler, room=room, stuck_s=stuck_s)
            app.router.add_get(DATA_PATH, self._plane.serve)
            app.on_shutdown.append(self._plane.close)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
        )
        self.host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """Where it listens, `host:port`."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections of the data plane."""
        return self._plane.connections if self._plane is not None else 0

    @web.middleware
    async def _answers_in_time(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Write the answer here, where the client's time to take it is limited."""
        response = await handler(request)
        if not response.prepared:
            try:
                async with asyncio.timeout(self._limits.answer_s):
                    await response.prepare(request)
                    await response.write_eof()
            except ConnectionResetError:
                pass  # the client has left, as when it ends a long poll
            except TimeoutError:
                log.warning("a client is let go: it does not take its answer")
                if request.transport is not None:
                    request.transport.abort()
        return response

    @web.middleware
    async def _own_callers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        check_host(request.headers.getall("Host", ()), self.host)
        check_fetch_site(request.headers.getall("Sec-Fetch-Site", ()))
        check_origins(request.headers.getall("Origin", ()), self.host, self.port)
        return await handler(request)

    async def start(self, host: str, port: int) -> None:
        """
        Bind and serve.

        Raises:
            HostError: `host` is not a loopback address.
            AddressError: there is no such port, or it is in use or not allowed.
        """
        check_loopback(host)
        check_port(port)
        await self._runner.setup()
        site = LimitedSite(
            self._runner,
            host,
            port,
            backlog=1024,
            limits=self._limits,
            exempt=lambda: self.connections,
        )
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


def whole_number(
    params: Params, name: str, default: int, *, low: int = 0, high: int = MAX_I64
) -> int:
    """A number of the query, `default` if it has none.  Raises InvalidRequestError."""
    text = params.get(name)
    if text is None:
        return default
    try:
        value = int(text) if len(text) <= 20 else None
    except ValueError:
        value = None
    if value is None or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is a whole number from {low} to {high}, not {text!r:.40}"
        )
    return value
