"""Limits the plain HTTP callers of a server: the time for each part of a request, and the number of
connections.

    accepted ─▶ below the limit? ─no─▶ close the oldest unidentified connection, or answer 503
                  │yes
                  ▼
    headers, within `head_s` ─▶ body, within `body_s` ─▶ handler ─▶ answer, within `answer_s` ─▶
    next headers

Invariants
    A connection that does not send complete request headers in time is closed, even if it is idle.
    A data-plane connection counts until its upgrade is done. After that, it has its own limits.
    A call that changes nothing is cancelled when its client disconnects, so that clients that come
    and go cannot pile up long polls without limit. A call that changes something runs to its end.
    With access control, unidentified callers take no slots from identified ones, and a principal
    with more than its equal share of the slots gives some up to those with less.
    Connections of the cluster's servers need no slot, and are never closed to make room for others.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import ClientConnectionResetError, web
from aiohttp.http import HttpProcessingError, RawRequestMessage

from ..protocol.control import ErrorBody
from ..protocol.errors import (
    ConnectionQuotaError,
    InvalidRequestError,
    KeylaneError,
    MessageTooLargeError,
    OverloadedError,
    Reason,
)
from ..protocol.http.bodies import encode_json
from ..protocol.limits import CONTROL_BYTES_MAX, HTTP_CONNECTIONS_MAX
from .access.connection_slots import ConnectionSlots
from .tls.contexts import ServerTls
from .tls.listeners import listen
from .tls.server_handshakes import TlsHandshakes

REFUSED_S = 0.5
"""The time in seconds that a refused caller has to read the answer before its connection is
closed.
"""
LINGERING_S = 2.0
"""The time in seconds for which an unread body is drained; otherwise the sender might not read the
answer.
"""
FILES_SHARE = 2
"""Connections use at most 1 / FILES_SHARE of the file descriptors that the process may open; the
rest is for data.
"""
UNAUTHENTICATED_SHARE = 16
"""With access control, the limit is raised by 1 / UNAUTHENTICATED_SHARE for connections whose
callers are not identified yet.
"""
SERVERS_MAX = 1_000
"""With access control, the number of connections from the cluster's servers that are exempt from
the limit.
"""
ENCODINGS = frozenset({"identity", "gzip", "deflate"})
"""The accepted values of `Content-Encoding`."""


def is_own_error(record: logging.LogRecord) -> bool:
    """Return True if a record in aiohttp's log is about an error in keylane. Bytes that are not
    HTTP are the caller's error, and must not fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


http_log = logging.getLogger("keylane.rpc.http")
"""The log that aiohttp writes to."""
http_log.addFilter(is_own_error)


def limit_by_open_files(connections: int) -> int:
    """Return a limit for connections, reduced to what the process's limit for open files allows."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        connections
        if soft == resource.RLIM_INFINITY
        else max(1, min(connections, soft // FILES_SHARE))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """The limits for plain HTTP; times are in seconds."""

    connections_max: int = HTTP_CONNECTIONS_MAX
    head_s: float = 20.0
    """The time to send the headers of a request, and the time that a connection may be idle. It is
    longer than clients keep idle connections (keylane: 4 s, aiohttp: 15 s), so that no client sends
    on a connection that is being closed.
    """
    body_s: float = 30.0
    answer_s: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "connections_max", limit_by_open_files(self.connections_max))


class _Handler(web.RequestHandler):
    """The server's end of a connection. Bytes that are not HTTP are answered with a typed error."""

    __slots__ = (
        "_headers_begun",
        "_callers",
        "_head_s",
        "_on_refused",
        "cancels_on_disconnect",
        "principal",
    )

    def __init__(
        self,
        *args: Any,
        on_refused: Callable[[KeylaneError, str, str], None],
        callers: HttpCallers | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._on_refused = on_refused
        self._callers = callers
        self.principal = ""
        """The principal whose slot the connection has; "" before the caller is identified, and for
        servers.
        """
        self._head_s: float = kwargs["keepalive_timeout"]
        self._headers_begun = False
        """True while the headers of a request have only arrived in part."""
        self.cancels_on_disconnect = False
        """True during a call that is cancelled when the client disconnects."""

    def force_close(self) -> None:
        """Close the connection. aiohttp calls this when the headers did not arrive in time."""
        if self._headers_begun and self.transport is not None and not self.transport.is_closing():
            self._headers_begun = False
            error = InvalidRequestError(
                Reason.REQUEST_TOO_SLOW,
                f"incomplete request headers after {self._head_s:g} s",
                limit_ms=int(self._head_s * 1000),
            )
            self._on_refused(error, "head of a request", self._remote())
        super().force_close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the new connection, whose caller is not identified yet."""
        super().connection_made(transport)
        if self._callers is not None:
            self._callers.add_unidentified(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the slot, and cancel a call that changes nothing."""
        self._headers_begun = False
        self.release()
        task = self._task_handler if self.cancels_on_disconnect else None
        super().connection_lost(exc)
        if task is not None:
            task.cancel()

    def identify_caller(self, principal: str) -> None:
        """
        Take a slot for the identified caller, or for a server of the cluster if `principal` is "".

        Raises:
            OverloadedError: see `HttpCallers.acquire`.
        """
        if self._callers is None or self.transport is None:
            return  # a client that has disconnected needs no slot, though its call continues
        if not principal:
            self._callers.exempt_server(self)
        elif principal != self.principal:
            self._callers.acquire(self, principal)

    def release(self) -> None:
        """Release the connection's slot, because it has moved to the data plane or was closed."""
        if self._callers is not None:
            self._callers.release(self)

    def evict(self, error: KeylaneError) -> None:
        """Close the connection with `error`, to make room for another one."""
        self._on_refused(error, "connection", self._remote())
        if self.transport is not None:
            self.transport.abort()

    def _remote(self) -> str:
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def data_received(self, data: bytes) -> None:
        """If a body is truncated, fail the read immediately; aiohttp's parser would only report the
        error with the next request.
        """
        idle = self._current_request is None and not self._messages
        super().data_received(data)
        self._headers_begun = idle and not self._messages and self._current_request is None
        if self._messages and not isinstance(self._messages[-1][0], RawRequestMessage):
            request = self._current_request
            if request is not None:
                request.content.set_exception(web.RequestPayloadError("the body is truncated"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not HTTP with an InvalidRequestError instead of aiohttp's text."""
        response = super().handle_error(request, status, exc, message)
        if status == 500 or not isinstance(response, web.Response):
            return response
        error = InvalidRequestError(f"the request is not HTTP: {message}")
        self._on_refused(error, "no HTTP", request.remote or "")
        response = web.Response(
            body=encode_json(ErrorBody.of(error)), status=status, content_type="application/json"
        )
        response.force_close()
        return response


class HttpCallers:
    """
    The HTTP connections of a server that has access control, and their slots.

    Args:
        slots: the number of connections for identified callers; servers of the cluster do not
            count.
    """

    def __init__(self, slots: int) -> None:
        self._slots: ConnectionSlots[_Handler] = ConnectionSlots(slots)
        self._unidentified: dict[_Handler, None] = {}
        """Connections of unidentified callers, oldest first."""
        self._servers: set[_Handler] = set()

    @property
    def exempt_count(self) -> int:
        """The number of connections from the cluster's servers that do not count."""
        return min(len(self._servers), SERVERS_MAX)

    def add_unidentified(self, handler: _Handler) -> None:
        """Add a new connection whose caller is not identified yet."""
        self._unidentified[handler] = None

    def release(self, handler: _Handler) -> None:
        """Remove a connection, and release its slot."""
        self._unidentified.pop(handler, None)
        self._servers.discard(handler)
        self._slots.release(handler)
        handler.principal = ""

    def acquire(self, handler: _Handler, principal: str) -> None:
        """
        Give a slot to a connection whose caller is now identified.

        Raises:
            OverloadedError: all slots are taken, and the principal already has its equal share.
        """
        limit = self._slots.limit
        grant = self._slots.acquire(handler, principal)
        if not grant.is_granted:
            raise OverloadedError("too many HTTP connections", limit=limit)
        if (evicted_handler := grant.evicted_connection) is not None:
            text = (
                f"{grant.evicted_principal!r} has {grant.evicted_count} of {limit} HTTP "
                f"connections, and others have to wait"
            )
            self.release(evicted_handler)
            evicted_handler.evict(ConnectionQuotaError(text, principal=grant.evicted_principal))
        self._unidentified.pop(handler, None)
        self._servers.discard(handler)
        handler.principal = principal

    def exempt_server(self, handler: _Handler) -> None:
        """Record that the caller is a server of the cluster, whose connection is never closed to
        make room for others.
        """
        self.release(handler)
        self._servers.add(handler)

    def close_oldest(self) -> bool:
        """Close the oldest connection with an unidentified caller; return False if there is
        none.
        """
        if not self._unidentified:
            return False
        oldest = next(iter(self._unidentified))
        del self._unidentified[oldest]
        text = "too many connections have not identified their callers"
        oldest.evict(OverloadedError(text, limit=self._slots.limit))
        return True


def take_connection_slot(request: web.Request, principal: str) -> None:
    """
    Take a connection slot for a request whose caller is identified.

    Args:
        principal: the caller's principal; "" for a server of the cluster, whose connection is never
            closed to make room for others.

    Raises:
        OverloadedError: see `HttpCallers.acquire`.
    """
    handler = request.protocol
    if isinstance(handler, _Handler):
        handler.identify_caller(principal)


def release_connection_slot(request: web.Request) -> None:
    """Release the slot of a request whose connection has been taken over by the data plane, which
    has its own limits.
    """
    handler = request.protocol
    if isinstance(handler, _Handler):
        handler.release()


@contextmanager
def cancelled_on_disconnect(request: web.Request) -> Iterator[None]:
    """
    Cancel the `with` block when the client disconnects. This is for calls that change nothing.

    Raises:
        ClientConnectionResetError: the client has already disconnected.
    """
    if request.transport is None:
        raise ClientConnectionResetError("the client has left")
    handler = request.protocol
    if not isinstance(handler, _Handler):
        yield
        return
    handler.cancels_on_disconnect = True
    try:
        yield
    finally:
        handler.cancels_on_disconnect = False


class LimitedSite(web.BaseSite):
    """
    A listening socket that refuses new connections while there are too many.

    Args:
        limits: the limits for each connection, and for their number.
        exempt: returns the number of open connections that do not count.
        tls: the TLS of the server; None for plain HTTP.
        on_refused: called when a caller is refused before it has sent a request, with the error,
            what the caller attempted, and the caller's host.
        guarded: True if callers are identified, in which case connections have slots; see
            `HttpCallers`.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        backlog: int,
        limits: HttpLimits,
        exempt: Callable[[], int],
        tls: ServerTls | None = None,
        on_refused: Callable[[KeylaneError, str, str], None] = lambda *_args: None,
        guarded: bool = False,
    ) -> None:
        super().__init__(runner, ssl_context=None if tls is None else tls.context, backlog=backlog)
        self._host = host
        self._port = port
        self._limits = limits
        self._exempt = exempt
        self._on_refused = on_refused
        self._callers = HttpCallers(limits.connections_max) if guarded else None
        self._handshakes: TlsHandshakes | None = None
        if tls is not None:
            self._handshakes = TlsHandshakes(
                lambda: tls.context,
                self._accept,
                limit=limits.connections_max,
                handshake_s=limits.head_s,
                on_refused=lambda error, remote: on_refused(error, "TLS handshake", remote),
            )

    @property
    def name(self) -> str:
        """The URL at which the site listens."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Start listening. Raises OSError."""
        await super().start()
        if self._handshakes is not None:
            listeners = await listen(
                self._host, self._port, backlog=self._backlog, on_accepted=self._handshakes.enter
            )
            self._server = cast(asyncio.AbstractServer, listeners)  # for aiohttp
            return
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, self._host, self._port, backlog=self._backlog, reuse_address=True
        )

    async def stop(self) -> None:
        """Stop listening, and close connections that are still in their TLS handshake."""
        await super().stop()
        if self._handshakes is not None:
            await self._handshakes.close()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        connections_max = self._limits.connections_max
        limit, exempt_count = connections_max, self._exempt()
        if self._callers is not None:
            # A caller must be identified before it can get another principal's slot. Servers do not
            # count. Otherwise identified callers could use up the limit, leaving no unidentified
            # connection to close.
            limit += max(1, connections_max // UNAUTHENTICATED_SHARE)
            exempt_count += self._callers.exempt_count
        is_full = len(server.connections) - exempt_count >= limit
        # A connection that is closed here leaves `server.connections` in the loop's next iteration.
        if is_full and (self._callers is None or not self._callers.close_oldest()):
            return _Refusal(connections_max, self._on_refused)
        return _Handler(
            server,
            on_refused=self._on_refused,
            callers=self._callers,
            loop=asyncio.get_running_loop(),
            # aiohttp also uses it for the headers of the first request
            keepalive_timeout=self._limits.head_s,
            lingering_time=LINGERING_S,
            auto_decompress=False,
            access_log=None,
            logger=http_log,
        )


def decoded_body(data: bytes, encoding: str) -> bytes:
    """
    Return a decompressed body.

    Args:
        encoding: one of `ENCODINGS`.

    Raises:
        InvalidRequestError: the data is damaged or truncated, or followed by more bytes.
        MessageTooLargeError: the result exceeds `CONTROL_BYTES_MAX` bytes; the rest is not
            decompressed.
    """
    if encoding == "identity":
        return data
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 32)  # a gzip header or a zlib header
    try:
        body = decompressor.decompress(data, CONTROL_BYTES_MAX + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not valid {encoding}: {error}") from None
    if len(body) > CONTROL_BYTES_MAX:
        raise MessageTooLargeError(
            f"the body is over {CONTROL_BYTES_MAX} bytes when it is unpacked",
            limit_bytes=CONTROL_BYTES_MAX,
        )
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequestError(
            f"the body is not valid {encoding}: it is truncated, or other bytes follow it"
        )
    return body


class _Refusal(asyncio.Protocol):
    """Answers each connection with the same error, and closes it."""

    def __init__(self, limit: int, on_refused: Callable[[KeylaneError, str, str], None]) -> None:
        self._error = error = OverloadedError("too many HTTP connections", limit=limit)
        self._on_refused = on_refused
        body = encode_json(ErrorBody.of(error))
        self._answer = (
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode() + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the error immediately, even if the caller sends nothing."""
        peer = cast(asyncio.Transport, transport)
        name = peer.get_extra_info("peername")
        remote = str(name[0]) if isinstance(name, tuple) else ""
        self._on_refused(self._error, "connection", remote)
        peer.write(self._answer)
        if peer.can_write_eof():
            peer.write_eof()
        # A socket that is closed while it has unread bytes is reset, which would lose the answer.
        asyncio.get_running_loop().call_later(REFUSED_S, peer.abort)
