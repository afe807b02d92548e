"""Redrives the parked messages of a key, oldest first, while new messages of the key are parked
after them.

    ReadParked ─▶ the first WINDOW messages, read from their sources ─▶ handed out ─▶ all done
        ─▶ … ─▶ none left ─▶ free the key
    handed out ─▶ failed too often ─▶ parked again: stop

Messages that retention has removed are given up with a warning. This does not apply to messages
that are only missing because a broker is running on an older copy of its data folder. Messages
without a key, and dead letters, are independent of each other; those that fail again stay parked.

If the previous owner ended without releasing the partition, a redriven message may have killed its
process. In that case, keys are redriven one at a time, and each is parked again before its messages
are handed out, so that it stays parked if this process dies too. Dead letters that were chosen
before that crash stay dead letters; those chosen later are redriven.

Invariants
    Handlers have the messages of at most one window of a key. A drained partition starts no window,
    because its children have adopted the remaining messages, or will. Unreadable messages of a
    loose key do not block others (`passed_over.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from ...protocol.batch import check_batch, column_views
from ...protocol.errors import (
    CorruptBatchError,
    FencedError,
    KeylaneError,
    NotSentError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    UnreachableError,
)
from ...protocol.frames import Batches, Read
from ...protocol.ids import MAX_I64
from ...protocol.log_filter import LogFilter
from ...protocol.message import Message
from ...protocol.parked import (
    LOOSE,
    RETRIED,
    FailAgain,
    Failure,
    Park,
    ParkKey,
    Shift,
    crash_failure,
    is_loose,
)
from ...protocol.record import Header, read_header
from ...protocol.routing import PartitionState
from ...protocol.text import MAYBE_OLDER_COPY
from ...rpc.client import BrokerClient
from ..delivery.client_delivery import ClientDelivery
from ..delivery.decode import decode_messages
from .context import ParkContext, ParkingClient
from .park_sender import ParkSender
from .passed_over import Row, SkippedMessages

log = logging.getLogger("keylane.consumer")

WINDOW = 100
"""The maximum number of messages of a key that are read at once."""
CONCURRENT_MAX = 50
"""The maximum number of keys of a partition that are redriven concurrently."""
READ_BYTES = 1 << 18
LEASE_CHECK_S = 1.0
"""The interval between checks of the lease while waiting for an ack, in seconds."""
ALONE_S = 5.0
"""The longest time, in seconds, for which a key that may have killed a process is
redriven alone.
"""


class RedriveDelivery(ClientDelivery):
    """The delivery of the messages of one window, which come from one source."""

    __slots__ = (
        "_pending_acks",
        "_acks_changed",
        "_failed",
        "_key",
        "_remaining",
        "_sender",
        "_source",
        "_stopped",
        "ended",
        "failure",
        "unacked",
    )

    client: ParkingClient
    is_apart = True
    cursor = 0
    """0, because parked messages are below the partition's cursor although they are not handled."""

    def __init__(
        self,
        client: ParkingClient,
        sender: ParkSender,
        key: ParkKey,
        source: int,
        logic_start: int,
    ) -> None:
        super().__init__(client)
        self.logic_start = logic_start
        self._sender = sender
        self._key = key
        self._source = source
        self._remaining = 0
        self._pending_acks: set[int] = set()
        """The offsets that are handled but not yet durably unparked."""
        self._acks_changed = asyncio.Event()
        self._failed: set[int] = set()
        """The offsets that failed, and are neither handled nor parked again."""
        self._stopped = False
        self.failure: Failure | None = None
        """The failure of a loose message that stays parked."""
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """The result is True once all messages are durably handled; False if the key is parked
        again or the partition is handed over.
        """
        self.unacked = 0
        """The number of messages that are not yet durably handled."""

    @property
    def is_loose(self) -> bool:  # type: ignore[override]
        """True if the messages have no key, or are dead letters."""
        return is_loose(self._key)

    def set_count(self, count: int) -> None:
        """Set the number of messages that will be handed out."""
        self._remaining = self.unacked = count

    def mark_handled(self, offset: int) -> None:
        """Unpark the message at `offset`, which is handled."""
        self._clear_failures([offset])
        self._pending_acks.add(offset)
        acked = partial(self._on_acked, offset)
        self._sender.unpark(self._key, self._source, offset, offset + 1, acked)
        self._subtract(1)
        self.client.discard_in_flight(1)

    def _on_acked(self, offset: int) -> None:
        self._pending_acks.discard(offset)
        self._acks_changed.set()
        self._on_durable()

    async def wait_until_acked(self, offset: int) -> bool:
        """Wait until a handled message is durably unparked. Return False if its partition was
        handed over instead.
        """
        while offset in self._pending_acks and self.client.boot_ns() < self.client.ack_deadline_ns:
            self._acks_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEASE_CHECK_S):
                    await self._acks_changed.wait()
        return offset not in self._pending_acks

    wait_for_ack_reply = wait_until_acked

    def _on_durable(self) -> None:
        self.unacked -= 1
        self._check_end()

    def _subtract(self, count: int) -> None:
        self._remaining -= count
        self._check_end()

    def _check_end(self) -> None:
        if self.ended.done() or self._remaining:
            return
        if self._stopped:
            self.ended.set_result(False)
        elif not self.unacked:
            self.ended.set_result(True)

    def discard_in_flight(self, count: int) -> None:
        """Stop the redrive, because `count` messages will not be handled here."""
        self._clear_failures(self._failed)
        self._stopped = True
        self._subtract(count)
        self.client.discard_in_flight(count)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Keep a message that failed too often parked, together with later ones of its key."""
        count = 1 + len(waiting)
        self._clear_failures([message.offset])
        if self._key == RETRIED and isinstance(self._key, int):
            offset_range = message.offset, message.offset + 1
            change = Shift(RETRIED, None, self._source, (offset_range,), failure)
            self._sender.reschedule(change, self._on_durable)
            self._subtract(1)
            self.client.discard_in_flight(1)
            return
        if self._key in LOOSE:
            self.failure = failure
            offset_range = message.offset, message.offset + 1
            self._sender.record_redrive_failure(
                FailAgain(self._key, self._source, (offset_range,), failure), self._on_durable
            )
            self._subtract(1)
            self.client.discard_in_flight(1)
            return
        self._stopped = True
        self._sender.park(self._key, [], failure)
        self._subtract(count)
        self.client.discard_in_flight(count)

    def dead_letter(self, message: Message, failure: Failure) -> None:
        """Leave a message parked if it has failed too often."""
        self.park(message, failure, [])

    def retry(self, message: Message, failure: Failure, _pause_ms: int) -> None:
        """Keep a message that failed again parked, until an operator redrives it again."""
        self.park(message, failure, [])

    def report_failure(self, message: Message, failure: Failure) -> None:
        """Report the failure to the broker; the attempts are stored only when the message is parked
        again.
        """
        self._failed.add(message.offset)
        self.client.report_redriven_failure(self._source, message, failure)

    def report_hang(self, message: Message, failure: Failure, running_ms: int) -> None:
        """Report to the broker that a message is hanging in its handler or in the program."""
        self._failed.add(message.offset)
        self.client.report_redriven_hang(self._source, message, failure, running_ms)

    def _clear_failures(self, offsets: Iterable[int]) -> None:
        for offset in self._failed.intersection(offsets):
            self._failed.discard(offset)
            self.client.clear_redriven(self._source, offset)


class Redrives:
    """
    Redrives the keys of a partition, one task per key.

    Args:
        release_key: called with a key that has no parked messages left.
    """

    def __init__(
        self, context: ParkContext, sender: ParkSender, release_key: Callable[[ParkKey], None]
    ) -> None:
        self._context = context
        self._client = context.client
        self._sender = sender
        self._release_key = release_key
        self.careful = False
        """True if the previous owner ended without releasing the partition, so that a message may
        kill the process.
        """
        self.keys_are_inherited = False
        """True while starting keys that were chosen before this owner acquired the partition."""
        self._failure_log = LogFilter()
        self._careful_lock = asyncio.Lock()
        self._tasks: dict[ParkKey, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_MAX)
        self._sources: dict[int, tuple[str | None, int]] = {}
        """The broker's address and the logic start of each ancestor."""

    def clear_sources(self) -> None:
        """Drop the cached addresses of ancestors, whose brokers may have moved."""
        self._sources.clear()

    @property
    def busy(self) -> bool:
        """True while handlers may have redriven messages."""
        return bool(self._tasks)

    def begin(self, key: ParkKey, *, is_empty: bool = False) -> None:
        """
        Start redriving a key, unless it is already being redriven.

        Args:
            is_empty: True if its last message was skipped. It is freed at once, so that later
                messages of it are handed out like any others.
        """
        if key in self._tasks or self._client.acked_to_end:
            return
        if is_empty and not (is_loose(key) or self._sender.has_parks_of(key)):
            self._release_key(key)
            return
        careful = self.careful and (key != RETRIED or self.keys_are_inherited)
        task = self._context.spawn(lambda: self._redrive(key, careful=careful), "redrive")
        if task is not None:
            self._tasks[key] = task

    async def _redrive(self, key: ParkKey, *, careful: bool) -> None:
        try:
            failures = 0
            skipped = SkippedMessages()
            while True:
                try:
                    # The lock is released during the backoff, so that other keys do not wait.
                    async with self._careful_lock if careful else self._slots:
                        while await self._redrive_window(key, skipped, alone=careful):
                            careful = False
                            if not skipped:
                                failures = 0
                                self._context.log_recovery(self._failure_log, "parked messages")
                        return
                except FencedError:
                    raise
                except KeylaneError as error:
                    failures += 1
                    skipped.clear()
                    self.clear_sources()
                    self._context.log_failure(self._failure_log, "parked messages", error)
                    await self._context.pause(failures)
        finally:
            del self._tasks[key]
            self._client.check_drained()

    async def _park_again(self, key: ParkKey) -> None:
        """Park a key again before it is redriven, so that it stays parked if this process dies."""
        crash = crash_failure("again", at_ms=self._client.wall_ms(), attempts=1)
        if key != RETRIED:
            await self._sender.send_now([Park(key, (), crash, self._context.lease[3])])
            return
        # Any of the chosen dead letters may have killed the process: all stay dead letters, each
        # with its own failure.
        log.warning(
            "%s: the previous owner's process ended while it redrove dead letters; they stay dead "
            "letters",
            self._context.log_name,
        )
        while rows := (await self._sender.fetch_first_rows(key, MAX_I64)).rows:
            await self._sender.send_now(
                [Shift(RETRIED, None, source, ((start, end),)) for source, start, end in rows]
            )

    async def _redrive_window(self, key: ParkKey, skipped: SkippedMessages, *, alone: bool) -> bool:
        """
        Redrive the first messages of a key.

        Args:
            skipped: the messages of a loose key that are skipped because they could not be
                read.
            alone: True if the messages may kill the process: park the key first, and redrive it
                alone.

        Returns:
            False if the key is done: it has no messages left or is parked again, or the partition
            is drained.

        Raises:
            KeylaneError: the broker does not reply, or only unreadable messages are left.
        """
        if self._client.acked_to_end:
            return False
        if alone:
            async with self._context.owner.alone.acquire(ALONE_S):
                await self._park_again(key)
                return await self._redrive_window(key, skipped, alone=False)
        while True:
            rows, edited = await self._next_rows(key, skipped)
            if not rows:
                return await self._finish_key(key, skipped)
            read = await self._read_first(key, rows, skipped)
            if read is not None:
                break
        messages, _ = read
        if not messages:
            return True
        if not isinstance(key, int) or key == RETRIED:
            await self._sender.apply_edits(key, edited, messages)
        delivery: RedriveDelivery = messages[0].delivery  # type: ignore[assignment]
        self._client.hand_out(messages)
        handled = await delivery.ended
        if key in LOOSE and delivery.failure is not None:
            self._sender.park(key, [], delivery.failure)
            return False
        return handled

    async def _finish_key(self, key: ParkKey, skipped: SkippedMessages) -> bool:
        """Finish a key without readable messages. Returns the same as `_redrive_window`."""
        if skipped.error is not None:
            raise skipped.error
        if key in LOOSE:
            return False
        if self._sender.has_parks_of(key):
            await self._context.pause(1)
            return True
        self._release_key(key)
        return False

    async def _read_first(
        self, key: ParkKey, rows: Sequence[Row], skipped: SkippedMessages
    ) -> tuple[list[Message], int] | None:
        """Read from the first source, as `read` does. Return None if the source is unreadable, and
        therefore skipped from now on.
        """
        source = rows[0][0]
        try:
            return await self.read(key, source, [row[1:] for row in rows if row[0] == source])
        except FencedError:
            raise
        except KeylaneError as error:
            if not is_loose(key):
                raise
            self.clear_sources()
            skipped.add(source, error)
            return None

    async def _next_rows(
        self, key: ParkKey, skipped: SkippedMessages
    ) -> tuple[Sequence[Row], Collection[tuple[int, int]]]:
        """Return the first parked messages of a key that are not skipped, and which of them an
        operator has edited.
        """
        if not skipped:
            parked = await self._sender.fetch_first_rows(key, WINDOW)
            return parked.rows, parked.edited
        # Do not search from the front for each window, because there may be thousands of skipped
        # pages. Rows that move up among these, for example when an operator skips some, are read
        # when the skipped ones are retried.
        while True:
            parked = await self._sender.fetch_first_rows(key, MAX_I64, first=skipped.rows_before)
            rows = skipped.remaining_rows(parked.rows, WINDOW)
            if rows or not parked.rows:
                return rows, parked.edited
            skipped.rows_before += len(parked.rows)

    async def read(
        self,
        key: ParkKey,
        source: int,
        ranges: list[tuple[int, int]],
        kind: type[RedriveDelivery] = RedriveDelivery,
    ) -> tuple[list[Message], int]:
        """
        Read the first messages of a source in `ranges`.

        Messages are given up if retention has removed them, or the metaserver reports that they are
        gone. If others are missing, the broker is running on an older copy of its data folder, and
        the original may return.

        Returns:
            The messages, with a delivery of type `kind`, and the offset up to which `ranges` are
            read.

        Raises:
            UnreachableError, PartitionUnknownError: the source's broker does not reply, or does not
                have the partition.
            CorruptBatchError: the first batch cannot be unpacked; the error contains its offsets.
        """
        start, end = ranges[0][0], ranges[-1][1]
        try:
            broker, logic_start = await self._locate_source(source)
        except PartitionUnknownError:
            await self._give_up(key, source, start, end)
            return [], end
        try:
            answer, payload = await broker.call(Read(source, start, READ_BYTES))
        except OffsetOutOfRangeError as error:
            first = error.first_offset or 0
            if start >= first:
                raise _missing_error(source, start) from error
            end = min(end, first)
            await self._give_up(key, source, start, end)
            return [], end
        assert isinstance(answer, Batches)
        if not payload:
            raise _missing_error(source, start)
        upto, position = start, 0
        delivery = kind(self._client, self._sender, key, source, logic_start)
        messages: list[Message] = []
        names = (self._context.subject, source, self._context.lease[3])
        while position < len(payload):
            try:
                header = check_batch(payload, position)
                base, end_offset = header.base_offset, header.next_offset
                overlapping = [pair for pair in ranges if pair[0] < end_offset and base < pair[1]]
                columns = column_views(payload, header, position) if overlapping else None
            except CorruptBatchError as error:
                if messages:
                    break  # return the readable messages before it
                _add_offsets(error, payload, position, start=start)
                raise
            decoded = []
            if columns is not None:
                decoded = decode_messages(columns, header, *names, delivery)
            for low, high in overlapping:
                messages += decoded[max(low - base, 0) : max(high - base, 0)]
            upto, position = end_offset, position + header.length
        delivery.set_count(len(messages))
        return messages, upto

    async def _locate_source(self, source: int) -> tuple[BrokerClient, int]:
        """
        Return the broker and the logic start of a source.

        Raises:
            PartitionUnknownError: its messages are gone.
            KeylaneError: no metaserver replied, or the broker is down.
        """
        if source == self._context.partition_id:
            return self._client.broker, self._context.grant.partition.logic_start
        if source not in self._sources:
            history = await self._context.owner.history()
            self._sources = {
                int(past.partition.partition_id): (
                    past.partition.address,
                    past.partition.logic_start,
                )
                for past in history.partitions
                if not past.lost and past.partition.state is not PartitionState.EXPIRED
            }
        address, logic_start = self._sources.get(source, (None, 0))
        if source not in self._sources:
            raise PartitionUnknownError(partition_id=source)
        if address is None:
            del self._sources[source]
            raise UnreachableError(f"the broker of partition {source} is down")
        return self._context.broker_at(address), logic_start

    async def _give_up(self, key: ParkKey, source: int, start: int, end: int) -> None:
        log.warning(
            "%s: parked messages [%d, %d) of partition %d were removed by "
            "retention, and are given up",
            self._context.log_name,
            start,
            end,
            source,
        )
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sender.unpark(
            key, source, start, end, lambda: None if durable.done() else durable.set_result(None)
        )
        await durable


def _missing_error(source: int, offset: int) -> NotSentError:
    return NotSentError(
        f"the broker of partition {source} stores nothing at offset {offset}, and "
        f"{MAYBE_OLDER_COPY}",
        partition_id=source,
    )


def _add_offsets(
    error: CorruptBatchError, payload: memoryview, position: int, *, start: int
) -> None:
    """Add the offsets of a damaged batch to the error, so that messages after it can be read. They
    are known if the header, which has its own checksum, is intact.
    """
    header = read_header(payload, position)
    if isinstance(header, Header) and header.next_offset > start:
        error.details |= {
            "partition_id": header.partition_id,
            "offset": header.base_offset,
            "end_offset": header.next_offset,
        }
