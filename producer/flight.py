"""Decides when executors send: together at the end of an event loop iteration (a turn), or after a
reply from their broker. Pure except for timers.

    first message ─▶ SendScheduler ─▶ push(): sent
    while many partitions of the broker have a batch in flight: BrokerLoad ─▶ push()

Light traffic never reaches BUSY_PARTITIONS_MAX, so its messages are sent at the end of the turn. If
the previous turn also had a single message, a message is sent as soon as it is awaited. Under load,
an open batch grows instead of being sent with a few messages, because each batch costs a header, a
call and a reply.
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

BUSY_PARTITIONS_MAX = 16
"""When this many partitions of a broker have a batch in flight, the open batches of its other
partitions wait for a reply.
"""
WAIT_S = 0.005
"""The maximum wait, in seconds, which bounds the delay that unresponsive partitions cause to
others.
"""


class ExecutorOwner(Protocol[E_contra]):
    """The interface of a subject's sender to its executors."""

    def has_alternative(self, executor: E_contra) -> bool:
        """Return True if another executor is available."""
        ...

    def reassign_batches(
        self, executor: E_contra, batches: list[OutgoingBatch], step: Step
    ) -> None:
        """Accept batches that leave the executor, in order; `step` is NEW_ROUTE or REROUTE."""
        ...

    def on_availability_changed(self) -> None:
        """React to a broker that has started to fail or has recovered."""
        ...

    def on_emptied(self, executor: E_contra) -> None:
        """React to an executor that has no messages left and whose partition is no longer open."""
        ...

    async def fetch_history(self) -> Collection[str]:
        """
        Fetch the lost partitions and the current broker addresses from the metaserver, and update
        the executors accordingly.

        Returns:
            The names of the silent broker groups.

        Raises:
            KeylaneError: the call failed.
        """
        ...


class PushableExecutor(Protocol):
    """The interface of an executor to `SendScheduler` and `BrokerLoad`, which let it send."""

    open: OutgoingBatch
    wait_is_over: bool
    gathering: Gathering | None
    """The channel in use, if it can gather frames."""

    def push(self) -> None:
        """Send the batches that may be sent now."""
        ...


class BrokerLoad:
    """Counts the partitions of one broker that have a batch in flight, and queues those that wait
    for a reply.
    """

    __slots__ = ("__weakref__", "_loop", "_timer", "_waiting", "busy_partitions")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: dict[PushableExecutor, None] = {}
        self.busy_partitions = 0
        """The number of partitions with a batch in flight."""

    @property
    def is_crowded(self) -> bool:
        """True while open batches must wait, because at least BUSY_PARTITIONS_MAX partitions have a
        batch in flight.
        """
        return self.busy_partitions >= BUSY_PARTITIONS_MAX

    def enqueue(self, executor: PushableExecutor) -> None:
        """Push `executor` after a reply has arrived and its predecessors have been pushed, or after
        WAIT_S.
        """
        self._waiting[executor] = None
        if self._timer is None:
            self._timer = self._loop.call_later(WAIT_S, self._push_all)

    def remove(self, executor: PushableExecutor) -> None:
        """Remove `executor` from the queue."""
        self._waiting.pop(executor, None)

    def release_partition(self) -> None:
        """Count one fewer busy partition, and push waiting executors while there is capacity."""
        self.busy_partitions -= 1
        while self._waiting and not self.is_crowded:
            self._push(next(iter(self._waiting)))

    def _push_all(self) -> None:
        self._timer = None
        for executor in list(self._waiting):
            self._push(executor)

    def _push(self, executor: PushableExecutor) -> None:
        self._waiting.pop(executor, None)
        executor.wait_is_over = True
        _push_safely(executor, self._loop)


class SendScheduler:
    """
    Schedules a producer's executors to send at the end of the current event loop turn.

    Args:
        on_end: called at the end of the turn, before the executors send.
    """

    __slots__ = (
        "_due_executors",
        "_on_end",
        "_broker_loads",
        "_sent_early",
        "_was_single",
        "_loop",
        "is_scheduled",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], object]) -> None:
        self._loop = loop
        self._on_end = on_end
        self.is_scheduled = False
        """True if `on_end` will be called at the end of this turn."""
        self._was_single = False
        """True if the previous turn sent a single message, and this one has sent none yet."""
        self._sent_early = False
        self._due_executors: dict[PushableExecutor, None] = {}
        self._broker_loads: WeakValueDictionary[str | None, BrokerLoad] = WeakValueDictionary()
        """The load of each broker, by address. Executors keep the loads of their brokers alive."""

    def begin_turn(self) -> None:
        """Schedule `on_end` for the end of this turn."""
        if not self.is_scheduled:
            self._loop.call_soon(self._end_turn)
            self.is_scheduled = True

    def schedule(self, executor: PushableExecutor) -> Callable[[], object] | None:
        """Schedule `executor` to be pushed at the end of this turn. Return a callback that may push
        it earlier, or None.
        """
        self._due_executors[executor] = None
        if not self.is_scheduled:
            self._loop.call_soon(self._end_turn)
            self.is_scheduled = True
        return self._send_early if self._was_single else None

    def _send_early(self) -> None:
        """Send now, once per turn, if only one executor is due, because its caller is awaiting a
        single message.
        """
        if self._was_single and len(self._due_executors) == 1:
            self._was_single = False
            self._sent_early = True
            self._on_end()
            self._push_due()

    def _end_turn(self) -> None:
        self.is_scheduled = False
        try:
            self._on_end()
        finally:
            due_executors = self._due_executors
            if self._sent_early:
                self._was_single = not due_executors
                self._sent_early = False
            else:
                self._was_single = (
                    len(due_executors) == 1 and len(next(iter(due_executors)).open.values) == 1
                )
            if due_executors:
                self._push_due()

    def _push_due(self) -> None:
        due_executors = self._due_executors
        self._due_executors = {}
        channels: dict[Gathering, None] = {}
        try:
            for executor in due_executors:
                channel = executor.gathering
                if channel is not None and channel not in channels:
                    channels[channel] = None
                    channel.gather()
                _push_safely(executor, self._loop)
        finally:
            for channel in channels:
                _flush_safely(channel, self._loop)  # the channel itself would flush one turn later

    def get_load(self, address: str | None) -> BrokerLoad:
        """Return the load of the broker at `address`. All brokers without a known address share
        one.
        """
        load = self._broker_loads.get(address)
        if load is None:
            load = self._broker_loads[address] = BrokerLoad(self._loop)
        return load


def _flush_safely(channel: Gathering, loop: asyncio.AbstractEventLoop) -> None:
    """Flush `channel`, passing any exception to the event loop's handler, so that the other
    channels are flushed too.
    """
    try:
        channel.flush()
    except Exception as error:  # noqa: BLE001 - the event loop reports it
        loop.call_exception_handler({"message": "a connection failed to write", "exception": error})


def _push_safely(executor: PushableExecutor, loop: asyncio.AbstractEventLoop) -> None:
    """Push `executor`, passing any exception (a bug in keylane) to the event loop's handler, so
    that the other executors are pushed too.
    """
    try:
        executor.push()
    except Exception as error:  # noqa: BLE001 - the event loop reports it
        text = "a bug in the producer: the messages of a partition wait until the next one is sent"
        loop.call_exception_handler({"message": text, "exception": error})
