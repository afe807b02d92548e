"""Serves JSON control calls from a route table, and the data plane.

    route table ─▶ body decoded, limits checked ─▶ handler(body, params)
                ─▶ JSON, or an ErrorBody with its status
    data plane  ─▶ `plane.data_plane`

Other machines are only served with TLS (`tls`). A user's browser can also reach a server, so
requests that it makes for pages from other sites are refused (`origin`). The time that callers may
take and the number of their connections are limited (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from hmac import compare_digest
from typing import Any, NamedTuple

import msgspec
from aiohttp import ClientConnectionResetError, web

from ..protocol.access.tokens import check_no_token
from ..protocol.control import ErrorBody
from ..protocol.endpoints import DATA_PATH, FRONT, LIVE, METRICS, OPENAPI, READY
from ..protocol.errors import (
    AccessDeniedError,
    CapabilityEndedError,
    ConnectionQuotaError,
    DataFolderError,
    FencedError,
    GroupDeletedError,
    GroupUnknownError,
    InternalError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    NotSentError,
    OutcomeUnknownError,
    OverloadedError,
    PartitionUnknownError,
    QuotaExceededError,
    Reason,
    RefusedError,
    RetryRule,
    SessionUnknownError,
    StaleRouteError,
    StorageError,
    SubjectDeletedError,
    SubjectUnknownError,
    UnauthenticatedError,
)
from ..protocol.http.bodies import NAMES, check_no_nul, encode_json
from ..protocol.http.endpoint import Endpoint, Rights
from ..protocol.http.openapi import openapi_document
from ..protocol.ids import MAX_I64
from ..protocol.limits import CONNECTIONS_MAX, CONTROL_BYTES_MAX
from ..protocol.membership.versions import (
    REQUEST_ID_HEADER,
    VERSION,
    VERSION_HEADER,
    check_client,
)
from ..protocol.text import describe_invalid_value, parse_number
from .access.guard import CALLER, Guard, GuardedReply
from .access.peers import peer_of
from .access.throttling import THROTTLED_HEADER
from .access.token_file import TokenFile
from .answer_budget import AnswerBudget, begin_answer
from .intake import (
    ENCODINGS,
    HttpLimits,
    LimitedSite,
    cancelled_on_disconnect,
    decoded_body,
    limit_by_open_files,
    take_connection_slot,
)
from .listening import cannot_listen, check_loopback, check_port
from .origin import check_fetch_site, check_host, check_origins
from .pages import PageRequest, PageRoute, parse_form, send_answer
from .plane.data_plane import STUCK_S, Begin, DataHandler, DataPlane
from .request_ids import REQUEST_ID, log_fault, new_request_id
from .tls.contexts import ServerTls
from .tls.settings import ServingSettings

log = logging.getLogger("keylane.rpc")

HTTP_BYTES_MAX = 64 << 20
"""The memory budget for plain HTTP answers that contain messages, separate from the data plane's
budget.
"""

Params = Mapping[str, str]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS: dict[type[KeylaneError] | Reason, int] = {
    UnauthenticatedError: 401,
    CapabilityEndedError: 401,
    AccessDeniedError: 403,
    QuotaExceededError: 429,
    ConnectionQuotaError: 429,
    Reason.SESSION_QUOTA: 429,
    Reason.TOKEN_ID_UNKNOWN: 404,
    Reason.ORIGIN: 403,
    Reason.FOREIGN_HOST: 421,
    Reason.REQUEST_TOO_SLOW: 408,
    Reason.BROKER_GROUP_TAKEN: 409,
    SubjectUnknownError: 404,
    SubjectDeletedError: 410,
    GroupDeletedError: 410,
    GroupUnknownError: 404,
    PartitionUnknownError: 404,
    Reason.BROKER_GROUP_UNKNOWN: 404,
    Reason.SUBJECT_EXISTS: 409,
    Reason.ORDER_STRATEGY: 409,
    Reason.OPERATION_RUNNING: 409,
    Reason.SUBJECT_STATIC: 409,
    Reason.SUBJECT_NOT_STATIC: 409,
    Reason.QUEUE_UNKNOWN: 404,
    Reason.GROUP_BUSY: 409,
    FencedError: 409,
    SessionUnknownError: 410,
    Reason.INSTANCE_TAKEN: 409,
    MessageTooLargeError: 413,
    Reason.IDEMPOTENCY_KEY_REUSED: 422,
    Reason.SCHEDULED_UNKNOWN: 404,
    StaleRouteError: 503,
    NotSentError: 503,
    OutcomeUnknownError: 504,
}
"""HTTP statuses by reason or class of error; `status_of` has the rules for all other errors."""


@dataclass(frozen=True, slots=True)
class ControlRoute:
    """
    A control call and its handler.

    `handler` gets the decoded body (None if the endpoint has none) and the parameters from the
    path, the query and the endpoint's headers. It returns the body of the answer, or a Reply.
    """

    endpoint: Endpoint[Any]
    handler: Callable[[Any, Params], Awaitable[object]]
    to_database: bool = False
    """True if texts in the request reach a database, so that U+0000 is refused in all of them, not
    only in names.
    """

    def check(self, body: bytes, params: Params) -> None:
        """Check the texts in a request. Raises InvalidRequestError."""
        call = f"{self.endpoint.method} {self.endpoint.path}"
        if self.to_database:
            check_no_nul(call, body, params)
        else:
            check_no_nul(call, b"", {name: params[name] for name in NAMES & params.keys()})


class Reply(NamedTuple):
    """An answer with an explicit HTTP status."""

    body: object
    status: int


def status_of(error: KeylaneError) -> int:
    """Return the HTTP status for an error."""
    status = _STATUS.get(error.reason or type(error))
    if status is not None:
        return status
    if isinstance(error, StorageError):
        # A disk or database that is unavailable, locked or full may recover; a damaged one will
        # not.
        is_temporary = error.retry is RetryRule.LATER or isinstance(error, DataFolderError)
        return 503 if is_temporary else 500
    if not isinstance(error, RefusedError):
        return 500
    return 503 if error.retry is RetryRule.LATER else 400


TimeCall = Callable[[Endpoint[Any]], Callable[[], None]]
RefuseRequest = Callable[..., web.Response]
"""A function that returns the response for an error, with the given HTTP status or the error's
own.
"""


def _error_response(error: KeylaneError, status: int | None = None) -> web.Response:
    """Return the response for an error, with the given HTTP status or the error's own."""
    headers = {}
    if isinstance(error, QuotaExceededError):
        headers["Retry-After"] = str(max(1, math.ceil((error.retry_after_ms or 0) / 1000)))
    return web.Response(
        body=encode_json(ErrorBody.of(error)),
        status=status or status_of(error),
        content_type="application/json",
        headers=headers,
    )


async def _add_version(_request: web.Request, response: web.StreamResponse) -> None:
    """Add this server's version and the request's id to a response."""
    response.headers[VERSION_HEADER] = VERSION
    response.headers[REQUEST_ID_HEADER] = REQUEST_ID.get()


async def _read_body(request: web.Request, body_s: float) -> bytes:
    """
    Return the decompressed body, of at most `CONTROL_BYTES_MAX` bytes.

    Raises:
        InvalidRequestError: the body did not arrive within `body_s` seconds, or does not match the
            headers.
        MessageTooLargeError, HTTPRequestEntityTooLarge: the body is too large.
        HTTPUnsupportedMediaType: its encoding is not supported.
    """
    encoding = ", ".join(request.headers.getall("Content-Encoding", ("identity",))).lower()
    if encoding not in ENCODINGS:
        raise web.HTTPUnsupportedMediaType(reason=f"the encoding {encoding!r:.40} is unknown")
    try:
        async with asyncio.timeout(body_s):
            data = await request.read()
    except TimeoutError:
        raise InvalidRequestError(
            Reason.REQUEST_TOO_SLOW,
            f"{request.method} {request.path[:200]!r}: the body did not arrive in {body_s:g} s",
            limit_ms=int(body_s * 1000),
        ) from None
    except (web.RequestPayloadError, OSError) as error:  # OSError: the client has disconnected
        raise InvalidRequestError(
            f"{request.method} {request.path[:200]!r}: the body cannot be read: {error}"
        ) from None
    return decoded_body(data, encoding)


def _control_handler(
    route: ControlRoute,
    body_s: float,
    refuse: RefuseRequest,
    guard: Guard | None,
    *,
    by_certificate: bool,
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return the aiohttp handler for a route: it checks access, decodes the request, and calls the
    route's handler.
    """
    endpoint = route.endpoint

    async def read_request(request: web.Request) -> tuple[Any, Params, int]:
        body: object = None
        data = b""
        if endpoint.rights is not Rights.OPEN:
            # The guard reads the body after it has identified the caller.
            caller = CALLER.get()
            take_connection_slot(request, "" if caller.is_server else caller.principal)
        if endpoint.request is not None:
            data = await _read_body(request, body_s)
            is_raw = endpoint.request is bytes
            body = data if is_raw else msgspec.json.decode(data, type=endpoint.request)
        params = _read_params(request, endpoint.headers)
        route.check(data, params)
        return body, params, len(data)

    async def handle(request: web.Request) -> web.Response:
        guarded_reply: GuardedReply | None = None
        try:
            if guard is None:
                body, params, _size = await read_request(request)
                answer = await route.handler(body, params)
            else:
                guarded_reply = await guard.handle_request(
                    endpoint,
                    request.headers.getall("Authorization", ()),
                    request.remote or "",
                    partial(read_request, request),
                    route.handler,
                    peer_of(request.get_extra_info("peercert")) if by_certificate else None,
                )
                answer = guarded_reply.answer
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            error_to_send = InvalidRequestError(
                f"{endpoint.method} {endpoint.path}: "
                f"{describe_invalid_value(error, endpoint.request)}"
            )
            if guard is not None:
                guard.record_refusal(request.remote or "", _action_text(request), error_to_send)
            return refuse(error_to_send)
        except KeylaneError as error:
            return refuse(error)
        status = 200
        if isinstance(answer, Reply):
            answer, status = answer
        is_text = endpoint.answer is str
        data = str(answer).encode() if is_text else encode_json(answer)
        headers = {"Content-Type": endpoint.response_type if is_text else "application/json"}
        if guard is not None and guarded_reply is not None:
            guard.charge(guarded_reply.caller, len(data))
            if guarded_reply.waited_ms:
                headers[THROTTLED_HEADER] = str(guarded_reply.waited_ms)
        return web.Response(body=data, status=status, headers=headers)

    async def handle_while_connected(request: web.Request) -> web.Response:
        with cancelled_on_disconnect(request):
            return await handle(request)

    return handle_while_connected if endpoint.is_get else handle


def _timed(route: ControlRoute, time_call: TimeCall) -> ControlRoute:
    """Return the route with a handler that is timed, unless a call waits for a change."""

    async def handle(body: Any, params: Params) -> object:
        if getattr(body, "wait_ms", 0) or params.get("wait_ms", "0") != "0":
            return await route.handler(body, params)
        end_call = time_call(route.endpoint)
        try:
            return await route.handler(body, params)
        finally:
            end_call()

    return replace(route, handler=handle)


def _action_text(request: web.Request) -> str:
    """Return the method and route of a request for the audit log, without the values in its
    path.
    """
    resource = request.match_info.route.resource
    return f"{request.method[:10]} {'another path' if resource is None else resource.canonical}"


def _read_params(request: web.Request, names: Sequence[str]) -> dict[str, str]:
    """Return the parameters from the query and path, and the headers with these names. Raises
    InvalidRequestError if a parameter is given twice.
    """
    header_pairs = [(name, value) for name in names for value in request.headers.getall(name, ())]
    pairs = [*request.query.items(), *header_pairs]
    params = dict(pairs)
    if len(params) < len(pairs):
        duplicate = next(name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1)
        raise InvalidRequestError(f"{duplicate[:80]!r} is given more than once")
    for name in names:
        if name in request.query:
            raise InvalidRequestError(f"{name} is a header, not a parameter")
    return params | request.match_info


def document_route(endpoints: Sequence[Endpoint[Any]], program: str) -> ControlRoute:
    """Return the route for a program's OpenAPI document, which is built on the first request."""

    @cache
    def document() -> object:
        return openapi_document([*endpoints, METRICS, OPENAPI, FRONT], program=program)

    async def openapi(_body: object, _params: Params) -> object:
        return document()

    return ControlRoute(OPENAPI, openapi)


def front_route(served: Sequence[Endpoint[Any]], program: str, use: str) -> ControlRoute:
    """Return the route for the page that tells a person what this server is; `use` says who calls
    it.
    """
    calls = [
        f"  {each.method:<6} {each.path:<58} {each.summary}"
        for each in (*served, METRICS, OPENAPI)
        if each.rights is not Rights.CLUSTER
    ]
    page = "\n".join(
        [f"This is a {program} of keylane {VERSION}, a message broker.", use, "", "Calls:", *calls]
    )

    async def front(_body: object, _params: Params) -> str:
        return f"{page}\n"

    return ControlRoute(FRONT, front)


PROBED = frozenset({METRICS.path, LIVE.path, READY.path})
"""Paths for scrapers and probes, which may use other host names for the server than clients do."""
READ_METRICS = replace(METRICS, rights=Rights.ANY)
"""The metrics endpoint where a token is required. It needs a right on every subject."""


class Server:
    """An HTTP server for control calls, and for the data plane if it has one. `port` is the actual
    port, even if 0 was requested.
    """

    def __init__(
        self,
        routes: Sequence[ControlRoute],
        *,
        data_handler: DataHandler | None = None,
        data_begin: Begin = lambda _request, _payload, _call: False,
        answer_budget: AnswerBudget | None = None,
        stuck_s: float = STUCK_S,
        limits: HttpLimits | None = None,
        on_refusal: Callable[[KeylaneError], None] = lambda _error: None,
        time_call: TimeCall = lambda _endpoint: lambda: None,
        serving: ServingSettings | None = None,
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        data_connections_max: int = CONNECTIONS_MAX,
        pages: Sequence[PageRoute] = (),
    ) -> None:
        """
        Args:
            routes: the control calls and their handlers.
            pages: the pages for people.
            data_handler: answers a data-plane request; None if there is no data plane.
            data_begin: answers a request without a task if possible; see `DataService.begin`.
            on_refusal: called with each error that is sent.
            time_call: called before a control call is handled; the function that it returns is
                called afterwards.
            data_connections_max: the maximum number of data-plane connections; with a guard, it is
                reduced to half of the files that the process may open.
            serving: the settings of the server; None for loopback only, without TLS.
            tls: the TLS of `serving`, if it has any.
            guard: the access control of the server; if None, every caller may do everything.
        """
        self._serving = serving or ServingSettings()
        self._tls = tls
        self._guard = guard
        path = self._serving.metrics_token_file
        self._scraper_token = None if path is None else TokenFile(path)
        self._plane: DataPlane | None = None
        self._on_refusal = on_refusal
        self._limits = limits or HttpLimits()
        self._http_budget = AnswerBudget(bytes_max=HTTP_BYTES_MAX)
        app = web.Application(
            middlewares=[self._limit_answer_time, self._typed_errors, self._check_headers],
            client_max_size=CONTROL_BYTES_MAX,
        )
        app.on_response_prepare.append(_add_version)
        for route in routes:
            handler = _control_handler(
                _timed(route, time_call),
                self._limits.body_s,
                self._refuse,
                guard,
                by_certificate=self._serving.tls_client_principals,
            )
            app.router.add_route(route.endpoint.method, route.endpoint.path, handler)
        for page_route in pages:
            serve = partial(self._serve_page, page_route)
            for method in ("GET", "POST"):
                app.router.add_route(method, page_route.prefix + "{rest:(/.*)?}", serve)
        if data_handler is not None:
            self._plane = DataPlane(
                data_handler,
                answer_budget=answer_budget,
                stuck_s=stuck_s,
                on_refusal=on_refusal,
                guard=guard,
                begin=data_begin,
                connections_max=data_connections_max
                if guard is None
                else limit_by_open_files(data_connections_max),
            )
            app.router.add_get(DATA_PATH, self._plane.serve)
            app.on_shutdown.append(self._plane.close)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
        )
        self.host = ""
        self.port = 0

    async def _serve_page(self, route: PageRoute, request: web.Request) -> web.StreamResponse:
        """Answer a request for a page."""

        async def identify(token: str) -> str:
            if self._guard is None:
                return ""
            try:
                caller = await self._guard.caller(READ_METRICS, (f"Bearer {token}",))
            except KeylaneError as error:
                self._guard.record_refusal(request.remote or "", _action_text(request), error)
                raise
            take_connection_slot(request, "" if caller.is_server else caller.principal)
            return caller.principal

        body = b"" if request.method == "GET" else await _read_body(request, self._limits.body_s)
        answer = await route.handler(
            PageRequest(
                method=request.method,
                path=request.match_info["rest"],
                query=request.query,
                cookies=request.cookies,
                form=parse_form(request.content_type, body),
                is_secure=self._tls is not None,
                identify=identify,
            )
        )
        with cancelled_on_disconnect(request):
            return await send_answer(request, answer, write_s=self._limits.answer_s)

    def _refuse(self, error: KeylaneError, status: int | None = None) -> web.Response:
        self._on_refusal(error)
        log.debug("a call is refused: %s", error.message)
        return _error_response(error, status)

    def _refuse_unrouted(
        self, request: web.Request, error: KeylaneError, status: int | None = None
    ) -> web.Response:
        """Refuse a request that reaches no handler, and write it to the audit log."""
        if self._guard is not None:
            self._guard.record_refusal(request.remote or "", _action_text(request), error)
        return self._refuse(error, status)

    @property
    def address(self) -> str:
        """The address at which others reach this server, as `host:port`."""
        host = self._serving.advertised_host or self.host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def _host_names(self) -> set[str]:
        """The host names by which callers may reach this server."""
        names = {self.host, self._serving.advertised_host}
        if self._tls is not None:
            names |= self._tls.names
        return {name.lower() for name in names if name}

    @property
    def connections(self) -> int:
        """The number of open data-plane connections."""
        return self._plane.connections if self._plane is not None else 0

    @property
    def data_connections_max(self) -> int:
        """The maximum number of data-plane connections; 0 if there is no data plane."""
        return self._plane.connections_max if self._plane is not None else 0

    @web.middleware
    async def _limit_answer_time(
        self, request: web.Request, handler: Handler
    ) -> web.StreamResponse:
        """Give the request an id. Write the response here instead of in aiohttp, to limit the time
        that the client takes to read it.
        """
        REQUEST_ID.set(new_request_id())
        reservation = begin_answer(self._http_budget.for_connection())
        try:
            response = await handler(request)
            if not response.prepared:
                assert isinstance(response, web.Response)
                # always bytes here
                reservation.settle(len(response.body or b""))  # type: ignore[arg-type]
                try:
                    async with asyncio.timeout(self._limits.answer_s):
                        await response.prepare(request)
                        await response.write_eof()
                except ConnectionResetError:
                    pass  # the client has disconnected, for example to end a long poll
                except TimeoutError:
                    error = OverloadedError(
                        Reason.ANSWER_NOT_TAKEN,
                        f"a client has not read its answer within {self._limits.answer_s:g} s",
                    )
                    log.warning("a client is disconnected: %s", error.message)
                    self._record_refused_caller(error, _action_text(request), request.remote or "")
                    if request.transport is not None:
                        request.transport.abort()
            return response
        finally:
            reservation.release()

    @web.middleware
    async def _typed_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every exception raised by a handler or by aiohttp into a typed error response."""
        try:
            return await handler(request)
        except KeylaneError as error:
            return self._refuse_unrouted(request, error)
        except web.HTTPRequestEntityTooLarge:
            return self._refuse_unrouted(
                request,
                MessageTooLargeError(
                    f"{request.method} {request.path[:200]}: the body is over "
                    f"{CONTROL_BYTES_MAX} bytes",
                    limit_bytes=CONTROL_BYTES_MAX,
                ),
            )
        except web.HTTPException as error:
            text = f"{request.method} {request.path[:200]!r}: {error.status} {error.reason}"
            if error.status == 404:
                text += "; this server may be another program, or another version"
            if error.status in (404, 405):
                unknown = InvalidRequestError(text, unknown_call=1)
                return self._refuse_unrouted(request, unknown, error.status)
            return self._refuse_unrouted(request, InvalidRequestError(text), error.status)
        except ClientConnectionResetError:  # nobody is left to read this response
            return _error_response(InternalError())
        except Exception as error:  # noqa: BLE001 - logged as a bug
            return self._refuse(log_fault(log, f"{request.method} {request.path}", error))

    @web.middleware
    async def _check_headers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests for another host, from web pages of other sites, from unsupported
        versions, and with a token in the URL.
        """
        names = self._host_names
        is_probe = request.path in PROBED
        patterns = self._serving.metrics_hosts if is_probe else None
        check_host(request.headers.getall("Host", ()), names, patterns)
        check_fetch_site(request.headers.getall("Sec-Fetch-Site", ()))
        origins = request.headers.getall("Origin", ())
        check_origins(origins, names, self.port, scheme="http" if self._tls is None else "https")
        if self._guard is not None:
            check_no_token(request.path, request.query)
        if (version := request.headers.get(VERSION_HEADER)) is not None:
            check_client(version, VERSION)
        if self._scraper_token is not None and request.path == METRICS.path:
            await self._check_scraper(request, self._scraper_token())
        return await handler(request)

    async def _check_scraper(self, request: web.Request, token: str) -> None:
        """
        Check that the caller of the metrics endpoint has the scrapers' token, or a right on every
        subject.

        Raises:
            UnauthenticatedError, CapabilityEndedError, AccessDeniedError: the caller has neither.
        """
        authorization = request.headers.getall("Authorization", ())
        if len(authorization) == 1 and compare_digest(
            authorization[0].encode(), f"Bearer {token}".encode()
        ):
            return
        if self._guard is None:
            raise UnauthenticatedError(
                "the metrics need the token of the server's setting metrics_token_file",
                problem="no token",
            )
        peer = None
        if self._serving.tls_client_principals:
            peer = peer_of(request.get_extra_info("peercert"))
        caller = await self._guard.caller(READ_METRICS, authorization, peer)
        caller.check(READ_METRICS.rights, "")

    async def start(self, host: str, port: int) -> None:
        """
        Bind to the address, and start to serve.

        Raises:
            AddressError: the port is invalid, in use or not allowed; or `host` is not a loopback
                address, and there is neither TLS nor `insecure_network`.
        """
        if not self._serving.is_open:
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
            tls=self._tls,
            on_refused=self._record_refused_caller,
            guarded=self._guard is not None,
        )
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(host, port, error) from error
        self.host = host
        self.port = self._runner.addresses[0][1]

    def _record_refused_caller(self, error: KeylaneError, action: str, remote: str) -> None:
        """Count a caller that was refused before it made a request, and write it to the audit
        log.
        """
        self._on_refusal(error)
        if self._guard is not None:
            self._guard.record_refusal(remote, action, error)

    async def stop(self) -> None:
        """Stop serving, and close all connections."""
        await self._runner.cleanup()


def whole_number(
    params: Params, name: str, default: int, *, low: int = 0, high: int = MAX_I64
) -> int:
    """Return a numeric query parameter, or `default` if it is missing. Raises
    InvalidRequestError.
    """
    text = params.get(name)
    if text is None:
        return default
    value = parse_number(text.removeprefix("-"))
    if value is not None and text.startswith("-"):
        value = -value
    if value is None or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} is a whole number from {low} to {high}, not {text!r:.40}"
        )
    return value


def check_params(endpoint: Endpoint[Any], params: Params) -> None:
    """Raise InvalidRequestError if there is a parameter that the endpoint does not have, such as a
    misspelled one.
    """
    names = {*endpoint.query, *endpoint.headers}
    unknown = [name for name in params if name not in names and f"{{{name}}}" not in endpoint.path]
    if unknown:
        raise InvalidRequestError(
            f"{endpoint.method} {endpoint.path} has no parameter {unknown[0]!r:.80}, "
            f"only {', '.join(endpoint.query)}"
        )
