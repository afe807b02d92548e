"""The server's side of the data plane: frames arrive and answers leave, each as fast as its own
client takes them.

    frames in order of arrival ─▶ handler(request, payload), many at once ─▶ answers, in any order,
        one write at a time

Invariants
    The first frame is a Hello; a client whose version is not supported is refused with advice, and
    gets no service. With access control, a principal with more than an equal share of the places
    takes no place from one with less. A connection that sends no Hello, or does not authenticate,
    is ended after `AUTHENTICATE_S` seconds, or earlier where there are many. A bad frame ends its
    own connection with a typed error, and no other. A pull may wait for seconds, so pulls have a
    limit of their own, beyond which they are refused: acks, acquires and releases are read however
    many pulls wait. A client that reads nothing holds a few megabytes here at most (`answer_room`)
    and delays no other client. It is disconnected with a typed error after `stuck_s` seconds, or
    at once where others wait for its room. A connection is ended if it is silent for `SILENT_S`, or
    if one of its frames takes `FRAME_S` to arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from ...protocol.errors import (
    ConnectionQuotaError,
    FrameError,
    InternalError,
    KeylaneError,
    OverloadedError,
    Reason,
    UnauthenticatedError,
    UnreachableError,
    VersionError,
)
from ...protocol.frames import (
    Ack,
    Answer,
    Append,
    Authenticate,
    Challenge,
    Challenged,
    Hello,
    Pull,
    PullShared,
    Read,
    Request,
    Welcome,
    decode_request,
    frame_parts,
    is_long_poll,
    refusal,
)
from ...protocol.limits import (
    CONNECTIONS_MAX,
    FRAME_BYTES_MAX,
    IN_FLIGHT_PER_CONNECTION_MAX,
    PULLS_PER_CONNECTION_MAX,
)
from ...protocol.membership.versions import VERSION, check_client
from ..access.guard import AUTHENTICATE_S, FETCH_FRAMES, Guard
from ..access.pacing import HOLD_MS
from ..access.places import Places
from ..answer_room import AnswerRoom, begin_answer
from ..frames.frame_socket import accept_socket
from ..frames.incoming import IncomingRoom
from ..intake import free_connection
from ..race import start_task
from .connection import GOODBYE_S, Parts, PlaneCall, PlaneConnection
from .prompt import Handled, PromptCall

log = logging.getLogger("keylane.rpc")

DataHandler = Callable[[Request, memoryview], Awaitable[Handled]]
Begin = Callable[[Request, memoryview, PromptCall], bool]
"""The type of `DataService.begin`; see there."""

SILENT_S = 24.0
"""Seconds of silence after which a client is gone without having closed: clients ask for a sign of
life after 10 s at most.
"""
FRAME_S = 60.0
"""Seconds within which a frame that has begun must be whole."""
STUCK_S = 20.0
"""Seconds for which a client may take nothing of its answers."""
SHORT_S = 1.0
"""The same limit, in seconds, while other connections wait for room."""
LOOKS_EACH = 4
"""The interval between full checks: while no connection waits for room, only one check in four is
made, because an idle server has thousands of connections.
"""
UNKNOWN_MAX = CONNECTIONS_MAX // 2
"""The largest number of connections that have not authenticated; beyond it, the oldest is closed.
After a broker's restart thousands of clients arrive at once, and their first frames are read after
all their handshakes.
"""
INTRODUCED_SHARE = 16
"""The share of additional places, with access control, for connections whose callers have not
authenticated: 1 / INTRODUCED_SHARE.
"""
SERVERS_MAX = 1_000
"""The number of connections of the cluster's servers that take no place, with access control; each
further one takes the room of unknown ones.
"""
RETRY_PLACE_MS = 5_000
PLACE_HINT = (
    "Each principal gets an equal share of a broker's connections. Use one client for many "
    "messages, or have the brokers "
    "take more: data_connections_max"
)
INTRODUCTIONS_MAX = 100
"""The largest number of frames that authenticate the caller, for one connection within
INTRODUCTIONS_S; a client sends two every few minutes.
"""
INTRODUCTIONS_S = 60.0
FRAMES_AT_ONCE = 64
"""The number of frames of a connection that are begun before others have a turn."""
INTRODUCTION_BYTES_MAX = 64 << 10
"""The largest frame, in bytes, from a sender that has not authenticated; a capability is
smaller.
"""
_PROMPT = frozenset({Append, Pull, Ack})
"""The requests that are often answered without a task."""


class DataPlane:
    """Serves connections with `handler`."""

    def __init__(
        self,
        handler: DataHandler,
        *,
        room: AnswerRoom | None = None,
        stuck_s: float = STUCK_S,
        on_refusal: Callable[[KeylaneError], None] = lambda _error: None,
        guard: Guard | None = None,
        begin: Begin = lambda _request, _payload, _call: False,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Args: begin: answers requests that need no task. connections_max: the number of
        connections; with a guard, only those of known callers count, without those of servers.
        """
        self._places: Places[PlaneConnection] = Places(connections_max)
        self._servers: set[PlaneConnection] = set()
        """The connections of servers of the cluster, which are never ended for others."""
        self._handler = handler
        self._begin = begin
        self._guard = guard
        self._room = room or AnswerRoom()
        self._incoming = IncomingRoom()
        self._stuck_s = stuck_s
        self._on_refusal = on_refusal
        self._connections: set[PlaneConnection] = set()
        self._unknown: dict[PlaneConnection, None] = {}
        """The connections of callers that are not known yet, the oldest first."""
        self._readings: dict[PlaneConnection, asyncio.Task[None]] = {}
        self._partings: dict[PlaneConnection, asyncio.Task[None]] = {}
        """The tasks of connections that are being disconnected."""
        self._watching: asyncio.Task[None] | None = None
        """The task that checks every connection; there is one while there are connections."""

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return len(self._connections)

    @property
    def connections_max(self) -> int:
        """Return how many connections there may be."""
        return self._places.most

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve a new connection until it ends."""
        if self._full and not self._unknown:
            raise OverloadedError("too many connections of the data plane", limit=self._places.most)
        response, socket = await accept_socket(
            request,
            bytes_max=FRAME_BYTES_MAX if self._guard is None else INTRODUCTION_BYTES_MAX,
            room=self._incoming,
        )
        free_connection(request)  # from here on `_unknown` has it
        guard = self._guard
        access = None if guard is None else guard.connection(request.remote or "")
        connection = PlaneConnection(socket, self._room, access)
        self._make_room()
        self._connections.add(connection)
        self._unknown[connection] = None
        socket.on_frame = partial(self._answer_at_once, connection)
        reading = start_task(self._answer_all(connection))
        self._readings[connection] = reading
        if self._watching is None:
            self._watching = start_task(self._watch(), name="watch connections")
        try:
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            del self._readings[connection]
            if (parting := self._partings.pop(connection, None)) is not None:
                parting.cancel()
            self._connections.discard(connection)
            if not self._readings:
                self._watching.cancel()
                self._watching = None
            self._unknown.pop(connection, None)
            self._servers.discard(connection)
            self._places.free(connection)
            connection.end()
        return response

    @property
    def _full(self) -> bool:
        """Return True if an unknown connection must be closed to make room for a new one."""
        room, exempt = self._places.most, 0
        if self._guard is not None:
            # A caller that may get a place of another principal must authenticate first.
            room += max(1, room // INTRODUCED_SHARE)
            exempt = min(len(self._servers), SERVERS_MAX)
        return len(self._connections) - exempt >= room

    def _take_place(self, connection: PlaneConnection, principal: str) -> None:
        """Give a connection a place, now that its principal is known ("": a server of the cluster).
        Raises QuotaExceededError.
        """
        if connection in self._partings or connection not in self._connections:
            return  # it is being ended: no other one is ended for it
        if not principal:
            self._places.free(connection)
            self._servers.add(connection)
            return
        most = self._places.most
        placing = self._places.take(connection, principal)
        if not placing.given:
            raise _no_place(
                f"all {most} connections of the data plane are taken, and "
                f"{principal!r} has its share",
                principal,
                most,
            )
        self._servers.discard(connection)
        leaves = placing.leaves
        if leaves is not None and leaves not in self._partings:
            text = (
                f"{placing.holder!r} has {placing.held} of {most} connections of the data plane, "
                f"and others have to wait"
            )
            error = _no_place(text, placing.holder, most)
            self._note(leaves, error)
            parting = self._part(leaves, self._readings[leaves], error)
            self._partings[leaves] = start_task(parting)

    def _make_room(self) -> None:
        """Close the oldest unknown connection if there are too many, so that callers that do not
        authenticate keep no place from those that do.
        """
        while self._unknown and (len(self._unknown) >= UNKNOWN_MAX or self._full):
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            self._connections.discard(oldest)
            text = "too many connections have not said who calls"
            self._note(oldest, OverloadedError(text, limit=UNKNOWN_MAX))
            oldest.transport.abort()

    def _answer_at_once(self, connection: PlaneConnection, data: bytearray) -> bool:
        """Take a frame as it arrives, if it needs no task; return False if nothing was done and
        `_answer_all` has to answer it.
        """
        if connection.not_begun or not (connection.greeted and connection.socket.writable):
            return False
        access = connection.access
        try:
            number, asked, payload = decode_request(data)
        except FrameError:
            return False
        kind, pull = type(asked), type(asked) is Pull
        full = (
            connection.pulls >= PULLS_PER_CONNECTION_MAX
            if pull
            else connection.others >= IN_FLIGHT_PER_CONNECTION_MAX
        )
        if kind not in _PROMPT or full:
            return False
        if access is not None and not access.is_cleared(asked):
            return False
        call = PlaneCall(connection, number, asked, self._go_on, self._on_refusal, pull=pull)
        try:
            begun = self._begin(asked, payload, call)
        except Exception as error:  # noqa: BLE001 - logged there
            call.refuse(error)
            return True
        if not begun:
            call.forget()
        return begun

    def _go_on(self, connection: PlaneConnection, number: int, asked: Request) -> None:
        """Answer a request in a task, after it began without one."""
        connection.pulls += 1
        connection.start(self._answer_pull(connection, number, asked, memoryview(b"")))

    async def _answer_all(self, connection: PlaneConnection) -> None:
        begun = 0
        while True:
            begun += 1
            if begun % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)  # data that has arrived waits for nothing else
            try:
                data = await connection.socket.receive()
                if data is None:
                    break
                correlation_id, asked, payload = decode_request(data)
                del data
                if isinstance(asked, Hello | Challenge | Authenticate):
                    connection.count_introduction(INTRODUCTIONS_MAX, INTRODUCTIONS_S)
            except FrameError as error:
                self._note(connection, error)
                await connection.refuse(error)
                return
            if not connection.greeted or isinstance(asked, Hello):
                if not await self._greet(connection, correlation_id, asked):
                    return
                continue
            if isinstance(asked, Challenge | Authenticate):
                await self._introduce(connection, correlation_id, asked)
                continue
            if connection.access is not None and not (
                await self._may(connection, correlation_id, asked)
                and await self._takes_turn(connection, correlation_id, asked, len(payload))
            ):
                continue
            pull = is_long_poll(asked)
            if pull and connection.pulls < PULLS_PER_CONNECTION_MAX:
                connection.pulls += 1
                answer = self._answer_pull(connection, correlation_id, asked, payload)
            else:
                await connection.wait_for_slot()
                connection.others += 1
                answer = self._answer_other(
                    connection, correlation_id, asked, payload, refused=pull
                )
            connection.start_answer(answer)

    async def _greet(
        self, connection: PlaneConnection, correlation_id: int, asked: Request
    ) -> bool:
        """Take the first frame, and return False if the client is refused and its connection is
        closed.
        """
        try:
            if not isinstance(asked, Hello):
                raise VersionError(
                    Reason.CLIENT_TOO_OLD,
                    f"the client sent no version, the server is keylane {VERSION}",
                    server=VERSION,
                )
            check_client(asked.version, VERSION)
        except KeylaneError as error:
            self._on_refusal(error)
            await self._write(connection, frame_parts(correlation_id, refusal(error)))
            await connection.refuse(error)
            return False
        connection.greeted = True
        if connection.access is None:
            self._unknown.pop(connection, None)
        await self._write(connection, frame_parts(correlation_id, Welcome(VERSION)))
        return True

    async def _introduce(
        self, connection: PlaneConnection, correlation_id: int, asked: Challenge | Authenticate
    ) -> None:
        """Answer a caller that asks for a challenge or authenticates. Later frames wait."""
        access = connection.access
        try:
            if access is None or isinstance(asked, Challenge):
                answer: Answer = Challenged(b"" if access is None else access.nonce)
            else:
                answer = await access.authenticate(asked, partial(self._take_place, connection))
                connection.socket.bytes_max = FRAME_BYTES_MAX
                self._unknown.pop(connection, None)
        except KeylaneError as error:
            self._on_refusal(error)
            answer = refusal(error)
        await self._write(connection, frame_parts(correlation_id, answer))

    async def _may(self, connection: PlaneConnection, correlation_id: int, asked: Request) -> bool:
        """Return whether the caller may send this frame; if not, it is answered here."""
        assert connection.access is not None
        try:
            connection.access.check(asked)
        except UnauthenticatedError as error:
            self._on_refusal(error)
            await connection.refuse(error)
            return False
        except KeylaneError as error:
            self._on_refusal(error)
            await self._write(connection, frame_parts(correlation_id, refusal(error)))
            return False
        return True

    async def _takes_turn(
        self, connection: PlaneConnection, correlation_id: int, asked: Request, size: int
    ) -> bool:
        """
        Pause the reading of the connection while a limit is used up; requests that fetch messages
        wait by themselves.

        Returns:
            False if the debt is longer than HOLD_MS, so that the frame is answered here.
        """
        access = connection.access
        assert access is not None
        if isinstance(asked, Pull | PullShared | Read):
            return True
        delay = access.delay(asked)
        if delay.ms <= HOLD_MS:
            access.take(asked, size)
        if not delay.ms:
            return True
        access.waits(delay)
        await connection.tell(delay)
        await asyncio.sleep(min(delay.ms, HOLD_MS) / 1000)
        if delay.ms <= HOLD_MS:
            return True
        error = access.quota_error(delay)
        self._on_refusal(error)
        await self._write(connection, frame_parts(correlation_id, refusal(error)))
        return False

    @staticmethod
    async def _wait_to_fetch(connection: PlaneConnection, asked: Request) -> None:
        """Wait until no limit is used up; the client is notified at least every HOLD_MS."""
        access = connection.access
        if access is None:
            return
        access.take(asked, 0)
        while (delay := access.delay(asked)).ms:
            step = delay._replace(ms=min(delay.ms, HOLD_MS))
            access.waits(step)
            await connection.tell(step)
            await asyncio.sleep(step.ms / 1000)

    @staticmethod
    async def _write(connection: PlaneConnection, frame: Parts) -> None:
        try:
            await connection.send(frame)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")

    async def _answer_pull(
        self, connection: PlaneConnection, correlation_id: int, asked: Request, payload: memoryview
    ) -> None:
        try:
            await self._answer(connection, correlation_id, asked, payload)
        finally:
            connection.pulls -= 1

    async def _answer_other(
        self,
        connection: PlaneConnection,
        correlation_id: int,
        asked: Request,
        payload: memoryview,
        *,
        refused: bool,
    ) -> None:
        try:
            await self._answer(connection, correlation_id, asked, payload, refused=refused)
        finally:
            connection.free_slot()

    async def _answer(
        self,
        connection: PlaneConnection,
        correlation_id: int,
        asked: Request,
        payload: memoryview,
        *,
        refused: bool = False,
    ) -> None:
        access = connection.access
        fetches = access is not None and type(asked) in FETCH_FRAMES
        if fetches and not refused:
            await self._wait_to_fetch(connection, asked)
        answering = begin_answer(connection.share)
        try:
            try:
                if refused:
                    raise OverloadedError(
                        f"a connection has at most {PULLS_PER_CONNECTION_MAX} pulls at once"
                    )
                answer, data = await self._handler(asked, payload)
                answering.made(len(data))
                if access is not None and fetches:
                    access.take(asked, len(data), requests=0)
                frame = frame_parts(correlation_id, answer, data)
                del (
                    data,
                    payload,
                )  # only the frame is kept while the client does not take it
            except KeylaneError as error:
                self._on_refusal(error)
                frame = frame_parts(correlation_id, refusal(error))
            except Exception:
                log.exception("%s failed", type(asked).__name__)
                self._on_refusal(InternalError())
                frame = frame_parts(correlation_id, refusal(InternalError()))
            await connection.send(frame)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")
        finally:
            answering.end()

    async def _watch(self) -> None:
        """Disconnect clients that read or send nothing for too long, or whose rights have ended;
        one timer serves all of them.
        """
        looks, pause_s = 0, min(SHORT_S, self._stuck_s) / 2
        while True:
            await asyncio.sleep(pause_s)
            looks += 1
            if self._guard is None and looks % LOOKS_EACH and not self._room.short:
                continue
            look_s, looks = looks * pause_s, 0
            now_s = asyncio.get_running_loop().time()
            for connection, reading in self._readings.items():
                if connection in self._partings:
                    continue
                try:
                    ended = self._why_parted(connection, now_s, look_s)
                except Exception:  # a fault in one connection leaves the others watched
                    log.exception("closing a connection whose deadline cannot be watched")
                    ended = InternalError()
                if ended is None:
                    continue
                self._note(connection, ended)
                # This is a task of its own: its goodbye delays no check of the others.
                parting = self._part(connection, reading, ended)
                self._partings[connection] = start_task(parting)

    def _why_parted(
        self, connection: PlaneConnection, now_s: float, look_s: float
    ) -> KeylaneError | None:
        """
        Return why a connection has to end now, or None if it may stay.

        Args:
            now_s: the time by the event loop's clock.
            look_s: seconds since the last check.
        """
        if connection.silent_s(look_s) >= SILENT_S:
            return _disconnected(f"nothing was received for {SILENT_S:g} s")
        if connection.socket.waits_for_end_s() > FRAME_S:
            return _disconnected(f"a frame did not arrive completely within {FRAME_S:g} s")
        if connection.access is not None:
            try:
                connection.access.check_valid()
            except KeylaneError as ended:
                return ended
        elif not connection.greeted and now_s - connection.opened_s > AUTHENTICATE_S:
            return _disconnected(f"no Hello arrived within {AUTHENTICATE_S:g} s")
        waiting_s = connection.waiting_s(now_s)
        if waiting_s < self._stuck_s and not (self._room.short and waiting_s >= SHORT_S):
            return None
        error = OverloadedError(
            Reason.ANSWER_NOT_TAKEN, f"this client has taken no answer for {waiting_s:.0f} s"
        )
        log.warning("a client is disconnected: %s", error.message)
        return error

    @staticmethod
    async def _part(
        connection: PlaneConnection, reading: asyncio.Task[None], error: KeylaneError
    ) -> None:
        """Disconnect a client, which is notified of the reason if it still reads."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await connection.refuse(error)
        except Exception:
            log.exception("cannot send a client the reason of its disconnection")
        connection.transport.abort()
        reading.cancel()

    def _note(self, connection: PlaneConnection, error: KeylaneError) -> None:
        """Count the error that ends a connection, and report it in the audit log."""
        self._on_refusal(error)
        if connection.access is not None:
            connection.access.record_end(error)

    async def close(self, _app: web.Application) -> None:
        """Notify every client that the server stops."""
        error = UnreachableError("the server is stopping")
        await asyncio.gather(
            *(self._part(*each, error) for each in self._readings.items()), return_exceptions=True
        )


def _no_place(text: str, principal: str, limit: int) -> ConnectionQuotaError:
    error = ConnectionQuotaError(
        text,
        principal=principal,
        limit=limit,
        retry_after_ms=RETRY_PLACE_MS,
    )
    error.hint = PLACE_HINT
    return error


def _disconnected(why: str) -> FrameError:
    """Return the error for a client that a broker disconnects because it is late."""
    error = FrameError(why)
    error.hint = "Open a new connection; a client of keylane does so by itself."
    return error
