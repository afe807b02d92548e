"""The membership of a consumer that gets every message: it grants itself each open partition, in
lineage order.

    open ─▶ the lineage, and the end of each open partition ─▶ granted
        ─▶ sealed and handled to its end ─▶ its children, from their first message

Invariants
    A partition is granted once all its parents are handled to their end here, so that keys keep
    their order. Nothing is written anywhere: when the consumer ends, no state of it is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from ..protocol import endpoints
from ..protocol.clock import Clock
from ..protocol.control import Grant, Grants
from ..protocol.errors import ConfigError, KeylaneError, NotSentError, RetryRule, StorageError
from ..protocol.log_filter import LogFilter
from ..protocol.message import Message
from ..protocol.offsets import AckedOffsets
from ..protocol.operations import PartitionHistory, SubjectHistory
from ..protocol.routing import ConsumeStrategy, Partition, PartitionState
from ..rpc.client import MetaClient
from ..rpc.connections import Connections
from ..rpc.race import start_task
from .log_names import consumer_name, partition_name
from .membership import GrantHolder
from .pulling.broadcast_client import BroadcastClient
from .reading.lineage_order import LineageOrder
from .reading.replacing_rows import ReplacingRows
from .settings import AckMode, ConsumerSettings, FailurePolicy

log = logging.getLogger("keylane.consumer")

LOOK_MS = 5_000
"""The milliseconds between two checks for new addresses of brokers while nothing fails."""
CHILDREN_MS = 200
"""The milliseconds between two checks for the children of a partition that was handled to its end;
also the least time between any two.
"""
NEVER_MS = 1 << 53
"""The end of leases that do not end, on the boot clock."""


def check_broadcast(group: object, start: object, settings: ConsumerSettings) -> None:
    """
    Check that a broadcast consumer has no argument that needs a group.

    Raises:
        ConfigError: there is such an argument; the error names the alternative.
    """
    if not isinstance(settings.broadcast, bool):
        raise ConfigError(f"broadcast is True or False, not {settings.broadcast!r:.40}")
    if not settings.broadcast:
        return
    problems = []
    if group is not None:
        problems.append("it has no group: leave group= out")
    if start is not None and start != "latest":
        problems.append("it begins at the latest message: for older ones use a Reader")
    if settings.ack is not AckMode.LINGERING:
        problems.append(f"ack={settings.ack.value!r} is of groups: its acks end with its process")
    if settings.failure_policy is not FailurePolicy.BLOCK:
        problems.append(
            f"on_failure={settings.failure_policy.value!r} is of groups: nothing is set aside for "
            f"it at brokers; handle the error "
            "in the handler to pass over a message"
        )
    if settings.consume_strategy is ConsumeStrategy.SHARED:
        problems.append("it shares no messages: each consumer gets all; use a group to divide them")
    if settings.instance:
        problems.append("instance= is of groups: it has no place in one that a restart takes back")
    if problems:
        raise ConfigError("broadcast=True: " + "; ".join(problems))


class Broadcast:
    """
    The replacement of a `Membership` without a session or a group.

    Args:
        client: the name of the consumer, for people.
        connections: the connections, which give the clients of brokers.
    """

    session = ""

    def __init__(
        self, *, subject: str, client: str, meta: MetaClient, connections: Connections, clock: Clock
    ) -> None:
        self._clock = clock
        self.client = client
        self._subject = subject
        self._meta = meta
        self._connections = connections
        self._lineage = LineageOrder()
        self._partitions: dict[int, Partition] = {}
        """The partitions that are not handled to their end."""
        self._acked: dict[int, AckedOffsets] = {}
        """The handled offsets of each."""
        self._rows = ReplacingRows()
        self._behind: dict[int, AckedOffsets] = {}
        """The handled offsets of partitions that are gone and were not handled to their end."""
        self._rows_wait = False
        """True while rows are not taken, until all partitions that are gone are handed over."""
        self._suspended = False
        self._looked_ms = 0
        self._version = 0
        self._nudge = asyncio.Event()
        self._holder: GrantHolder | None = None
        self._task: asyncio.Task[None] | None = None

    async def history(self) -> SubjectHistory:
        """Return every partition that the subject ever had."""
        return await self._meta.call(endpoints.HISTORY, subject=self._subject)

    async def start(self, holder: GrantHolder) -> None:
        """
        Find the end of each open partition, and take all of them.

        Raises:
            SubjectUnknownError
            NotSentError, OutcomeUnknownError: no metaserver answers, or the broker of a partition
                does not.
        """
        history = (await self.history()).partitions
        self._learn(history)
        self._finish(
            number
            for number, partition in self._partitions.items()
            if partition.state is not PartitionState.OPEN
        )
        ends = await asyncio.gather(*map(self._end_of, self._partitions.values()))
        self._acked = {
            number: AckedOffsets(end) for number, end in zip(self._partitions, ends, strict=True)
        }
        self._looked_ms = self._clock.boot_ms()
        self._holder = holder
        self._grant()
        self._task = start_task(self._look(holder), name="broadcast")

    async def _end_of(self, partition: Partition) -> int:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        broker = self._connections.broker_at(partition.address)
        return (
            await broker.control(endpoints.PARTITION, id=int(partition.partition_id))
        ).next_offset

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    def _learn(self, history: list[PartitionHistory]) -> None:
        """
        Take the partitions as they are known now; one whose messages are gone is finished.

        Raises:
            SubjectDeletedError: they belong to a later subject of the same name.
        """
        self._lineage.check_subject(self._subject, history)
        self._rows.learn(history)
        unmet = self._lineage.learn(history)
        if self._holder is not None:
            # Before the start, everything is older than the messages that this consumer gets.
            self._behind.update(
                (int(past.partition.partition_id), AckedOffsets()) for past in unmet
            )
        left = self._lineage.left
        gone = []
        for past in history:
            number = int(past.partition.partition_id)
            if number not in left:
                continue
            self._partitions[number] = past.partition
            if past.is_gone:
                gone.append(number)
        for number in gone:
            name = partition_name(self._subject, number, "")
            log.warning("%s was deleted; the rest of its messages is not handled", name)
            self._behind[number] = self._acked.get(number) or AckedOffsets()
        self._finish(gone)

    def _finish(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self._lineage.finish(number)
            del self._partitions[number]
            self._acked.pop(number, None)

    def _grant(self) -> None:
        """Grant the consumer the partitions that it may handle now."""
        assert self._holder is not None
        numbers = [int(past.partition.partition_id) for past in self._lineage.readable()]
        held = {number for number, _ in self._holder.holding(self.session)}
        self._rows_wait = not self._behind.keys().isdisjoint(held)
        if self._rows_wait:  # handlers may still work on messages that have become rows
            numbers = [
                number for number in numbers if number not in self._rows.ids or number in held
            ]
        grants = (
            ()
            if self._suspended
            else tuple(Grant(partition=self._partitions[number], token=0) for number in numbers)
        )
        self._version += 1
        self._holder.granted(Grants(version=self._version, ttl_ms=0, grants=grants), NEVER_MS)

    def client_kind(self, partition_id: int) -> Callable[..., BroadcastClient]:
        """Return a callable that makes the client of a granted partition; a new partition begins at
        its first message.
        """
        acked = self._acked.setdefault(partition_id, AckedOffsets())
        needs_no = self._needs_no if partition_id in self._rows.ids else None
        return partial(BroadcastClient, acked=acked, refresh=self.nudge, needs_no=needs_no)

    def _needs_no(self, row: Message) -> bool:
        return self._rows.needs_no(row, self._had)

    def _had(self, partition_id: int, start: int, end: int) -> bool:
        """Return whether messages were handled, or are older than those that this consumer gets."""
        acked = self._acked.get(partition_id) or self._behind.get(partition_id)
        if acked is None:
            return partition_id in self._lineage
        return not acked.unacked(start, end)

    async def _look(self, holder: GrantHolder) -> None:
        troubles = LogFilter()
        try:
            while True:
                soon = self._lineage.lacks_children or self._rows_wait
                wait_ms = CHILDREN_MS if soon else LOOK_MS
                try:
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
                self._nudge.clear()
                try:
                    await self._look_once(holder)
                    if failures := troubles.over(self._clock.boot_ms()):
                        name = consumer_name(self._subject, "")
                        log.info("%s gets routes again, after %s", name, failures)
                except KeylaneError as error:
                    if error.retry is RetryRule.NEVER and not isinstance(error, StorageError):
                        raise
                    if line := troubles.met(error.message, self._clock.boot_ms()):
                        log.info("%s: %s", consumer_name(self._subject, ""), line)
                    await asyncio.sleep(CHILDREN_MS / 1000)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            holder.fail(error)
            raise

    async def _look_once(self, holder: GrantHolder) -> None:
        drained = [number for number in holder.drained() if number in self._partitions]
        self._finish(drained)
        if drained:
            self._grant()
        else:
            early_ms = self._looked_ms + CHILDREN_MS - self._clock.boot_ms()
            await asyncio.sleep(max(0, early_ms) / 1000)
        self._learn((await self.history()).partitions)
        self._looked_ms = self._clock.boot_ms()
        self._grant()

    # ── as of a membership ────────────────────────────────────────────────────────────────────────
    @property
    def suspended(self) -> bool:
        """Return whether the consumer's own code has suspended it."""
        return self._suspended

    def nudge(self) -> None:
        """Check for drained partitions, and for addresses, now."""
        self._nudge.set()

    async def report_released(
        self, session: str, partition_id: int, token: int, *, fence: int = 0
    ) -> None:
        """Report nothing: no other consumer waits for a partition."""

    async def suspend(self, suspended: bool) -> None:
        """Take nothing from now on (True), or continue after the handled messages (False)."""
        self._suspended = suspended
        if self._holder is not None:
            self._grant()

    async def announce_leave(self) -> None:
        """Report nothing: no other consumer waits for its partitions."""

    async def stop(self) -> None:
        """Stop checking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
