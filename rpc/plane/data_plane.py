"""Serves the data plane: receives request frames, and sends answers as fast as each client reads
them.

    frames in order of arrival ─▶ handler(request, payload), concurrently ─▶ answers in any order,
        one write at a time

Invariants
    The first frame is a Hello. A client whose version is not supported is refused with advice.
    With access control, a principal with more than its equal share of the connection slots takes
    none from a principal with less.
    A connection that sends no Hello or does not authenticate is closed after `AUTHENTICATE_S`
    seconds, or earlier if there are many.
    A bad frame closes its own connection with a typed error, and affects no other.
    Pulls may wait for seconds, so they have their own limit, beyond which they are refused. Acks,
    acquires and releases are read however many pulls are waiting.
    A client that reads nothing uses a few megabytes at most (`answer_budget`), and delays no other
    client. It is disconnected with a typed error after `stuck_s` seconds, or after `SHORT_S` if
    others are waiting for memory.
    A connection is closed if it is silent for `SILENT_S`, or if one of its frames takes `FRAME_S`
    to arrive.
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
from ..access.connection_slots import ConnectionSlots
from ..access.guard import AUTHENTICATE_S, FETCH_FRAMES, Guard
from ..access.pacing import HOLD_MS
from ..answer_budget import AnswerBudget, begin_answer
from ..frames.incoming import IncomingBudget
from ..frames.upgrade import accept_socket
from ..intake import release_connection_slot
from ..race import start_task
from ..request_ids import log_fault
from .connection import GOODBYE_S, Parts, PlaneCall, PlaneConnection
from .prompt import Handled, PromptCall

log = logging.getLogger("keylane.rpc")

DataHandler = Callable[[Request, memoryview], Awaitable[Handled]]
Begin = Callable[[Request, memoryview, PromptCall], bool]
"""The type of `DataService.begin`."""

SILENT_S = 24.0
"""The time in seconds after which a silent client counts as dead. An idle client sends a ping after
10 s at most.
"""
FRAME_S = 60.0
"""The time in seconds in which the rest of a frame must arrive."""
STUCK_S = 20.0
"""The time in seconds that a client may leave its answers unread."""
SHORT_S = 1.0
"""The same limit in seconds while other connections are waiting for memory."""
CHECK_EVERY = 4
"""Connections are only checked in every CHECK_EVERY-th interval, unless one is waiting for memory,
because an idle server has thousands of them.
"""
UNAUTHENTICATED_MAX = CONNECTIONS_MAX // 2
"""The maximum number of connections that have not authenticated; beyond it, the oldest is closed.
It is large because thousands of clients connect at once after a broker restarts, and no first frame
is read before all their handshakes are done.
"""
UNAUTHENTICATED_SHARE = 16
"""With access control, the limit is raised by 1 / UNAUTHENTICATED_SHARE for connections whose
callers have not authenticated.
"""
SERVERS_MAX = 1_000
"""With access control, the number of connections from the cluster's servers that are exempt from
the limit.
"""
RETRY_CONNECTION_MS = 5_000
SLOT_HINT = (
    "Each principal gets an equal share of a broker's connections. Use one client for many "
    "messages, or have the brokers "
    "take more: data_connections_max"
)
AUTH_FRAMES_MAX = 100
"""The maximum number of Hello and authentication frames on a connection within AUTH_WINDOW_S. A
client sends two every few minutes.
"""
AUTH_WINDOW_S = 60.0
FRAMES_AT_ONCE = 64
"""The number of frames that are read from a connection before other tasks get a turn."""
AUTH_FRAME_BYTES_MAX = 64 << 10
"""The maximum size in bytes of a frame from a client that has not authenticated; a capability is
smaller.
"""
_PROMPT = frozenset({Append, Pull, Ack})
"""Requests that are first tried without a task."""


class DataPlane:
    """Serves data-plane connections: checks each frame, and answers it with `handler`."""

    def __init__(
        self,
        handler: DataHandler,
        *,
        answer_budget: AnswerBudget | None = None,
        stuck_s: float = STUCK_S,
        on_refusal: Callable[[KeylaneError], None] = lambda _error: None,
        guard: Guard | None = None,
        begin: Begin = lambda _request, _payload, _call: False,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """
        Args:
            handler: answers a request in a task.
            stuck_s: the time in seconds that a client may leave its answers unread.
            on_refusal: called with each error that is sent.
            guard: access control; if None, every caller may do everything.
            begin: answers a request without a task if possible; see `DataService.begin`.
            connections_max: the maximum number of connections. With a guard, only identified
                callers count, and the cluster's servers do not.
        """
        self._slots: ConnectionSlots[PlaneConnection] = ConnectionSlots(connections_max)
        self._servers: set[PlaneConnection] = set()
        """The connections of the cluster's servers, which are never closed to make room for
        others.
        """
        self._handler = handler
        self._begin = begin
        self._guard = guard
        self._answer_budget = answer_budget or AnswerBudget()
        self._incoming = IncomingBudget()
        self._stuck_s = stuck_s
        self._on_refusal = on_refusal
        self._connections: set[PlaneConnection] = set()
        self._unauthenticated: dict[PlaneConnection, None] = {}
        """The connections whose callers have not authenticated, oldest first."""
        self._readers: dict[PlaneConnection, asyncio.Task[None]] = {}
        """The task that reads each connection's frames."""
        self._disconnect_tasks: dict[PlaneConnection, asyncio.Task[None]] = {}
        """The tasks that are disconnecting clients."""
        self._watchdog: asyncio.Task[None] | None = None
        """The task that checks all connections; None while there are none."""

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def connections_max(self) -> int:
        """The maximum number of connections."""
        return self._slots.limit

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Upgrade a request to a data-plane connection, and serve it until it closes."""
        if self._is_at_limit and not self._unauthenticated:
            raise OverloadedError("too many connections of the data plane", limit=self._slots.limit)
        response, socket = await accept_socket(
            request,
            bytes_max=FRAME_BYTES_MAX if self._guard is None else AUTH_FRAME_BYTES_MAX,
            budget=self._incoming,
        )
        release_connection_slot(request)  # `_unauthenticated` counts it instead
        guard = self._guard
        access = None if guard is None else guard.connection(request.remote or "")
        connection = PlaneConnection(socket, self._answer_budget, access)
        self._close_excess_unauthenticated()
        self._connections.add(connection)
        self._unauthenticated[connection] = None
        socket.on_frame = partial(self._answer_without_task, connection)
        reader = start_task(self._answer_all(connection))
        self._readers[connection] = reader
        if self._watchdog is None:
            self._watchdog = start_task(self._watch(), name="watch connections")
        try:
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.result()
        finally:
            reader.cancel()
            del self._readers[connection]
            if (disconnect := self._disconnect_tasks.pop(connection, None)) is not None:
                disconnect.cancel()
            self._connections.discard(connection)
            if not self._readers:
                self._watchdog.cancel()
                self._watchdog = None
            self._unauthenticated.pop(connection, None)
            self._servers.discard(connection)
            self._slots.release(connection)
            connection.end()
        return response

    @property
    def _is_at_limit(self) -> bool:
        """True if a new connection is only accepted if an unauthenticated one is closed for it."""
        limit, exempt_count = self._slots.limit, 0
        if self._guard is not None:
            # A caller must authenticate before it can get another principal's slot.
            limit += max(1, limit // UNAUTHENTICATED_SHARE)
            exempt_count = min(len(self._servers), SERVERS_MAX)
        return len(self._connections) - exempt_count >= limit

    def _acquire_slot(self, connection: PlaneConnection, principal: str) -> None:
        """Give a slot to a connection whose principal is now known ("" for a server of the
        cluster). Raises ConnectionQuotaError.
        """
        if connection in self._disconnect_tasks or connection not in self._connections:
            return  # it is being closed, so no other one needs to be
        if not principal:
            self._slots.release(connection)
            self._servers.add(connection)
            return
        limit = self._slots.limit
        grant = self._slots.acquire(connection, principal)
        if not grant.is_granted:
            raise _no_slot_error(
                f"all {limit} connections of the data plane are taken, and "
                f"{principal!r} has its share",
                principal,
                limit,
            )
        self._servers.discard(connection)
        evicted_connection = grant.evicted_connection
        if evicted_connection is not None and evicted_connection not in self._disconnect_tasks:
            text = (
                f"{grant.evicted_principal!r} has {grant.evicted_count} of {limit} connections of "
                f"the data plane, and others have to wait"
            )
            error = _no_slot_error(text, grant.evicted_principal, limit)
            self._record_end(evicted_connection, error)
            disconnect = self._disconnect(
                evicted_connection, self._readers[evicted_connection], error
            )
            self._disconnect_tasks[evicted_connection] = start_task(disconnect)

    def _close_excess_unauthenticated(self) -> None:
        """Close the oldest unauthenticated connections while there are too many, so that callers
        that do not authenticate cannot lock out those that do.
        """
        while self._unauthenticated and (
            len(self._unauthenticated) >= UNAUTHENTICATED_MAX or self._is_at_limit
        ):
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            self._connections.discard(oldest)
            text = "too many connections have not authenticated"
            self._record_end(oldest, OverloadedError(text, limit=UNAUTHENTICATED_MAX))
            oldest.transport.abort()

    def _answer_without_task(self, connection: PlaneConnection, data: bytearray) -> bool:
        """Answer a frame as it arrives, if that needs no task. Return False if nothing was done, so
        that `_answer_all` gets the frame.
        """
        if connection.unstarted_tasks or not (
            connection.has_said_hello and connection.socket.writable
        ):
            return False
        access = connection.access
        try:
            correlation_id, request, payload = decode_request(data)
        except FrameError:
            return False
        kind, is_pull = type(request), type(request) is Pull
        is_at_limit = (
            connection.pull_count >= PULLS_PER_CONNECTION_MAX
            if is_pull
            else connection.other_count >= IN_FLIGHT_PER_CONNECTION_MAX
        )
        if kind not in _PROMPT or is_at_limit:
            return False
        if access is not None and not access.is_allowed_at_once(request):
            return False
        call = PlaneCall(
            connection, correlation_id, request, self._hand_to_task, self._on_refusal, pull=is_pull
        )
        try:
            is_handled = self._begin(request, payload, call)
        except Exception as error:  # noqa: BLE001 - `refuse` logs it
            call.refuse(error)
            return True
        if not is_handled:
            call.mark_done()
        return is_handled

    def _hand_to_task(
        self, connection: PlaneConnection, correlation_id: int, request: Request
    ) -> None:
        """Answer a pull in a task, after `_answer_without_task` has started it without one."""
        connection.pull_count += 1
        connection.start(self._answer_pull(connection, correlation_id, request, memoryview(b"")))

    async def _answer_all(self, connection: PlaneConnection) -> None:
        """Answer the frames of a connection in order of arrival, until it is closed or refused."""
        frames = 0
        while True:
            frames += 1
            if frames % FRAMES_AT_ONCE == 0:
                await asyncio.sleep(0)  # `receive` does not yield while frames are queued
            try:
                data = await connection.socket.receive()
                if data is None:
                    break
                correlation_id, request, payload = decode_request(data)
                del data
                if isinstance(request, Hello | Challenge | Authenticate):
                    connection.count_auth_frame(AUTH_FRAMES_MAX, AUTH_WINDOW_S)
            except FrameError as error:
                self._record_end(connection, error)
                await connection.refuse(error)
                return
            if not connection.has_said_hello or isinstance(request, Hello):
                if not await self._answer_hello(connection, correlation_id, request):
                    return
                continue
            if isinstance(request, Challenge | Authenticate):
                await self._authenticate(connection, correlation_id, request)
                continue
            if connection.access is not None and not (
                await self._is_allowed(connection, correlation_id, request)
                and await self._wait_for_quota(connection, correlation_id, request, len(payload))
            ):
                continue
            is_pull = is_long_poll(request)
            if is_pull and connection.pull_count < PULLS_PER_CONNECTION_MAX:
                connection.pull_count += 1
                answer = self._answer_pull(connection, correlation_id, request, payload)
            else:
                await connection.wait_for_slot()
                connection.other_count += 1
                answer = self._answer_other(
                    connection, correlation_id, request, payload, is_over_limit=is_pull
                )
            connection.start_answer(answer)

    async def _answer_hello(
        self, connection: PlaneConnection, correlation_id: int, request: Request
    ) -> bool:
        """Check the client's version in the first frame, and answer the frame. Return False if the
        client was refused and its connection closed.
        """
        try:
            if not isinstance(request, Hello):
                raise VersionError(
                    Reason.CLIENT_TOO_OLD,
                    f"the client sent no version, the server is keylane {VERSION}",
                    server=VERSION,
                )
            check_client(request.version, VERSION)
        except KeylaneError as error:
            self._on_refusal(error)
            await self._write(connection, frame_parts(correlation_id, refusal(error)))
            await connection.refuse(error)
            return False
        connection.has_said_hello = True
        if connection.access is None:
            self._unauthenticated.pop(connection, None)
        await self._write(connection, frame_parts(correlation_id, Welcome(VERSION)))
        return True

    async def _authenticate(
        self, connection: PlaneConnection, correlation_id: int, request: Challenge | Authenticate
    ) -> None:
        """Answer a Challenge or an Authenticate frame, before any later frame is read."""
        access = connection.access
        try:
            if access is None or isinstance(request, Challenge):
                answer: Answer = Challenged(b"" if access is None else access.nonce)
            else:
                answer = await access.authenticate(request, partial(self._acquire_slot, connection))
                connection.socket.bytes_max = FRAME_BYTES_MAX
                self._unauthenticated.pop(connection, None)
        except KeylaneError as error:
            self._on_refusal(error)
            answer = refusal(error)
        await self._write(connection, frame_parts(correlation_id, answer))

    async def _is_allowed(
        self, connection: PlaneConnection, correlation_id: int, request: Request
    ) -> bool:
        """Return True if the caller may send this frame. Otherwise, answer the frame with the
        error.
        """
        assert connection.access is not None
        try:
            connection.access.check(request)
        except UnauthenticatedError as error:
            self._on_refusal(error)
            await connection.refuse(error)
            return False
        except KeylaneError as error:
            self._on_refusal(error)
            await self._write(connection, frame_parts(correlation_id, refusal(error)))
            return False
        return True

    async def _wait_for_quota(
        self, connection: PlaneConnection, correlation_id: int, request: Request, size: int
    ) -> bool:
        """
        Wait while a limit is used up. This pauses reading from the connection; requests that fetch
        messages wait in their own tasks instead.

        Returns:
            False if the wait would exceed HOLD_MS, in which case the frame has been answered with
            an error.
        """
        access = connection.access
        assert access is not None
        if isinstance(request, Pull | PullShared | Read):
            return True
        delay = access.delay(request)
        if delay.ms <= HOLD_MS:
            access.consume(request, size)
        if not delay.ms:
            return True
        access.record_wait(delay)
        await connection.notify_throttled(delay)
        await asyncio.sleep(min(delay.ms, HOLD_MS) / 1000)
        if delay.ms <= HOLD_MS:
            return True
        error = access.quota_error(delay)
        self._on_refusal(error)
        await self._write(connection, frame_parts(correlation_id, refusal(error)))
        return False

    @staticmethod
    async def _wait_to_fetch(connection: PlaneConnection, request: Request) -> None:
        """Wait until no limit is used up, and notify the client at least every HOLD_MS."""
        access = connection.access
        if access is None:
            return
        access.consume(request, 0)
        while (delay := access.delay(request)).ms:
            step = delay._replace(ms=min(delay.ms, HOLD_MS))
            access.record_wait(step)
            await connection.notify_throttled(step)
            await asyncio.sleep(step.ms / 1000)

    @staticmethod
    async def _write(connection: PlaneConnection, frame: Parts) -> None:
        try:
            await connection.send(frame)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")

    async def _answer_pull(
        self,
        connection: PlaneConnection,
        correlation_id: int,
        request: Request,
        payload: memoryview,
    ) -> None:
        try:
            await self._answer(connection, correlation_id, request, payload)
        finally:
            connection.pull_count -= 1

    async def _answer_other(
        self,
        connection: PlaneConnection,
        correlation_id: int,
        request: Request,
        payload: memoryview,
        *,
        is_over_limit: bool,
    ) -> None:
        try:
            await self._answer(
                connection, correlation_id, request, payload, is_over_limit=is_over_limit
            )
        finally:
            connection.free_slot()

    async def _answer(
        self,
        connection: PlaneConnection,
        correlation_id: int,
        request: Request,
        payload: memoryview,
        *,
        is_over_limit: bool = False,
    ) -> None:
        access = connection.access
        fetches = access is not None and type(request) in FETCH_FRAMES
        if fetches and not is_over_limit:
            await self._wait_to_fetch(connection, request)
        reservation = begin_answer(connection.budget)
        try:
            try:
                if is_over_limit:
                    raise OverloadedError(
                        f"a connection has at most {PULLS_PER_CONNECTION_MAX} pulls at once"
                    )
                answer, data = await self._handler(request, payload)
                reservation.settle(len(data))
                if access is not None and fetches:
                    access.consume(request, len(data), requests=0)
                frame = frame_parts(correlation_id, answer, data)
                del data, payload  # keep only the frame until it is sent
            except KeylaneError as error:
                self._on_refusal(error)
                frame = frame_parts(correlation_id, refusal(error))
            except Exception as fault:  # noqa: BLE001 - logged as a bug
                internal_error = log_fault(log, type(request).__name__, fault)
                self._on_refusal(internal_error)
                frame = frame_parts(correlation_id, refusal(internal_error))
            await connection.send(frame)
        except (ConnectionError, RuntimeError):
            log.debug("the client left before its answer")
        finally:
            reservation.release()

    async def _watch(self) -> None:
        """Disconnect clients that read or send nothing for too long, or whose capability has
        expired. One timer serves all connections.
        """
        intervals, interval_s = 0, min(SHORT_S, self._stuck_s) / 2
        while True:
            await asyncio.sleep(interval_s)
            intervals += 1
            is_exhausted = self._answer_budget.is_exhausted
            if self._guard is None and intervals % CHECK_EVERY and not is_exhausted:
                continue
            elapsed_s, intervals = intervals * interval_s, 0
            now_s = asyncio.get_running_loop().time()
            for connection, reader in self._readers.items():
                if connection in self._disconnect_tasks:
                    continue
                try:
                    error = self._disconnect_reason(connection, now_s, elapsed_s)
                except Exception:  # the other connections must still be watched
                    log.exception("closing a connection whose deadline cannot be watched")
                    error = InternalError()
                if error is None:
                    continue
                self._record_end(connection, error)
                # Runs in its own task, because it must not delay the checks of other connections.
                disconnect = self._disconnect(connection, reader, error)
                self._disconnect_tasks[connection] = start_task(disconnect)

    def _disconnect_reason(
        self, connection: PlaneConnection, now_s: float, elapsed_s: float
    ) -> KeylaneError | None:
        """
        Return the error with which to close a connection now, or None if it may stay open.

        Args:
            now_s: the time by the event loop's clock.
            elapsed_s: the time in seconds since the last check.
        """
        if connection.silent_s(elapsed_s) >= SILENT_S:
            return _disconnect_error(f"nothing was received for {SILENT_S:g} s")
        if connection.socket.unfinished_s() > FRAME_S:
            return _disconnect_error(f"a frame did not arrive completely within {FRAME_S:g} s")
        if connection.access is not None:
            try:
                connection.access.check_valid()
            except KeylaneError as expired:
                return expired
        elif not connection.has_said_hello and now_s - connection.opened_s > AUTHENTICATE_S:
            return _disconnect_error(f"no Hello arrived within {AUTHENTICATE_S:g} s")
        stuck_s = connection.stuck_s(now_s)
        is_exhausted = self._answer_budget.is_exhausted
        if stuck_s < self._stuck_s and not (is_exhausted and stuck_s >= SHORT_S):
            return None
        error = OverloadedError(
            Reason.ANSWER_NOT_TAKEN, f"this client has read no answer for {stuck_s:.0f} s"
        )
        log.warning("a client is disconnected: %s", error.message)
        return error

    @staticmethod
    async def _disconnect(
        connection: PlaneConnection, reader: asyncio.Task[None], error: KeylaneError
    ) -> None:
        """Close a connection. The client gets the error if it is still reading."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GOODBYE_S):
                    await connection.refuse(error)
        except Exception:
            log.exception("cannot send a client the reason of its disconnection")
        connection.transport.abort()
        reader.cancel()

    def _record_end(self, connection: PlaneConnection, error: KeylaneError) -> None:
        """Count the error with which a connection is closed, and write it to the audit log."""
        self._on_refusal(error)
        if connection.access is not None:
            connection.access.record_end(error)

    async def close(self, _app: web.Application) -> None:
        """Close all connections, and tell clients that the server is stopping."""
        error = UnreachableError("the server is stopping")
        await asyncio.gather(
            *(self._disconnect(*each, error) for each in self._readers.items()),
            return_exceptions=True,
        )


def _no_slot_error(text: str, principal: str, limit: int) -> ConnectionQuotaError:
    error = ConnectionQuotaError(
        text,
        principal=principal,
        limit=limit,
        retry_after_ms=RETRY_CONNECTION_MS,
    )
    error.hint = SLOT_HINT
    return error


def _disconnect_error(reason: str) -> FrameError:
    """Return the error for a client that is disconnected because it missed a deadline."""
    error = FrameError(reason)
    error.hint = "Open a new connection; a keylane client does so automatically."
    return error
