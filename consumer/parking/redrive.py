"""Handles the parked messages of a key again, the oldest first, while new ones of the key are
parked after them.

    ReadParked ─▶ the first WINDOW messages, read where their bytes are ─▶ handed out ─▶ done, each
        ─▶ … ─▶ none left ─▶ free
    handed out ─▶ failed too often ─▶ parked again: stop

Messages that are no longer stored are given up, with a warning, but not those that only an older
copy of a data folder lacks. Messages without a key, and dead letters, are handed out as they are:
each stands alone, and those that fail again stay.

After the end of an owner that did not release, a redriven message may have ended its process. Then
one key at a time is redriven, and it is parked again before its messages are handed out: if the
process ends again, it stays parked. Dead letters that were chosen before that end stay dead
letters; those that are chosen later are handed out.

Invariants
    The messages of one window are all that a key has with handlers at a time. A drained partition
    begins no window: its children have, or will have, the rest. Unreadable messages of a loose key
    hold up nothing else (`passed_over.py`).
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
    crash_of,
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
from .passed_over import PassedOver, Row

log = logging.getLogger("keylane.consumer")

WINDOW = 100
"""The number of messages of a key that are read at a time."""
AT_ONCE_MAX = 50
"""The number of keys of a partition that are redriven at a time."""
READ_BYTES = 1 << 18
LOOK_S = 1.0
"""Seconds between two checks of the lease of a message whose end is to be durable."""
ALONE_S = 5.0
"""Seconds for which a key that may have ended a process is redriven alone."""


class RedriveDelivery(ClientDelivery):
    """The messages of one window, which come from one source."""

    __slots__ = (
        "_acking",
        "_change",
        "_failed",
        "_key",
        "_left",
        "_sender",
        "_source",
        "_stopped",
        "ended",
        "failure",
        "unsaved",
    )

    client: ParkingClient
    is_apart = True
    cursor = 0
    """The cursor, 0 because parked messages, which are not done, lie below the cursor of the
    partition.
    """

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
        self._left = 0
        self._acking: set[int] = set()
        """The offsets of messages that are handled, and still durably parked."""
        self._change = asyncio.Event()
        self._failed: set[int] = set()
        """The offsets of messages that failed, and are neither handled nor parked again."""
        self._stopped = False
        self.failure: Failure | None = None
        """The failure of a loose message that failed, and stays parked."""
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """The future that is True when all messages are durably handled, and False when the key is
        parked again or handed over.
        """
        self.unsaved = 0
        """The number of messages whose handling is not durable."""

    @property
    def is_loose(self) -> bool:  # type: ignore[override]
        """Return True if the messages have no key, or are dead letters."""
        return is_loose(self._key)

    def expect(self, count: int) -> None:
        """Note that `count` messages will be handed out."""
        self._left = self.unsaved = count

    def done(self, offset: int) -> None:
        """Note that the message at `offset` is handled."""
        self._fails_no_more([offset])
        self._acking.add(offset)
        acked = partial(self._acked, offset)
        self._sender.unpark(self._key, self._source, offset, offset + 1, acked)
        self._take(1)
        self.client.forget(1)

    def _acked(self, offset: int) -> None:
        self._acking.discard(offset)
        self._change.set()
        self._saved()

    async def acked(self, offset: int) -> bool:
        """Wait until a handled message is durably no longer parked, and return False if it never
        will be, because it was handed over.
        """
        while offset in self._acking and self.client.boot_ns() < self.client.acks_until_ns:
            self._change.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._change.wait()
        return offset not in self._acking

    answered = acked

    def _saved(self) -> None:
        self.unsaved -= 1
        self._check_end()

    def _take(self, count: int) -> None:
        self._left -= count
        self._check_end()

    def _check_end(self) -> None:
        if self.ended.done() or self._left:
            return
        if self._stopped:
            self.ended.set_result(False)
        elif not self.unsaved:
            self.ended.set_result(True)

    def forget(self, count: int) -> None:
        """Note that `count` of the messages will not be handled here."""
        self._fails_no_more(self._failed)
        self._stopped = True
        self._take(count)
        self.client.forget(count)

    def park(self, message: Message, failure: Failure, waiting: list[Message]) -> None:
        """Leave a message that failed too often parked, with those after it."""
        count = 1 + len(waiting)
        self._fails_no_more([message.offset])
        if self._key == RETRIED and isinstance(self._key, int):
            part = message.offset, message.offset + 1
            change = Shift(RETRIED, None, self._source, (part,), failure)
            self._sender.shift(change, self._saved)
            self._take(1)
            self.client.forget(1)
            return
        if self._key in LOOSE:
            self.failure = failure
            part = message.offset, message.offset + 1
            self._sender.fail_again(
                FailAgain(self._key, self._source, (part,), failure), self._saved
            )
            self._take(1)
            self.client.forget(1)
            return
        self._stopped = True
        self._sender.park(self._key, [], failure)
        self._take(count)
        self.client.forget(count)

    def bury(self, message: Message, failure: Failure) -> None:
        """Leave a message that failed too often parked."""
        self.park(message, failure, [])

    def retry(self, message: Message, failure: Failure, _pause_ms: int) -> None:
        """Leave a message that failed again parked: only an operator can have it handled."""
        self.park(message, failure, [])

    def note_failed(self, message: Message, failure: Failure) -> None:
        """Have the broker show why the message fails; its tries are kept when it is parked
        again.
        """
        self._failed.add(message.offset)
        self.client.redriven_failed(self._source, message, failure)

    def note_hangs(self, message: Message, why: Failure, running_ms: int) -> None:
        """Have the broker show for how long the message has been with its handler or the
        program.
        """
        self._failed.add(message.offset)
        self.client.redriven_hangs(self._source, message, why, running_ms)

    def _fails_no_more(self, offsets: Iterable[int]) -> None:
        for offset in self._failed.intersection(offsets):
            self._failed.discard(offset)
            self.client.redriven_ended(self._source, offset)


class Redrives:
    """
    The keys of a partition that are redriven, with one task for each.

    Args:
        free: hands messages of a key out like any others.
    """

    def __init__(
        self, context: ParkContext, sender: ParkSender, free: Callable[[ParkKey], None]
    ) -> None:
        self._context = context
        self._client = context.client
        self._sender = sender
        self._free = free
        self.careful = False
        """True if the previous owner ended without a release."""
        self.inherits = False
        """True if the keys that begin now were chosen before this owner had the partition."""
        self._troubles = LogFilter()
        self._alone = asyncio.Lock()
        self._tasks: dict[ParkKey, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(AT_ONCE_MAX)
        self._sources: dict[int, tuple[str | None, int]] = {}
        """The address of the broker and the logic start, by ancestor."""

    def forget_sources(self) -> None:
        """Ask again for the addresses of ancestors, whose brokers may have moved."""
        self._sources.clear()

    @property
    def busy(self) -> bool:
        """Return True while messages of some key may be with handlers."""
        return bool(self._tasks)

    def begin(self, key: ParkKey) -> None:
        """Begin to handle the messages of a key again, unless this is under way."""
        if key in self._tasks or self._client.acked_to_end:
            return
        careful = self.careful and (key != RETRIED or self.inherits)
        task = self._context.spawn(lambda: self._redrive(key, careful=careful), "redrive")
        if task is not None:
            self._tasks[key] = task

    async def _redrive(self, key: ParkKey, *, careful: bool) -> None:
        try:
            failures = 0
            passed = PassedOver()
            while True:
                try:
                    # A key that cannot be read waits without a turn, so that no other key waits.
                    async with self._alone if careful else self._turns:
                        while await self._next_window(key, passed, alone=careful):
                            careful = False
                            if not passed:
                                failures = 0
                                self._context.log_recovery(self._troubles, "parked messages")
                        return
                except FencedError:
                    raise
                except KeylaneError as error:
                    failures += 1
                    passed.clear()
                    self.forget_sources()
                    self._context.log_failure(self._troubles, "parked messages", error)
                    await self._context.pause(failures)
        finally:
            del self._tasks[key]
            self._client.settled()

    async def _park_again(self, key: ParkKey) -> None:
        """Keep a key parked if this process ends while its messages are handled."""
        crash = crash_of("again", at_ms=self._client.wall_ms(), attempts=1)
        if key != RETRIED:
            await self._sender.send_now([Park(key, (), crash, self._context.who[3])])
            return
        # One of the chosen dead letters may have done it: all stay dead letters, each with its own
        # failure.
        log.warning(
            "%s: the previous consumer's process ended while it redrove dead letters; they stay "
            "dead letters",
            self._context.log_name,
        )
        while rows := (await self._sender.first_rows(key, MAX_I64)).rows:
            await self._sender.send_now(
                [Shift(RETRIED, None, source, ((start, end),)) for source, start, end in rows]
            )

    async def _next_window(self, key: ParkKey, passed: PassedOver, *, alone: bool) -> bool:
        """
        Let the first messages of a key be handled, and return False if there are none, the key is
        parked again, or the partition is drained.

        Raises:
            KeylaneError: the broker does not answer, or only unreadable messages are left.

        Args:
            passed: the messages of a loose key that are left out because they could not be read.
            alone: whether they may end the process: if they do, the key stays parked.
        """
        if self._client.acked_to_end:
            return False
        if alone:
            async with self._context.owner.alone.taken(ALONE_S):
                await self._park_again(key)
                return await self._next_window(key, passed, alone=False)
        while True:
            rows, edited = await self._rows_left(key, passed)
            if not rows:
                return await self._none_left(key, passed)
            read = await self._read_first(key, rows, passed)
            if read is not None:
                break
        messages, _ = read
        if not messages:
            return True
        if not isinstance(key, int) or key == RETRIED:
            await self._sender.put_edits_in(key, edited, messages)
        delivery: RedriveDelivery = messages[0].delivery  # type: ignore[assignment]
        self._client.hand_out(messages)
        handled = await delivery.ended
        if key in LOOSE and delivery.failure is not None:
            self._sender.park(key, [], delivery.failure)
            return False
        return handled

    async def _none_left(self, key: ParkKey, passed: PassedOver) -> bool:
        """Return as `_next_window` does, for a key of which no message can be requested."""
        if passed.error is not None:
            raise passed.error
        if key in LOOSE:
            return False
        if self._sender.parks(key):
            await self._context.pause(1)
            return True
        self._free(key)
        return False

    async def _read_first(
        self, key: ParkKey, rows: Sequence[Row], passed: PassedOver
    ) -> tuple[list[Message], int] | None:
        """Read from the first source as `read` does; return None if it cannot be read, and is
        passed over.
        """
        source = rows[0][0]
        try:
            return await self.read(key, source, [row[1:] for row in rows if row[0] == source])
        except FencedError:
            raise
        except KeylaneError as error:
            if not is_loose(key):
                raise
            self.forget_sources()
            passed.note(source, error)
            return None

    async def _rows_left(
        self, key: ParkKey, passed: PassedOver
    ) -> tuple[Sequence[Row], Collection[tuple[int, int]]]:
        """Return the first parked messages of a key that were not passed over, and those among them
        that an operator has edited.
        """
        if not passed:
            parked = await self._sender.first_rows(key, WINDOW)
            return parked.rows, parked.edited
        # The search does not begin at the front for each window, because there may be thousands of
        # pages that were passed over. Rows that have moved up there, as where an operator has
        # skipped some, are requested with those.
        while True:
            parked = await self._sender.first_rows(key, MAX_I64, first=passed.rows_before)
            rows = passed.rows_left(parked.rows, WINDOW)
            if rows or not parked.rows:
                return rows, parked.edited
            passed.rows_before += len(parked.rows)

    async def read(
        self,
        key: ParkKey,
        source: int,
        ranges: list[tuple[int, int]],
        kind: type[RedriveDelivery] = RedriveDelivery,
    ) -> tuple[list[Message], int]:
        """
        Return the first messages of a source in these ranges; those that are no longer stored are
        given up.

        Messages are given up if retention has removed them, or the metaserver reports them gone. A
        broker that lacks more runs on an older copy of its data folder, and the original may
        return.

        Returns:
            The messages, with a delivery of this kind, and the end offset up to which they are
            complete.

        Raises:
            UnreachableError, PartitionUnknownError: the broker of the source does not answer, or
                lacks them.
            CorruptBatchError: the first batch does not unpack; it names its offsets.
        """
        start, end = ranges[0][0], ranges[-1][1]
        try:
            broker, logic_start = await self._source(source)
        except PartitionUnknownError:
            await self._give_up(key, source, start, end)
            return [], end
        try:
            answer, payload = await broker.call(Read(source, start, READ_BYTES))
        except OffsetOutOfRangeError as error:
            first = error.first_offset or 0
            if start >= first:
                raise _lacking(source, start) from error
            end = min(end, first)
            await self._give_up(key, source, start, end)
            return [], end
        assert isinstance(answer, Batches)
        if not payload:
            raise _lacking(source, start)
        upto, at = start, 0
        delivery = kind(self._client, self._sender, key, source, logic_start)
        messages: list[Message] = []
        who = (self._context.subject, source, self._context.who[3])
        while at < len(payload):
            try:
                header = check_batch(payload, at)
                base, after = header.base_offset, header.next_offset
                wanted = [pair for pair in ranges if pair[0] < after and base < pair[1]]
                cut = column_views(payload, header, at) if wanted else None
            except CorruptBatchError as error:
                if messages:
                    break  # whole messages before it come first
                _name(error, payload, at, start=start)
                raise
            here = [] if cut is None else decode_messages(cut, header, *who, delivery)
            for low, high in wanted:
                messages += here[max(low - base, 0) : max(high - base, 0)]
            upto, at = after, at + header.length
        delivery.expect(len(messages))
        return messages, upto

    async def _source(self, source: int) -> tuple[BrokerClient, int]:
        """Return the broker and the logic start of a source. Raises PartitionUnknownError if its
        messages are gone; KeylaneError.
        """
        if source == self._context.partition_id:
            return self._client.broker, self._context.grant.partition.logic_start
        if source not in self._sources:
            history = await self._context.owner.history()
            self._sources = {
                int(part.partition.partition_id): (
                    part.partition.address,
                    part.partition.logic_start,
                )
                for part in history.partitions
                if not part.lost and part.partition.state is not PartitionState.EXPIRED
            }
        address, logic_start = self._sources.get(source, (None, 0))
        if source not in self._sources:
            raise PartitionUnknownError(partition_id=source)
        if address is None:
            del self._sources[source]
            raise UnreachableError(f"the broker of partition {source} is away")
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
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sender.unpark(
            key, source, start, end, lambda: None if gone.done() else gone.set_result(None)
        )
        await gone


def _lacking(source: int, offset: int) -> NotSentError:
    return NotSentError(
        f"the broker of partition {source} stores nothing at offset {offset}, and "
        f"{MAYBE_OLDER_COPY}",
        partition_id=source,
    )


def _name(error: CorruptBatchError, payload: memoryview, at: int, *, start: int) -> None:
    """Name the messages of a damaged batch, so that those after it are read; its header has its own
    checksum.
    """
    header = read_header(payload, at)
    if isinstance(header, Header) and header.next_offset > start:
        error.details |= {
            "partition_id": header.partition_id,
            "offset": header.base_offset,
            "end_offset": header.next_offset,
        }
