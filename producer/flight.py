"""When executors send: together at the end of a turn of the event loop, or after an answer of their
broker. Pure except for timers.

    first message ─▶ Turn ─▶ push(): sent
    while many partitions of the broker are unanswered: BrokerFlight ─▶ push()

Light traffic never reaches the limit CROWD, so its messages are sent in the next turn. If the turn
before also had a single message, the message is sent as soon as it is awaited. Under load, an open
batch grows instead of being sent with a few messages, because each batch costs a header, a call and
an answer.
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
"""The number of partitions of a broker with a batch in flight from which on open batches of other
partitions wait for an answer.
"""
WAIT_S = 0.005
"""The longest time in seconds that they wait, so that partitions that do not answer delay no other
partition for longer.
"""


class ExecutorOwner(Protocol[E_contra]):
    """The sender of a subject, as seen by its executors."""

    def has_spare(self, executor: E_contra) -> bool:
        """Return True if another executor is available."""
        ...

    def take_back(self, executor: E_contra, batches: list[OutgoingBatch], step: Step) -> None:
        """Take all batches that cannot stay, in order; `step` is NEW_ROUTE or ELSEWHERE."""
        ...

    def availability_changed(self) -> None:
        """Note that the broker of an executor fails, or answers again."""
        ...

    def emptied(self, executor: E_contra) -> None:
        """Note that an executor has no message left, and that its partition is not open in the
        route.
        """
        ...

    async def ask_history(self) -> Collection[str]:
        """
        Ask the metaserver which partitions are lost and where their brokers are now, and notify the
        executors.

        Returns:
            The names of the broker groups that are silent.

        Raises:
            KeylaneError: the call failed.
        """
        ...


class Pushed(Protocol):
    """An executor, as seen by a `Turn` or a `BrokerFlight`, which let it send."""

    open: OutgoingBatch
    waited: bool
    gathering: Gathering | None
    """The channel through which it sends, if the channel can gather frames."""

    def push(self) -> None:
        """Send the batches that may be sent now."""
        ...


class BrokerFlight:
    """The partitions of one broker that have a batch in flight, and those that wait for an answer
    of the broker.
    """

    __slots__ = ("__weakref__", "_loop", "_timer", "_waiting", "partitions")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[Pushed, None] = {}
        self.partitions = 0
        """The number of partitions that have a batch in flight."""

    @property
    def crowded(self) -> bool:
        """Return True while CROWD partitions or more have a batch in flight, so that open batches
        of others wait.
        """
        return self.partitions >= CROWD

    def wait(self, executor: Pushed) -> None:
        """Push `executor` after an answer, when those that already wait have been pushed, or after
        WAIT_S.
        """
        self._waiting[executor] = None
        if self._timer is None:
            self._timer = self._loop.call_later(WAIT_S, self._over)

    def forget(self, executor: Pushed) -> None:
        """Stop pushing `executor`."""
        self._waiting.pop(executor, None)

    def answered(self) -> None:
        """Note that a partition has no batch in flight any more."""
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
        ended: called at the end of the turn, before the executors send.
    """

    __slots__ = ("_due", "_ended", "_flights", "_hurried", "_lone", "_loop", "begun")

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], object]) -> None:
        self._loop = loop
        self._ended = ended
        self.begun = False
        """True if `ended` will be called at the end of this turn."""
        self._lone = False
        """True if the last turn sent a single message, and this turn has sent none yet."""
        self._hurried = False
        self._due: dict[Pushed, None] = {}
        self._flights: WeakValueDictionary[str | None, BrokerFlight] = WeakValueDictionary()
        """Flights by the address of the broker; executors hold the flights of the brokers to which
        they send, and a broker may return at another address.
        """

    def begin(self) -> None:
        """Arrange that `ended` is called at the end of this turn."""
        if not self.begun:
            self._loop.call_soon(self._end)
            self.begun = True

    def add(self, executor: Pushed) -> Callable[[], object] | None:
        """Push `executor` at the end of this turn, and return a callable that may push it earlier,
        or None.
        """
        self._due[executor] = None
        if not self.begun:
            self._loop.call_soon(self._end)
            self.begun = True
        return self._hurry if self._lone else None

    def _hurry(self) -> None:
        """Send now, once in a turn, if only one executor is due: a caller that has sent one message
        is waiting for it.
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
        """Return the flight of the broker at `address`; all brokers whose address is unknown share
        one flight.
        """
        flight = self._flights.get(address)
        if flight is None:
            flight = self._flights[address] = BrokerFlight(self._loop)
        return flight


def _flush(channel: Gathering, loop: asyncio.AbstractEventLoop) -> None:
    """Flush `channel`; an exception goes to the event loop, and the other channels are still
    flushed.
    """
    try:
        channel.flush()
    except Exception as error:  # noqa: BLE001 - the event loop reports it
        loop.call_exception_handler({"message": "a connection failed to write", "exception": error})


def _push(executor: Pushed, loop: asyncio.AbstractEventLoop) -> None:
    """Push `executor`; an exception, which is a bug in keylane, goes to the event loop, and the
    other executors are still pushed.
    """
    try:
        executor.push()
    except Exception as error:  # noqa: BLE001 - the event loop reports it
        text = "a bug in the producer: what a partition has to send waits for its next message"
        loop.call_exception_handler({"message": text, "exception": error})
