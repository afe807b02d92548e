"""The context that the parking modules share: pull client, brokers and tasks."""

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
from ..delivery.client_delivery import DeliveryClient
from ..delivery.suspect_lock import SuspectLock
from ..log_names import partition_name
from ..settings import ConsumerSettings

log = logging.getLogger("keylane.consumer")


class ParkingClient(DeliveryClient, Protocol):
    """The interface of a pull client to the parking modules. The client itself is in `pulling/`,
    above this folder.
    """

    @property
    def broker(self) -> BrokerClient:
        """The client of the partition's broker."""
        ...

    ack_deadline_ns: int
    """The boot time until which acks are sent; 0 once no more acks are sent."""

    @property
    def acked_to_end(self) -> bool:
        """True once the partition is sealed and its group has acked it to the end."""
        ...

    async def run(self, body: Callable[[], Awaitable[None]]) -> None:
        """Run a task's body. An error in it ends the client or closes the consumer."""
        ...

    def hand_out(self, messages: list[Message]) -> None:
        """Count messages as in flight, and pass them to handlers or to the iterating program."""
        ...

    def report_redriven_failure(self, source: int, message: Message, failure: Failure) -> None:
        """Report that a redriven message, stored by partition `source`, has failed again."""
        ...

    def report_redriven_hang(
        self, source: int, message: Message, failure: Failure, running_ms: int
    ) -> None:
        """Report that a redriven message hangs."""
        ...

    def clear_redriven(self, source: int, offset: int) -> None:
        """Record that a redriven message is handled, or no longer held by this consumer."""
        ...

    def wall_ms(self) -> int:
        """Return the wall-clock time, in milliseconds since 1970."""
        ...

    def boot_ns(self) -> int:
        """Return the boot-clock time, in nanoseconds."""
        ...

    def check_drained(self) -> None:
        """Check whether the partition is drained, after a change has become durable or a redrive
        has ended.
        """
        ...


class ParkingOwner(Protocol):
    """The interface of the consumer to the parking modules."""

    alone: SuspectLock
    """Runs messages that may kill the process one at a time."""

    @property
    def allows_redrives(self) -> bool:
        """True if parked messages can be redriven here."""
        ...

    @property
    def dead_letters_when_full(self) -> bool:
        """True if messages become dead letters when the group cannot park any more keys."""
        ...

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        ...


class ParkContext:
    """
    Holds what the parking modules need to know about one partition under one grant.

    Args:
        lease: the partition id, group, session and token, as in requests.
    """

    def __init__(
        self,
        client: ParkingClient,
        owner: ParkingOwner,
        grant: Grant,
        lease: tuple[int, str, str, int],
        *,
        subject: str,
        connections: Connections,
        settings: ConsumerSettings,
        rng: random.Random,
    ) -> None:
        self.client = client
        self.owner = owner
        self.grant = grant
        self.lease = lease
        self.partition_id, group, *_ = lease
        self.log_name = partition_name(subject, self.partition_id, group)
        self.subject = subject
        self.broker_at = connections.broker_at
        self.settings = settings
        self.rng = rng
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def spawn(
        self, body: Callable[[], Awaitable[None]], activity: str
    ) -> asyncio.Task[None] | None:
        """Start a task that is cancelled with the pull client; an error in it ends the client.
        Return None once the client is handing over.
        """
        if self._stopped:
            return None
        name = f"{activity} {self.partition_id}"
        task = start_task(self.client.run(body), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def stop(self) -> list[asyncio.Task[None]]:
        """Start no more tasks. Cancel the running ones and return them."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def log_failure(
        self, failure_log: LogFilter, activity: str, error: KeylaneError, level: int = logging.INFO
    ) -> None:
        """Log that the work on `activity` has failed, unless that was logged recently."""
        if text := failure_log.count_failure(error.message, self.client.boot_ns() // 1_000_000):
            log.log(level, "%s: %s: %s", self.log_name, activity, text)

    def log_recovery(self, failure_log: LogFilter, activity: str) -> None:
        """Log that the work on `activity` succeeds again, if its failure was logged."""
        if failures := failure_log.end_failures(self.client.boot_ns() // 1_000_000):
            log.info(
                "%s: %s: the broker answers again, after %s", self.log_name, activity, failures
            )

    async def pause(self, failures: int) -> None:
        """Wait before the next attempt."""
        await asyncio.sleep(self.pause_ns(failures) / 1e9)

    def pause_ns(self, failures: int) -> int:
        """Return the nanoseconds to wait after this number of consecutive failures."""
        return self.settings.backoff.wait_ms(failures, self.rng) * 1_000_000
