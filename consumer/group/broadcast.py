"""The membership of a broadcast consumer, which grants itself all open partitions, in lineage
order.

    open ─▶ read the lineage, and the end of each open partition ─▶ grant them
        ─▶ sealed and handled to its end ─▶ grant its children, from their first message

Invariants
    A partition is granted once this consumer has handled all its parents to their end, so that keys
    keep their order. Nothing is stored: the consumer leaves no state behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from ...protocol import endpoints
from ...protocol.clock import Clock
from ...protocol.control import Grant, Grants
from ...protocol.errors import KeylaneError, NotSentError, RetryRule, StorageError
from ...protocol.ids import MAX_I64
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.offsets import AckedOffsets
from ...protocol.operations import PartitionHistory, SubjectHistory
from ...protocol.routing import Partition, PartitionState
from ...rpc.client import MetaClient
from ...rpc.connections import Connections
from ...rpc.race import start_task
from ..log_names import partition_name
from ..reading.lineage_order import LineageOrder, ReplacingRows
from .membership import GrantHolder, Member

log = logging.getLogger("keylane.consumer")

REFRESH_MS = 5_000
"""The interval between refreshes of the partitions and their addresses, in milliseconds."""
REFRESH_MS_MIN = 200
"""The interval between refreshes, in milliseconds, while the children of a handled partition are
missing; also the minimum interval between any two refreshes.
"""
NEVER_MS = MAX_I64
"""The deadline, on the boot clock, of leases that never expire."""


class HandledMessages:
    """The messages that a broadcast consumer has handled, as offsets of each partition."""

    def __init__(self) -> None:
        self.acked: dict[int, AckedOffsets] = {}
        """The handled offsets of partitions that are not yet handled to their end."""
        self.deleted: dict[int, AckedOffsets] = {}
        """The handled offsets of partitions that were deleted before they were handled to their
        end.
        """

    def has(self, partition_id: int, start: int, end: int) -> bool | None:
        """Return True if the offsets from `start` to `end` were handled; None if nothing is known
        of the partition.
        """
        acked = self.acked.get(partition_id) or self.deleted.get(partition_id)
        return None if acked is None else not acked.count_unacked(start, end)


class Broadcast:
    """
    Replaces `Membership` for a consumer without a group. It has no session.

    Args:
        connections: the connections to brokers.
    """

    session = ""
    cluster_id = ""
    """"": its messages have no lease, so nothing is fenced by the cluster's identity."""
    releases = None
    """None: no other consumer waits for its partitions."""

    def __init__(
        self, member: Member, *, meta: MetaClient, connections: Connections, clock: Clock
    ) -> None:
        self.member = member
        self.suspended = False
        """True if the consumer's own code has suspended it."""
        self._clock = clock
        self._meta = meta
        self._connections = connections
        self._lineage = LineageOrder()
        self._partitions: dict[int, Partition] = {}
        """The partitions that are not yet handled to their end, by id."""
        self._handled = HandledMessages()
        self._rows = ReplacingRows()
        self._rows_withheld = False
        """True while replacing rows are withheld, until all deleted partitions are handed over."""
        self._refreshed_ms = 0
        self._nudge = asyncio.Event()
        self._holder: GrantHolder | None = None
        self._task: asyncio.Task[None] | None = None

    async def history(self) -> SubjectHistory:
        """Return the subject's partitions, past and present."""
        return await self._meta.call(endpoints.HISTORY, subject=self.member.subject)

    async def start(self, holder: GrantHolder) -> None:
        """
        Grant all open partitions, from their current ends, and start following the subject.

        Raises:
            SubjectUnknownError: the subject was never created.
            NotSentError, OutcomeUnknownError: no metaserver replied, or the broker of a partition
                did not.
        """
        history = (await self.history()).partitions
        self._update_partitions(history)
        self._finish(
            partition_id
            for partition_id, partition in self._partitions.items()
            if partition.state is not PartitionState.OPEN
        )
        ends = await asyncio.gather(*map(self._read_end, self._partitions.values()))
        self._handled.acked = {
            partition_id: AckedOffsets(end)
            for partition_id, end in zip(self._partitions, ends, strict=True)
        }
        self._refreshed_ms = self._clock.boot_ms()
        self._holder = holder
        self._grant()
        self._task = start_task(self._follow(holder), name="broadcast")

    async def _read_end(self, partition: Partition) -> int:
        if partition.address is None:
            raise NotSentError.of_group(partition.broker_group)
        broker = self._connections.broker_at(partition.address)
        return (
            await broker.control(endpoints.PARTITION, id=int(partition.partition_id))
        ).next_offset

    # ── partitions ────────────────────────────────────────────────────────────────────────────────
    def _update_partitions(self, history: list[PartitionHistory]) -> None:
        """
        Update the partitions. Those whose messages are deleted count as finished.

        Raises:
            SubjectDeletedError: the history belongs to a later subject of the same name.
        """
        self._lineage.check_subject(self.member.subject, history)
        self._rows.update(history)
        skipped = self._lineage.update(history)
        if self._holder is not None:
            # A new consumer does not get the messages of earlier partitions.
            self._handled.deleted.update(
                (int(past.partition.partition_id), AckedOffsets()) for past in skipped
            )
        remaining = self._lineage.unread_ids
        deleted = []
        for past in history:
            partition_id = int(past.partition.partition_id)
            if partition_id not in remaining:
                continue
            self._partitions[partition_id] = past.partition
            if past.is_gone:
                deleted.append(partition_id)
        for partition_id in deleted:
            name = partition_name(self.member.subject, partition_id, "")
            log.warning("%s was deleted; the rest of its messages will not be handled", name)
            acked = self._handled.acked.get(partition_id)
            self._handled.deleted[partition_id] = acked or AckedOffsets()
        self._finish(deleted)

    def _finish(self, partition_ids: Iterable[int]) -> None:
        for partition_id in list(partition_ids):
            self._lineage.finish(partition_id)
            del self._partitions[partition_id]
            self._handled.acked.pop(partition_id, None)

    def _grant(self) -> None:
        """Grant the partitions that the consumer may handle now."""
        assert self._holder is not None
        partition_ids = [int(past.partition.partition_id) for past in self._lineage.readable()]
        granted = {partition_id for partition_id, _ in self._holder.holding(self.session)}
        self._rows_withheld = not self._handled.deleted.keys().isdisjoint(granted)
        if self._rows_withheld:  # handlers may still have messages that the rows replace
            partition_ids = [
                partition_id
                for partition_id in partition_ids
                if partition_id not in self._rows.ids or partition_id in granted
            ]
        grants = (
            ()
            if self.suspended
            else tuple(
                Grant(partition=self._partitions[partition_id], token=0)
                for partition_id in partition_ids
            )
        )
        self._holder.apply_grants(Grants(version=0, ttl_ms=0, grants=grants), NEVER_MS)

    def find_acks(self, partition_id: int) -> tuple[AckedOffsets, Callable[[Message], bool] | None]:
        """
        Return the acks of a granted partition, which outlive its client; a new partition starts at
        its first message.

        Returns:
            The acks, and what returns True for a row whose original message was handled; None: the
            partition has no such rows.
        """
        acked = self._handled.acked.setdefault(partition_id, AckedOffsets())
        return acked, self._is_row_superfluous if partition_id in self._rows.ids else None

    def _is_row_superfluous(self, row: Message) -> bool:
        return self._rows.is_source_read(row, self._is_handled)

    def _is_handled(self, partition_id: int, start: int, end: int) -> bool:
        """Return True if the offsets from `start` to `end` were handled, or precede this
        consumer.
        """
        has_handled = self._handled.has(partition_id, start, end)
        return partition_id in self._lineage if has_handled is None else has_handled

    async def _follow(self, holder: GrantHolder) -> None:
        failure_log = LogFilter()
        try:
            while True:
                urgent = self._lineage.lacks_children or self._rows_withheld
                wait_ms = REFRESH_MS_MIN if urgent else REFRESH_MS
                try:
                    async with asyncio.timeout(wait_ms / 1000):
                        await self._nudge.wait()
                except TimeoutError:
                    pass
                self._nudge.clear()
                try:
                    await self._refresh(holder)
                    if failures := failure_log.end_failures(self._clock.boot_ms()):
                        log.info(
                            "%s can refresh its partitions again, after %s",
                            self.member.name,
                            failures,
                        )
                except KeylaneError as error:
                    if error.retry is RetryRule.NEVER and not isinstance(error, StorageError):
                        raise
                    if failure_text := failure_log.count_failure(
                        error.message, self._clock.boot_ms()
                    ):
                        log.info(
                            "%s: cannot refresh its partitions: %s", self.member.name, failure_text
                        )
                    await asyncio.sleep(REFRESH_MS_MIN / 1000)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            holder.fail(error)
            raise

    async def _refresh(self, holder: GrantHolder) -> None:
        drained = [
            partition_id for partition_id in holder.drained() if partition_id in self._partitions
        ]
        self._finish(drained)
        if drained:
            self._grant()
        else:
            wait_ms = self._refreshed_ms + REFRESH_MS_MIN - self._clock.boot_ms()
            await asyncio.sleep(max(0, wait_ms) / 1000)
        self._update_partitions((await self.history()).partitions)
        self._refreshed_ms = self._clock.boot_ms()
        self._grant()

    # ── the interface of a membership ─────────────────────────────────────────────────────────────
    def nudge(self) -> None:
        """Refresh the partitions now."""
        self._nudge.set()

    async def suspend(self, suspended: bool) -> None:
        """Stop receiving messages (True), or resume after the last handled ones (False)."""
        self.suspended = suspended
        if self._holder is not None:
            self._grant()

    async def announce_leave(self) -> None:
        """Do nothing: no other consumer waits for its partitions."""

    async def stop(self) -> None:
        """Stop following the subject."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
