"""The shared context of the parts of parking: their pull client, the brokers that they call, and
their tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from ...protocol.control import Grant
from ...protocol.errors import KeylaneError
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.operations import SubjectHistory
from ...protocol.parked import Failure
from ...rpc.client import BrokerClient
from ...rpc.connections import Connections
from ...rpc.race import start_task
from ..delivery.alone_turn import AloneTurn
from ..delivery.client_delivery import DeliveringClient
from ..log_names import partition_name
from ..settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")


class ParkingClient(DeliveringClient, Protocol):
    """The further methods of a pull client that parking needs; the client is in `pulling/`, above
    this folder.
    """

    @property
    def broker(self) -> BrokerClient:
        """Return the client of the partition's broker."""
        ...

    acks_until_ns: int
    """The time until which acks are sent; 0 once none is sent."""

    @property
    def acked_to_end(self) -> bool:
        """Return True when the partition is sealed, and its group has acked it to the end."""
        ...

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run the body of a task, whose error ends the client or the consumer."""
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as handed out, and give them to handlers or the iteration."""
        ...

    def redriven_failed(self, source: int, message: Message, failure: Failure) -> None:
        """Have the broker show that a parked message, stored by partition `source`, fails again."""
        ...

    def redriven_hangs(self, source: int, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show that the try of such a message does not end."""
        ...

    def redriven_ended(self, source: int, offset: int) -> None:
        """Note that this message is handled, or no longer here."""
        ...

    def wall_ms(self) -> int:
        """Return the calendar time, in milliseconds since 1970."""
        ...

    def boot_ns(self) -> int:
        """Return the time of the boot clock, in nanoseconds."""
        ...

    def settled(self) -> None:
        """Note that a change is durable, or a redrive ended."""
        ...


class ParkingOwner(Protocol):
    """The consumer, as seen by parking."""

    alone: AloneTurn
    """The turn of messages that may end the process."""

    @property
    def redrives(self) -> bool:
        """Return whether it takes parked messages that are handled again."""
        ...

    @property
    def buries_when_full(self) -> bool:
        """Return whether keys become dead letters where the group can park no more."""
        ...

    async def history(self) -> SubjectHistory:
        """Return every partition that the subject ever had."""
        ...


class ParkContext:
    """
    One partition under one grant, as parking sees it.

    Args:
        who: the owner as named in requests: partition id, group, session and token.
    """

    def __init__(
        self,
        client: ParkingClient,
        owner: ParkingOwner,
        grant: Grant,
        who: tuple[int, str, str, int],
        *,
        subject: str,
        connections: Connections,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.client = client
        self.owner = owner
        self.grant = grant
        self.who = who
        self.partition_id, group, *_ = who
        self.log_name = partition_name(subject, self.partition_id, group)
        self.subject = subject
        self.broker_at = connections.broker_at
        self.settings = settings
        self.rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def spawn(self, body: Callable[[], Awaitable[None]], what: str) -> asyncio.Task[None] | None:
        """Run a task that ends with the pull client, or ends it; return None once the client hands
        over.
        """
        if self._stopped:
            return None
        name = f"{what} {self.partition_id}"
        task = start_task(self.client.run(body), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> list[asyncio.Task[None]]:
        """Begin nothing more, and return the tasks that end."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def log_failure(
        self, troubles: LogFilter, what: str, error: KeylaneError, level: int = logging.INFO
    ) -> None:
        """Log that work on `what` has failed, unless that was logged lately."""
        if line := troubles.met(error.message, self.client.boot_ns() // 1_000_000):
            log.log(level, "%s: %s: %s", self.log_name, what, line)

    def log_recovery(self, troubles: LogFilter, what: str) -> None:
        """Log that work on `what` succeeds again, if its failure was logged."""
        if failures := troubles.over(self.client.boot_ns() // 1_000_000):
            log.info("%s: %s: the broker answers again, after %s", self.log_name, what, failures)

    async def pause(self, failures: int) -> None:
        """Wait before the next try."""
        await asyncio.sleep(self.pause_ns(failures) / 1e9)

    def pause_ns(self, failures: int) -> int:
        """Return the nanoseconds to wait after this number of consecutive failures."""
        return self.settings.backoff.wait_ms(failures, self.rng) * 1_000_000
