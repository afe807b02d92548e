"""When executors send: together at the end of a turn of the event loop, or after an answer of their
broker.  Pure but for timers.

    first message ─▶ Turn ─▶ push(): sent          while many partitions of the broker are unanswered: BrokerFlight ─▶ push()

Little traffic meets no crowd, so it is sent in the next turn; or, where the turn before had a
single message too, as soon as it is awaited.  Under load an open batch grows in place of being sent
with the few messages that it has: each batch costs a head, a call and an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

from ..rpc.network import Gathering
from .failure import Step
from .outgoing_batch import OutgoingBatch

E_contra = TypeVar("E_contra", contravariant=True)

CROWD = 16
"""Partitions of a broker with a batch in flight, from which on open batches of others wait for an
answer.
"""
WAIT_S = 0.005
"""How long they wait at most: partitions that do not answer delay no other for longer."""


class ExecutorOwner(Protocol[E_contra]):
    """The sender of a subject, as its executors see it."""

    def has_spare(self, executor: E_contra) -> bool:
        """True if another executor is available."""
        ...

    def take_back(self, executor: E_contra, batches: list[OutgoingBatch], step: Step) -> None:
        """Take all batches that cannot stay, in order; `step` is NEW_ROUTE or ELSEWHERE."""
        ...

    def availability_changed(self) -> None:
        """Take note that an executor's broker fails, or answers again."""
        ...

    def emptied(self, executor: E_contra) -> None:
        """Take note that an executor has no message left, and that its partition is not open in the
        route.
        """
        ...

    async def ask_history(self) -> Collection[str]:
        """
        Ask the metaserver which partitions are lost and where their brokers are now, and tell
        executors of it.

        Returns:
            The names of the broker groups that are silent.

        Raises:
            KeylaneError: as the call raised it.
        """
        ...


class Pushed(Protocol):
    """An executor, as it is told that it may send."""

    open: OutgoingBatch
    waited: bool
    gathering: Gathering | None
    """The channel through which it sends, if that can gather."""

    def push(self) -> None:
        """Send what may be sent now."""
        ...


class BrokerFlight:
    """The partitions of one broker that have a batch in flight, and those that wait for an answer
    of it.
    """

    __slots__ = ("__weakref__", "_loop", "_timer", "_waiting", "partitions")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Pushed, None] = {}
        self.partitions = 0
        """How many have a batch in flight."""

    @property
    def crowded(self) -> bool:
        """True while CROWD partitions or more have one: open batches of others wait."""
        return self.partitions >= CROWD

    def wait(self, executor: Pushed) -> None:
        """Have `executor` pushed after an answer, behind those that wait already, or after
        WAIT_S.
        """
        self._waiting[executor] = None
        if self._timer is None:
            self._timer = self._loop.call_later(WAIT_S, self._over)

    def forget(self, executor: Pushed) -> None:
        """Push `executor` no more."""
        self._waiting.pop(executor, None)

    def answered(self) -> None:
        """A partition has no batch in flight any more."""
        self.partitions -= 1
        while self._waiting and not self.crowded:
            self._push(next(iter(self._waiting)))

    def _over(self) -> None:
        self._timer = None
        for executor in list(self._waiting):
            self._push(executor)

    def _push(self, executor: Pushed) -> None:
        self._waiting.pop(executor, None)
        executor.waited = True
        _push(executor, self._loop)


class Turn:
    """
    The executors of a producer that send at the end of this turn of the event loop.

    Args:
        ended: called at that end, before they send.
    """

    __slots__ = ("_due", "_ended", "_flights", "_hurried", "_lone", "_loop", "begun")

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        self._loop = loop
        self._ended = ended
        self.begun = False
        """`ended` is called at the end of this turn."""
        self._lone = False
        """The last turn sent a single message, and this one none before its end."""
        self._hurried = False
        self._due: dict[Pushed, None] = {}
        self._flights: WeakValueDictionary[str | None, BrokerFlight] = WeakValueDictionary()
        """By address; executors hold those of brokers that they send to, and brokers come back at
        other addresses.
        """

    def begin(self) -> None:
        """Have `ended` called at the end of this turn."""
        if not self.begun:
            self._loop.call_soon(self._end)
            self.begun = True

    def add(self, executor: Pushed) -> Callable[[], object] | None:
        """Have `executor` pushed at the end of this turn; returns what may push it before."""
        self._due[executor] = None
        if not self.begun:
            self._loop.call_soon(self._end)
            self.begun = True
        return self._hurry if self._lone else None

    def _hurry(self) -> None:
        """Send what is due now, if it is of one executor, once in a turn: who has sent one message
        waits for it.
        """
        if self._lone and len(self._due) == 1:
            self._lone = False
            self._hurried = True
            self._ended()
            self._push()

    def _end(self) -> None:
        self.begun = False
        try:
            self._ended()
        finally:
            due = self._due
            if self._hurried:
                self._lone = not due
                self._hurried = False
            else:
                self._lone = len(due) == 1 and len(next(iter(due)).open.values) == 1
            if due:
                self._push()

    def _push(self) -> None:
        due = self._due
        self._due = {}
        channels: dict[Gathering, None] = {}
        try:
            for executor in due:
                channel = executor.gathering
                if channel is not None and channel not in channels:
                    channels[channel] = None
                    channel.gather()
                _push(executor, self._loop)
        finally:
            for channel in channels:
                _flush(channel, self._loop)  # a turn earlier than the channel would by itself

    def flight(self, address: str | None) -> BrokerFlight:
        """The flight of the broker at `address`; one for all whose address is not known."""
        flight = self._flights.get(address)
        if flight is None:
            flight = self._flights[address] = BrokerFlight(self._loop)
        return flight


def _flush(channel: Gathering, loop: asyncio.AbstractEventLoop) -> None:
    """Flush `channel`; what it raises goes to the event loop, and the others are flushed all the
    same.
    """
    try:
        channel.flush()
    except Exception as error:  # noqa: BLE001 - told to the event loop, as the fault of a callback is
        loop.call_exception_handler({"message": "a connection failed to write", "exception": error})


def _push(executor: Pushed, loop: asyncio.AbstractEventLoop) -> None:
    """Push `executor`; a fault of it, which is a bug of ours, goes to the event loop, and the
    others are pushed all the same.
    """
    try:
        executor.push()
    except Exception as error:  # noqa: BLE001 - told to the event loop, as the fault of a callback is
        text = "a bug in the producer: what a partition has to send waits for its next message"
        loop.call_exception_handler({"message": text, "exception": error})
