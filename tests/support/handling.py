"""Workers with a pull client that only counts, in real or in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any, TypeVar

from keylane.consumer.handling.workers import Handler, Workers
from keylane.consumer.pulling.messages_in_flight import MessagesInFlight
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import Clock, SystemClock, deadline_seconds
from keylane.protocol.message import Message
from keylane.protocol.parked import Failure
from keylane.testing.machines.loop import SimLoop
from keylane.testing.machines.machine import Machine

T = TypeVar("T")


class Crash(BaseException):
    """Not an Exception: the program is to end."""


class Client:
    """The members of a pull client that workers use."""

    def __init__(self, partition_id: int = 1, *, retrying_max: int = 0) -> None:
        self.partition_id = self.leased_id = partition_id
        self.group = ""
        self.deadline_ns = 2**62
        self.left_ms = 60_000
        self.client = self
        self.handled: list[int] = []
        self.in_flight = MessagesInFlight(retrying_max=retrying_max)
        self.set_aside: list[tuple[str, int, list[int], Failure]] = []
        self.hanging: list[tuple[int, str, int, int]] = []
        """(offset, what, failed tries, milliseconds), as told."""
        self.is_loose = self.is_apart = False

    def has_handed_out(self, message: Message) -> bool:
        """True if the message is of this client."""
        return message.delivery is self

    sealed = False
    reports_runs = True

    @property
    def deadline_s(self) -> float:
        return deadline_seconds(self.deadline_ns)

    def report_failure(self, message: Message, failure: Failure) -> None:
        """Take a failed try."""

    def report_hang(self, message: Message, why: Failure, running_ms: int) -> None:
        self.hanging.append((message.offset, why.text, why.attempts, running_ms))

    def is_delivered(self, message: Message) -> bool:
        """True if a program has the message."""
        return message.offset not in self.handled

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        behind = [each.offset for each in waiting]
        self.set_aside.append(("parked", message.offset, behind, failure))
        self.in_flight.remove(1 + len(waiting))

    def dead_letter(self, message: Message, failure: Failure) -> None:
        self.set_aside.append(("buried", message.offset, [], failure))
        self.in_flight.remove(1)

    def retry(self, message: Message, failure: Failure, _pause_ms: int) -> None:
        self.set_aside.append(("retried", message.offset, [], failure))
        self.in_flight.remove(1)

    def mark_handled(self, offset: int) -> None:
        self.handled.append(offset)
        self.in_flight.remove(1)

    def mark_all_handled(self, messages: list[Message]) -> None:
        self.handled += [message.offset for message in messages]
        self.in_flight.remove(len(messages))

    def discard_in_flight(self, count: int) -> None:
        self.in_flight.remove(count)

    def add_retrying(self, count: int) -> None:
        self.in_flight.add_retrying(count)

    async def wait_handled(self) -> None:
        await self.in_flight.wait_until_empty()

    def lose(self) -> None:
        """End the lease."""
        self.deadline_ns = 0

    def messages(self, *keys: bytes, start: int = 0) -> list[Message]:
        """A message of each key, offsets from `start` on."""
        return [
            Message("s", key, b"", start + index, self.partition_id, 0, delivery=self)
            for index, key in enumerate(keys)
        ]

    def give(self, workers: Workers, *keys: bytes, start: int = 0) -> list[Message]:
        """Hand out a message of each key."""
        messages = self.messages(*keys, start=start)
        self.in_flight.count += len(messages)
        workers.put(messages)
        return messages


def workers_of(
    handler: Handler,
    *,
    crashed: list[BaseException] | None = None,
    concurrency: int = 1,
    clock: Clock | None = None,
    first_ms: int = 1,
    max_ms: int = 1,
    handover_ms: int = 0,
    ordered: bool = True,
    handler_timeout_ms: int = 0,
    cancels: bool = True,
) -> Workers:
    """Workers that try again after `first_ms`."""
    return Workers(
        handler,
        concurrency=concurrency,
        handover_ms=handover_ms,
        backoff=Backoff(first_ms=first_ms, max_ms=max_ms),
        clock=clock or SystemClock(),
        rng=random.Random(1),
        on_crash=(crashed if crashed is not None else []).append,
        ordered=ordered,
        handler_timeout_ms=handler_timeout_ms,
        cancels=cancels,
    )


def in_virtual_time(story: Coroutine[Any, Any, T], loop: SimLoop) -> T:
    """Run `story` on a loop whose time jumps to the next timer."""
    try:
        return loop.run_until_complete(story)
    finally:
        asyncio.set_event_loop(None)
        loop.dispose()


def virtual_loop() -> tuple[SimLoop, Machine]:
    """A loop in virtual time, and its clock."""
    loop = SimLoop(random.Random(1))
    return loop, Machine(loop, "m", rate=1.0, boot_s=10.0)
