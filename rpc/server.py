"""Serving: JSON control calls from a table of routes, and the data plane over WebSockets.

    route table ─▶ body decoded, limits checked ─▶ handler(body, params) ─▶ JSON, or an ErrorBody with its status
    WebSocket   ─▶ the data plane (`data_plane`)

Only loopback addresses are served: there is no access control yet.  A user's browser is on loopback too: what it asks
for a page of another site is refused (`origin`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from ..protocol.control import ErrorBody, encode_json
from ..protocol.errors import (
    BrokerGroupUnknownError,
    FencedError,
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
from .listening import cannot_listen, check_loopback, check_port
from .origin import check_origins

log = logging.getLogger("keylane.rpc")

Params = Mapping[str, str]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: dict[type[KeylaneError], int] = {
    OriginError: 403,
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
        return _error_response(InvalidRequestError(text), error.status)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error_response(InternalError())


class Server:
    """A running server; `port` is the one bound, also when 0 was asked for."""

    def __init__(
        self,
        routes: Sequence[ControlRoute],
        *,
        data_handler: DataHandler | None = None,
        room: AnswerRoom | None = None,
        stuck_s: float = STUCK_S,
    ) -> None:
        self._plane: DataPlane | None = None
        app = web.Application(
            middlewares=[_typed_errors, self._own_pages], client_max_size=CONTROL_BYTES_MAX
        )
        for route in routes:
            app.router.add_route(route.method, route.path, _control_handler(route))
        if data_handler is not None:
            self._plane = DataPlane(data_handler, room=room, stuck_s=stuck_s)
            app.router.add_get(DATA_PATH, self._plane.serve)
            app.on_shutdown.append(self._plane.close)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        self.host = ""
        self.port = 0

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def connections(self) -> int:
        """Open connections of the data plane."""
        return self._plane.connections if self._plane is not None else 0

    @web.middleware
    async def _own_pages(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        check_origins(request.headers.getall("Origin", ()), self.host, self.port)
        return await handler(request)

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


def whole_number(
    params: Params, name: str, default: int, *, low: int = 0, high: int = MAX_I64
) -> int:
    """A number of the query.  Raises InvalidRequestError."""
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
