"""A silent connection: another connection to the same server decides whether it is given up.

    silence ─▶ ping, no answer ─▶ does a new connection get an answer?
                 ▲                    │ no: the server pauses, or is away ─▶ ask again later
                 │                    ╰ yes ─▶ ping again, no answer in GRACE_S ─▶ given up
                 ╰──────────── anything that arrives ends the silence

Invariants
    A server that only pauses loses no connection before LOST_S, because it answers on none.
    A connection that brought no answer at all makes the next one to its address wait twice as long,
    up to PATIENCE_S_MAX, until that one brings an answer: a server that reads nothing for a while
    but answers others sees few new connections.
    Waits because of a quota are not silence.

The kernel's watch over a connection: it sends packets while nothing else is sent, so that a
firewall on the way does not forget the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as socket_module
from collections.abc import Awaitable, Callable
from socket import IPPROTO_TCP, SOL_SOCKET
from typing import Any, Protocol

from ...protocol.clock import at_a_tick
from ..race import start_task

LOOK_S = 2.0
"""Between two looks at a connection; half of it while a sign of life is awaited."""
IDLE_S = 8.0
"""Seconds of silence after which an idle connection is pinged; one that owes an answer is pinged at
the first look.
"""
GRACE_S = 1.5
"""Seconds for the answer to a ping while the server answers on another connection; longer than the
interval between two looks while a sign of life is awaited.
"""
LOST_S = 20.0
"""Seconds of silence that end the connection, whatever another one does."""
ASK_AGAIN_S = 2.0
"""Seconds between two tries of a new connection; doubled each time, up to ASK_AGAIN_S_MAX."""
ASK_AGAIN_S_MAX = 8.0
PATIENCE_S_MAX = 16.0
ADDRESSES_KNOWN_MAX = 1_000
"""Addresses with a longer patience that are remembered; those given up last."""


class JudgedConnection(Protocol):
    """The connection that is judged; see `frames.frame_socket.FrameSocket`."""

    heard: bool
    reading: bool

    def ask(self) -> None:
        """Ask the server for a sign of life."""
        ...

    def give_up(self, why: str) -> None:
        """End the connection at once."""
        ...


class SilencePatience:
    """The seconds that connections to each address may be silent before another one is tried."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        """Seconds by address; the address given up last is last."""

    def of(self, address: str) -> float:
        """Return the seconds for a connection to `address` that has brought no answer; 0: the first
        unanswered ping counts.
        """
        return self._of.get(address, 0.0)

    def given_up(self, address: str, *, had_answers: bool) -> None:
        """Note that a connection to `address` was given up."""
        before = self._of.pop(address, 0.0)
        if had_answers:
            return
        self._of[address] = min(max(2 * before, 1.0), PATIENCE_S_MAX)
        if len(self._of) > ADDRESSES_KNOWN_MAX:  # brokers come back at other addresses
            del self._of[next(iter(self._of))]


class Silence:
    """
    Judges the silence of one connection.

    Args:
        socket: the connection.
        answers: returns whether the server answers on a new connection; it takes a few seconds at
            most, and does not raise.
        patience: shared by all connections of the client.
        had_answers: returns whether this connection has brought answers to calls, or parts of one.
        owed: returns whether an answer is outstanding that does not wait for messages.
    """

    def __init__(
        self,
        socket: JudgedConnection,
        address: str,
        answers: Callable[[], Awaitable[bool]],
        patience: SilencePatience,
        *,
        had_answers: Callable[[], bool],
        owed: Callable[[], bool],
    ) -> None:
        self._socket = socket
        self._address = address
        self._answers = answers
        self._patience = patience
        self._had_answers = had_answers
        self._owed = owed
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time
        self._patience_s = patience.of(address)
        self._excused_until_s = 0.0
        self._ask_at_s = 0.0
        self._pause_s = ASK_AGAIN_S
        self._asking: asyncio.Task[None] | None = None
        self._silent_s = 0.0
        self._waits = False
        """True from the time that a sign of life was asked for until something comes."""
        self._timer = self._look_in(LOOK_S)

    def _look_in(self, after_s: float) -> asyncio.TimerHandle:
        return self._loop.call_at(at_a_tick(after_s, self._now_s()), self._look)

    def _look(self) -> None:
        socket = self._socket
        after_s = LOOK_S / 2 if self._waits else LOOK_S
        self._silent_s += after_s
        if socket.heard or not socket.reading:
            self._silent_s = 0.0
            self._waits = False
            self._ask_at_s = 0.0
            self._pause_s = ASK_AGAIN_S
        elif not self._waits:
            if self._silent_s >= IDLE_S or self._owed():
                self.ask()
        elif not self.goes_on(self._silent_s):
            socket.give_up(f"no data was received for {self._silent_s:g} s")
            return
        socket.heard = False
        self._timer = self._look_in(LOOK_S / 2 if self._waits else LOOK_S)

    def ask(self) -> None:
        """Ask the server for a sign of life."""
        self._waits = True
        self._socket.heard = False
        self._socket.ask()

    @property
    def _silent(self) -> bool:
        """True if nothing has come since a sign of life was asked for."""
        return self._waits and self._socket.reading and not self._socket.heard

    def excuse(self, wait_s: float) -> None:
        """Note that the server has announced such a wait of calls."""
        self._excused_until_s = self._now_s() + wait_s

    def goes_on(self, silent_s: float) -> bool:
        """Judge a silence that has lasted for `silent_s`, after a ping; False if the connection is
        lost.
        """
        now_s = self._now_s()
        if now_s < self._excused_until_s:
            return True
        if silent_s >= LOST_S:
            return False
        patient = silent_s < self._patience_s and not self._had_answers()
        if self._asking is None and not patient and now_s >= self._ask_at_s:
            self._asking = start_task(self._ask(), name=f"silence of {self._address}")
            self._asking.add_done_callback(self._asked)
        return True

    async def _ask(self) -> None:
        if not await self._answers() or not self._silent:
            return
        self.ask()
        await asyncio.sleep(GRACE_S)
        if self._silent:
            self._patience.given_up(self._address, had_answers=self._had_answers())
            self._socket.give_up(
                "no data was received, although the server answers on a new connection"
            )

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        self._ask_at_s = self._now_s() + self._pause_s
        self._pause_s = min(2 * self._pause_s, ASK_AGAIN_S_MAX)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def end(self) -> None:
        """Note that the connection has ended."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()


KEEPALIVE = (
    (SOL_SOCKET, "SO_KEEPALIVE", 1),
    (IPPROTO_TCP, "TCP_KEEPIDLE", 4),
    (IPPROTO_TCP, "TCP_KEEPINTVL", 2),
    (IPPROTO_TCP, "TCP_KEEPCNT", 3),
)
"""Options with which the kernel notices a lost path within 10 s though nothing is sent; a pull may
wait for longer.
"""


def keep_alive(socket: socket_module.socket) -> None:
    """Have the kernel watch a connection, as far as the system can."""
    for level, name, value in KEEPALIVE:
        # Not every system has all of these names, or can set all that it has.
        with contextlib.suppress(AttributeError, OSError):
            socket.setsockopt(level, getattr(socket_module, name), value)


def watched_socket(address: tuple[Any, ...]) -> socket_module.socket:
    """Return a socket for a connection to `address`, in the form of `getaddrinfo`; see aiohttp's
    `socket_factory`.
    """
    family, kind, protocol, *_ = address
    made = socket_module.socket(family, kind, protocol)
    keep_alive(made)
    return made
