"""Limits for plain HTTP callers of a server: time for each part of a request, and a number of
connections.

    accepted ─▶ room? ─no─▶ the oldest unidentified connection is closed; if there is none: 503
                  │yes
                  ▼
    head, in `head_s` ─▶ body, in `body_s` ─▶ handler ─▶ answer taken, in `answer_s` ─▶ next head

Invariants
    A connection that sends no complete request head in time is closed, even if it is idle.
    A connection of the data plane counts until its handshake ends; after that it has its own
    limits.
    A call that changes nothing ends with its connection: otherwise clients that connect and leave
    would have any number of long polls, none of which counts as a connection. A call that changes
    something continues to its end.
    With access control, unidentified callers keep no place from identified ones, and principals
    with more than an equal share of the places keep none from those with less; connections of
    servers of the cluster are never closed for others, and take no place.
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
from .access.places import Places
from .tls.contexts import ServerTls
from .tls.listeners import TlsOpenings, listen

REFUSED_S = 0.5
"""Seconds that a refused caller has to take the answer."""
LINGERING_S = 2.0
"""Seconds for which the rest of an unread body is read, so that its sender reads the answer."""
FILES_SHARE = 2
"""Connections use at most 1 / FILES_SHARE of the files that the process may open; the rest is for
its data.
"""
INTRODUCED_SHARE = 16
"""With access control, there are 1 / INTRODUCED_SHARE additional places for connections whose
callers are not identified yet.
"""
SERVERS_MAX = 1_000
"""With access control, number of connections of servers of the cluster that take no place; each
further one takes a place.
"""
ENCODINGS = frozenset({"identity", "gzip", "deflate"})
"""Values of `Content-Encoding` that bodies may have."""


def is_ours(record: logging.LogRecord) -> bool:
    """Return True if aiohttp logs a fault of keylane. Bytes that are not HTTP are the caller's
    fault, and must not fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


http_log = logging.getLogger("keylane.rpc.http")
"""Log of aiohttp."""
http_log.addFilter(is_ours)


def within_files(connections: int) -> int:
    """Return the number of connections, limited to a part of the files that the process may
    open.
    """
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        connections
        if soft == resource.RLIM_INFINITY
        else max(1, min(connections, soft // FILES_SHARE))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of plain HTTP; times are in seconds."""

    connections_max: int = HTTP_CONNECTIONS_MAX
    head_s: float = 20.0
    """Longer than clients reuse an idle connection (ours: 4 s, aiohttp: 15 s), so that none sends
    into a connection that is being closed.
    """
    body_s: float = 30.0
    answer_s: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "connections_max", within_files(self.connections_max))


class _Handler(web.RequestHandler):
    """The server's end of a connection; bytes that are not HTTP are answered with a typed error."""

    __slots__ = ("_begun", "_callers", "_head_s", "_on_refused", "ends_call", "principal")

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
        """Principal whose place it takes; "" before that is known, and for servers."""
        self._head_s: float = kwargs["keepalive_timeout"]
        self._begun = False
        """True while a part of a request's head has arrived."""
        self.ends_call = False
        """True while a call is in progress that ends when the client leaves."""

    def force_close(self) -> None:
        """See aiohttp, which calls this when the time for a head is over."""
        if self._begun and self.transport is not None and not self.transport.is_closing():
            self._begun = False
            error = InvalidRequestError(
                Reason.REQUEST_TOO_SLOW,
                f"incomplete request headers after {self._head_s:g} s",
                limit_ms=int(self._head_s * 1000),
            )
            self._on_refused(error, "head of a request", self._remote())
        super().force_close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note a new connection, whose caller is not identified yet."""
        super().connection_made(transport)
        if self._callers is not None:
            self._callers.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Note that the client has left."""
        self._begun = False
        self.free()
        task = self._task_handler if self.ends_call else None
        super().connection_lost(exc)
        if task is not None:
            task.cancel()

    def keep(self, principal: str) -> None:
        """
        Note the identified caller; "": it is a server of the cluster.

        Raises:
            OverloadedError: `HttpCallers.keep` found no place.
        """
        if self._callers is None or self.transport is None:
            return  # a client that has left takes no place, though its call continues
        if not principal:
            self._callers.keep_server(self)
        elif principal != self.principal:
            self._callers.keep(self, principal)

    def free(self) -> None:
        """Release the connection's slot: it moved to the data plane, or it was closed."""
        if self._callers is not None:
            self._callers.free(self)

    def make_room(self, error: KeylaneError) -> None:
        """Close the connection to make room for another one."""
        self._on_refused(error, "connection", self._remote())
        if self.transport is not None:
            self.transport.abort()

    def _remote(self) -> str:
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    def data_received(self, data: bytes) -> None:
        """Raise in the reader of a body that breaks off, because aiohttp's parser would raise only
        in the next request.
        """
        idle = self._current_request is None and not self._messages
        super().data_received(data)
        self._begun = idle and not self._messages and self._current_request is None
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
        """See aiohttp; its text becomes the message of an InvalidRequestError."""
        response = super().handle_error(request, status, exc, message)
        if status == 500 or not isinstance(response, web.Response):
            return response
        error = InvalidRequestError(f"the request is no HTTP: {message}")
        self._on_refused(error, "no HTTP", request.remote or "")
        response = web.Response(
            body=encode_json(ErrorBody.of(error)), status=status, content_type="application/json"
        )
        response.force_close()
        return response


class HttpCallers:
    """
    The HTTP connections of a server that make room for others: unidentified ones, and those of each
    principal.

    Args:
        places: number of connections of identified callers; servers of the cluster do not count.
    """

    def __init__(self, places: int) -> None:
        self._places: Places[_Handler] = Places(places)
        self._unknown: dict[_Handler, None] = {}
        """Connections of unidentified callers, the oldest first."""
        self._servers: set[_Handler] = set()

    @property
    def exempt(self) -> int:
        """Number of connections of servers that take no place."""
        return min(len(self._servers), SERVERS_MAX)

    def add(self, handler: _Handler) -> None:
        """Note a new connection."""
        self._unknown[handler] = None

    def free(self, handler: _Handler) -> None:
        """Note that a connection no longer counts."""
        self._unknown.pop(handler, None)
        self._servers.discard(handler)
        self._places.free(handler)
        handler.principal = ""

    def keep(self, handler: _Handler, principal: str) -> None:
        """
        Give a connection a place, because its caller is identified.

        Raises:
            OverloadedError: all places are taken, and this principal already has an equal share of
                them.
        """
        most = self._places.most
        placing = self._places.take(handler, principal)
        if not placing.given:
            raise OverloadedError("too many HTTP connections", limit=most)
        if (leaves := placing.leaves) is not None:
            text = (
                f"{placing.holder!r} has {placing.held} of {most} HTTP connections, and others "
                f"have to wait"
            )
            self.free(leaves)
            leaves.make_room(ConnectionQuotaError(text, principal=placing.holder))
        self._unknown.pop(handler, None)
        self._servers.discard(handler)
        handler.principal = principal

    def keep_server(self, handler: _Handler) -> None:
        """Note that a server of the cluster calls, so that the connection is never closed for
        another.
        """
        self.free(handler)
        self._servers.add(handler)

    def close_oldest(self) -> bool:
        """Close the oldest connection whose caller is not identified; False if there is none."""
        if not self._unknown:
            return False
        oldest = next(iter(self._unknown))
        del self._unknown[oldest]
        text = "too many connections have not identified their callers"
        oldest.make_room(OverloadedError(text, limit=self._places.most))
        return True


def keep_connection(request: web.Request, principal: str) -> None:
    """
    Note that the caller on the connection of a request is identified.

    Args:
        principal: principal whose place it takes; "": a server of the cluster, whose connection is
            never closed for another one.

    Raises:
        OverloadedError: `HttpCallers.keep` found no place.
    """
    handler = request.protocol
    if isinstance(handler, _Handler):
        handler.keep(principal)


def free_connection(request: web.Request) -> None:
    """Note that the data plane has taken over the connection of a request, under its own limits."""
    handler = request.protocol
    if isinstance(handler, _Handler):
        handler.free()


@contextmanager
def ended_with_connection(request: web.Request) -> Iterator[None]:
    """
    Cancel the block when the client leaves; this is for calls that change nothing.

    Raises:
        ClientConnectionResetError: the client has already left.
    """
    if request.transport is None:
        raise ClientConnectionResetError("the client has left")
    handler = request.protocol
    if not isinstance(handler, _Handler):
        yield
        return
    handler.ends_call = True
    try:
        yield
    finally:
        handler.ends_call = False


class LimitedSite(web.BaseSite):
    """
    A listening socket that refuses new connections while there are too many.

    Args:
        limits: limits of each connection, and of their number.
        exempt: returns the number of open connections that do not count.
        tls: TLS of the server; None: plain HTTP.
        on_refused: called with the error, the attempted act and the caller's host if no request is
            known.
        guarded: True if callers are identified; unidentified ones, and those with the most places,
            make room for others.
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
        on_refused: Callable[[KeylaneError, str, str], None] = lambda *_told: None,
        guarded: bool = False,
    ) -> None:
        super().__init__(runner, ssl_context=None if tls is None else tls.context, backlog=backlog)
        self._host = host
        self._port = port
        self._limits = limits
        self._exempt = exempt
        self._on_refused = on_refused
        self._callers = HttpCallers(limits.connections_max) if guarded else None
        self._openings: TlsOpenings | None = None
        if tls is not None:
            self._openings = TlsOpenings(
                lambda: tls.context,
                self._accept,
                most=limits.connections_max,
                handshake_s=limits.head_s,
                on_refused=lambda error, remote: on_refused(error, "TLS handshake", remote),
            )

    @property
    def name(self) -> str:
        """URL at which it listens."""
        scheme = "http" if self._ssl_context is None else "https"
        return f"{scheme}://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError."""
        await super().start()
        if self._openings is not None:
            listeners = await listen(
                self._host, self._port, backlog=self._backlog, on_accepted=self._openings.enter
            )
            self._server = cast(asyncio.AbstractServer, listeners)  # for aiohttp
            return
        self._server = await asyncio.get_running_loop().create_server(
            self._accept, self._host, self._port, backlog=self._backlog, reuse_address=True
        )

    async def stop(self) -> None:
        """Stop listening; connections without a whole handshake are closed."""
        await super().stop()
        if self._openings is not None:
            await self._openings.close()

    def _accept(self) -> asyncio.Protocol:
        server = self._runner.server
        assert server is not None
        most = self._limits.connections_max
        room, exempt = most, self._exempt()
        if self._callers is not None:
            # A caller that may get another principal's place must be identified first. Servers
            # take no place: if they did, identified callers could fill the room, and no
            # unidentified connection could be closed.
            room += max(1, most // INTRODUCED_SHARE)
            exempt += self._callers.exempt
        full = len(server.connections) - exempt >= room
        # A connection closed here leaves `server.connections` in the next turn of the event loop.
        if full and (self._callers is None or not self._callers.close_oldest()):
            return _Refusal(most, self._on_refused)
        return _Handler(
            server,
            on_refused=self._on_refused,
            callers=self._callers,
            loop=asyncio.get_running_loop(),
            # aiohttp uses it for the first head and for each next one
            keepalive_timeout=self._limits.head_s,
            lingering_time=LINGERING_S,
            auto_decompress=False,
            access_log=None,
            logger=http_log,
        )


def decoded_body(data: bytes, encoding: str) -> bytes:
    """
    Decompress a body.

    Args:
        encoding: one of `ENCODINGS`.

    Raises:
        InvalidRequestError: the bytes are damaged, cut, or followed by others.
        MessageTooLargeError: it is over `CONTROL_BYTES_MAX` bytes; unpacking stops there.
    """
    if encoding == "identity":
        return data
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # a gzip header or a zlib header
    try:
        body = unpacker.decompress(data, CONTROL_BYTES_MAX + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is no {encoding}: {error}") from None
    if len(body) > CONTROL_BYTES_MAX:
        raise MessageTooLargeError(
            f"the body is over {CONTROL_BYTES_MAX} bytes when it is unpacked",
            limit_bytes=CONTROL_BYTES_MAX,
        )
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequestError(f"the body is no {encoding}: its end is missing or not its end")
    return body


class _Refusal(asyncio.Protocol):
    """Answers every connection with one error, and closes it."""

    def __init__(self, limit: int, on_refused: Callable[[KeylaneError, str, str], None]) -> None:
        self._error = error = OverloadedError("too many HTTP connections", limit=limit)
        self._on_refused = on_refused
        body = encode_json(ErrorBody.of(error))
        self._answer = (
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        ).encode() + body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the answer at once, so that a caller that sends nothing also gets it."""
        peer = cast(asyncio.Transport, transport)
        name = peer.get_extra_info("peername")
        remote = str(name[0]) if isinstance(name, tuple) else ""
        self._on_refused(self._error, "connection", remote)
        peer.write(self._answer)
        if peer.can_write_eof():
            peer.write_eof()
        # The socket stays open meanwhile: if it were closed with unread bytes, it would be reset,
        # and the answer lost.
        asyncio.get_running_loop().call_later(REFUSED_S, peer.abort)
