"""Detects dead connections. If a connection is silent, a probe on a new connection to the same
server decides whether to close the silent one.

    silence ─▶ ping, no reply ─▶ does the server answer on a new connection?
                 ▲                    │ no: the server is paused or unreachable ─▶ probe again later
                 │                    ╰ yes ─▶ ping again, no reply in GRACE_S ─▶ close
                 ╰──────────── any received data ends the silence

Invariants
    A server that is merely paused loses no connection before LOST_S, because it answers no probe.
    After a connection that never received an answer, the next one to the same address waits twice
    as long before it probes, up to SILENCE_TIMEOUT_S_MAX. So a server that answers probes but does
    not read its data connections gets few new ones.
    Throttling by a quota is not silence.

TCP keepalive makes the kernel send packets on an idle connection, so that no firewall on the path
forgets it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as socket_module
from collections.abc import Awaitable, Callable
from socket import IPPROTO_TCP, SOL_SOCKET
from typing import Any, Protocol

from ...protocol.clock import round_to_tick
from ..race import start_task

CHECK_INTERVAL_S = 2.0
"""The time in seconds between two checks of a connection; half as long while a ping is pending."""
IDLE_S = 8.0
"""The time in seconds after which a silent idle connection is pinged. While an answer is
outstanding, the connection is pinged at the first check.
"""
GRACE_S = 1.5
"""The time in seconds to wait for the reply to a ping when the server answers on another
connection. It exceeds the interval between two checks while a ping is pending.
"""
LOST_S = 20.0
"""The time in seconds after which a silent connection is closed even without a successful probe."""
PROBE_PAUSE_S = 2.0
"""The time in seconds between two probes. It doubles each time, up to PROBE_PAUSE_S_MAX."""
PROBE_PAUSE_S_MAX = 8.0
SILENCE_TIMEOUT_S_MAX = 16.0
ADDRESSES_KNOWN_MAX = 1_000
"""The maximum number of addresses whose timeout is remembered: those of the most recently closed
connections.
"""


class WatchedConnection(Protocol):
    """A connection that is watched; see `frames.frame_socket.FrameSocket`."""

    has_received: bool
    reading: bool

    def ping(self) -> None:
        """Send a ping to the server."""
        ...

    def abort(self, reason: str) -> None:
        """Abort the connection."""
        ...


class SilenceTimeouts:
    """Remembers how long connections to each address may be silent before a probe is made."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        """The timeout in seconds by address; the address of the connection closed last comes
        last.
        """

    def timeout_s(self, address: str) -> float:
        """Return the timeout in seconds for a connection to `address` that has not received an
        answer yet. If it is 0, a probe is made after the first unanswered ping.
        """
        return self._seconds.get(address, 0.0)

    def record_closed(self, address: str, *, has_received: bool) -> None:
        """Record that a connection to `address` was closed as dead."""
        previous_s = self._seconds.pop(address, 0.0)
        if has_received:
            return
        self._seconds[address] = min(max(2 * previous_s, 1.0), SILENCE_TIMEOUT_S_MAX)
        if len(self._seconds) > ADDRESSES_KNOWN_MAX:  # brokers come back at other addresses
            del self._seconds[next(iter(self._seconds))]


class SilenceWatchdog:
    """
    Watches one connection for silence, and closes it if it is dead.

    Args:
        socket: the connection.
        is_answering: returns True if the server answers on a new connection. It takes a few seconds
            at most, and does not raise.
        silence_timeouts: shared by all connections of the client.
        has_received: returns True if this connection has received any answer.
        is_reply_outstanding: returns True if an answer is pending, other than to a long poll.
    """

    def __init__(
        self,
        socket: WatchedConnection,
        address: str,
        is_answering: Callable[[], Awaitable[bool]],
        silence_timeouts: SilenceTimeouts,
        *,
        has_received: Callable[[], bool],
        is_reply_outstanding: Callable[[], bool],
    ) -> None:
        self._socket = socket
        self._address = address
        self._is_answering = is_answering
        self._silence_timeouts = silence_timeouts
        self._has_received = has_received
        self._is_reply_outstanding = is_reply_outstanding
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time
        self._timeout_s = silence_timeouts.timeout_s(address)
        self._excused_until_s = 0.0
        self._probe_at_s = 0.0
        self._pause_s = PROBE_PAUSE_S
        self._probe_task: asyncio.Task[None] | None = None
        self._silent_s = 0.0
        self._is_ping_pending = False
        """True after a ping, until something is received."""
        self._timer = self._schedule_check()

    @property
    def _interval_s(self) -> float:
        return CHECK_INTERVAL_S / 2 if self._is_ping_pending else CHECK_INTERVAL_S

    def _schedule_check(self) -> asyncio.TimerHandle:
        return self._loop.call_at(round_to_tick(self._interval_s, self._now_s()), self._check)

    def _check(self) -> None:
        """Measure the silence since the last check, then ping, probe or close the connection as
        needed.
        """
        socket = self._socket
        self._silent_s += self._interval_s
        if socket.has_received or not socket.reading:
            self._silent_s = 0.0
            self._is_ping_pending = False
            self._probe_at_s = 0.0
            self._pause_s = PROBE_PAUSE_S
        elif not self._is_ping_pending:
            if self._silent_s >= IDLE_S or self._is_reply_outstanding():
                self.ping()
        elif not self.is_alive(self._silent_s):
            socket.abort(f"no data was received for {self._silent_s:g} s")
            return
        socket.has_received = False
        self._timer = self._schedule_check()

    def ping(self) -> None:
        """Send a ping. Anything that is received counts as the reply."""
        self._is_ping_pending = True
        self._socket.has_received = False
        self._socket.ping()

    @property
    def _is_silent(self) -> bool:
        """True if nothing has been received since the last ping."""
        return self._is_ping_pending and self._socket.reading and not self._socket.has_received

    def excuse(self, wait_s: float) -> None:
        """Ignore silence for `wait_s`, because the server has announced that calls will wait that
        long.
        """
        self._excused_until_s = self._now_s() + wait_s

    def is_alive(self, silent_s: float) -> bool:
        """Return False if the connection is lost after `silent_s` without a reply to a ping.
        Otherwise, start a probe if one is due.
        """
        now_s = self._now_s()
        if now_s < self._excused_until_s:
            return True
        if silent_s >= LOST_S:
            return False
        is_tolerated = silent_s < self._timeout_s and not self._has_received()
        if self._probe_task is None and not is_tolerated and now_s >= self._probe_at_s:
            self._probe_task = start_task(self._probe(), name=f"silence of {self._address}")
            self._probe_task.add_done_callback(self._on_probed)
        return True

    async def _probe(self) -> None:
        """Close the connection if the server answers on a new one, but not on this one."""
        if not await self._is_answering() or not self._is_silent:
            return
        self.ping()
        await asyncio.sleep(GRACE_S)
        if self._is_silent:
            self._silence_timeouts.record_closed(self._address, has_received=self._has_received())
            self._socket.abort(
                "no data was received, although the server answers on a new connection"
            )

    def _on_probed(self, task: asyncio.Task[None]) -> None:
        self._probe_task = None
        self._probe_at_s = self._now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, PROBE_PAUSE_S_MAX)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def end(self) -> None:
        """Stop watching, because the connection is closed."""
        self._timer.cancel()
        if self._probe_task is not None:
            self._probe_task.cancel()


KEEPALIVE = (
    (SOL_SOCKET, "SO_KEEPALIVE", 1),
    (IPPROTO_TCP, "TCP_KEEPIDLE", 4),
    (IPPROTO_TCP, "TCP_KEEPINTVL", 2),
    (IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""Socket options with which the kernel detects a broken path within 10 s; a pull may wait longer
than that without sending anything.
"""


def keep_alive(socket: socket_module.socket) -> None:
    """Enable TCP keepalive, with as many of the `KEEPALIVE` options as the system supports."""
    for level, name, value in KEEPALIVE:
        # A system may lack some of these options, or may not support setting them.
        with contextlib.suppress(AttributeError, OSError):
            socket.setsockopt(level, getattr(socket_module, name), value)


def watched_socket(address: tuple[Any, ...]) -> socket_module.socket:
    """Return a socket with keepalive for a connection to `address`, an entry from `getaddrinfo`;
    see aiohttp's `socket_factory`.
    """
    family, kind, protocol, *_ = address
    new_socket = socket_module.socket(family, kind, protocol)
    keep_alive(new_socket)
    return new_socket
