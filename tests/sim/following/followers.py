"""Programs that follow a subject while faults happen: readers, which keep their positions at times,
and broadcast consumers.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import starmap
from typing import Any

from keylane.broker.partition.partition import HostedPartition
from keylane.consumer.client import Consumer
from keylane.consumer.reading.bounds import Start
from keylane.consumer.reading.lineage_order import LineageOrder
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import (
    ClosedError,
    KeylaneError,
    OffsetOutOfRangeError,
    PartitionUnknownError,
    RetryRule,
    SubjectDeletedError,
    SubjectUnknownError,
    UnreachableError,
)
from keylane.protocol.ids import MAX_I64
from keylane.protocol.message import Message
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import logical_partition
from keylane.rpc.environment import Environment
from keylane.testing.machines.machine import SimStopSignals
from keylane.testing.machines.network import SimNetwork
from sim.actors.clients import SUBJECT
from sim.actors.hosts import Host
from sim.actors.onlooker import SmallReader
from sim.actors.users import Identities
from sim.following.notes import Given, Kept, Note, Opened, Passed, Told

AGAIN_S = 0.3
"""Between an error that may pass and the next try."""


@dataclass(frozen=True)
class Manners:
    """How a follower works."""

    start: str
    """"earliest", "latest", or "time"."""
    ago_s: float
    """Of "time": so long before its first opening."""
    key: bytes | None
    keeps: float
    """The chance that it keeps its positions behind a message; at 0 it never does, also when it is
    closed.
    """
    slow_s: float
    """What it takes for a message, at most."""
    impatient: bool
    """It gives up waiting for a message at times, and asks the same reader again."""


def draw_manners(rng: random.Random, keys: int, *, of: bytes = b"k") -> Manners:
    """The manners of a follower, most begin at the beginning; `of` is how the names of keys
    begin.
    """
    return Manners(
        start=rng.choice(("earliest", "earliest", "earliest", "latest", "time")),
        ago_s=5 * rng.random(),
        key=b"%s%d" % (of, rng.randrange(keys)) if rng.random() < 0.15 else None,
        keeps=rng.choice((0.0, 0.05, 0.3, 1.0)),
        slow_s=rng.choice((0.0, 0.0, 0.02, 0.3)),
        impatient=rng.random() < 0.5,
    )


class FollowingHost(Host, ABC):
    """A machine with a program that follows; it notes what it sees."""

    def __init__(self, *args: Any, meta: list[str], tick: Callable[[], int]) -> None:
        super().__init__(*args)
        self._meta = meta
        self._tick = tick
        self.notes: list[Note] = []
        self.calm = False
        """True once it is quick."""
        self.problems: list[str] = []
        self.subject = SUBJECT
        self.meets_deletions = False
        """The subject is deleted at times, and created anew."""
        self.meets_creation = False
        """The subject does not exist at first."""
        self.may_reroute_keys = False
        """Messages of a key may be stored beside their range."""
        self.sees_copies = False
        """Brokers stand on older copies of their folders at times: there some of what it has seen
        is unknown.
        """

    def start(self) -> None:
        process = self.new_process()
        self.spawn(self._run(), process.context.copy())

    @abstractmethod
    def reopen(self) -> None:
        """Have the program close its client, and open another one."""

    @abstractmethod
    def is_through(self, hosted: HostedPartition) -> bool:
        """Whether its client, which is open, says that it is through with what is left of a
        partition.
        """

    @abstractmethod
    def knows(self, partition_id: int) -> bool:
        """Whether its client, which is open, has learnt of a partition."""

    @abstractmethod
    async def _run(self) -> None:
        """Follow until the process ends."""

    def _environment(self, identities: Identities) -> Environment:
        return Environment(
            network=SimNetwork(self.internet, self.process),
            clock=self.machine,
            rng=random.Random(self.rng.getrandbits(64)),
            draw_identity=identities,
            stop_signals=SimStopSignals,
        )

    def _awaits_subject(self, error: KeylaneError, *, opened: bool) -> bool:
        """Whether the error says that there is no subject now, which is so at times."""
        if isinstance(error, SubjectDeletedError):
            return self.meets_deletions
        if not isinstance(error, SubjectUnknownError):
            return False
        return self.meets_deletions or (self.meets_creation and not opened and not self.notes)

    def _given(self, message: Message[bytes]) -> None:
        place = int(message.partition_id), message.offset
        queue = int(message.queue), message.logic_offset
        self.notes.append(Given(*place, message.key, message.value, *queue))


class TellingReader(SmallReader):
    """Notes what it was told to be removed."""

    told: Callable[[Told], None]

    def _report_gone(self, gone: list[PartitionHistory]) -> None:
        self._note_all_gone(gone)
        super()._report_gone(gone)

    def _skip_gone(self, place: Any, past: PartitionHistory) -> None:
        self._note_all_gone([past])
        super()._skip_gone(place, past)

    def _note_all_gone(self, gone: list[PartitionHistory]) -> None:
        for past in gone:
            self.told(Told(int(past.partition.partition_id), MAX_I64))

    def _skip_removed(self, place: Any, error: OffsetOutOfRangeError) -> None:
        super()._skip_removed(place, error)
        self.told(Told(int(place.partition.partition_id), error.first_offset or 0))


class ReadingHost(FollowingHost):
    """
    Follows with a reader.

    Args:
        owed_from: from a time in seconds on, by true time, what is sent is owed; None: it is not
            known which.
    """

    def __init__(
        self, *args: Any, manners: Manners, owed_from: Callable[[float], int | None], **more: Any
    ) -> None:
        super().__init__(*args, **more)
        self.manners = manners
        self._owed_from = owed_from
        self._kept: dict[int, int] | None = None
        """The positions that the program has kept; they outlive its process."""
        self._passed: dict[int, int] = {}
        """The positions that are noted since the opening."""
        self._since: datetime | None = None
        self._owed = 0
        self._reader: TellingReader | None = None
        self._closing = False
        self._identities = Identities(random.Random(self.rng.getrandbits(64)))

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        self._reader, self._closing = None, False

    def is_through(self, hosted: HostedPartition) -> bool:
        if self._reader is None:
            return False
        partition = hosted.facts.partition
        key = None if self.may_reroute_keys else self.manners.key
        if key and not partition.range_start <= logical_partition(key) < partition.range_end:
            return True
        partition_id = int(partition.partition_id)
        place = self._reader._read_states.get(partition_id)
        position = None if place is None else self._reader.positions.get(partition_id)
        return _is_through(hosted, position, self._reader._lineage)

    def knows(self, partition_id: int) -> bool:
        return self._reader is not None and partition_id in self._reader._lineage

    def reopen(self) -> None:
        if self.running and self._reader is not None:
            self._closing = True
            if not self.manners.impatient:
                work = self._reader.close()
                context = self.process.context.copy()
                context.run(self.spawn, work, context)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except UnreachableError:
                await asyncio.sleep(AGAIN_S)
            except (OffsetOutOfRangeError, PartitionUnknownError) as error:
                forgets = self._reader is None and self.meets_deletions
                if forgets and isinstance(error, PartitionUnknownError):
                    self._kept = None  # they are of a subject that was deleted
                elif not self._goes_on_behind(error) and not (
                    self.sees_copies and self._reader is None
                ):
                    self.problems.append(
                        f"{self.name} was told {error!r}; it had kept {self._kept}"
                    )
                await asyncio.sleep(AGAIN_S)
            except KeylaneError as error:
                if self._awaits_subject(error, opened=self._reader is not None):
                    self._kept = None
                else:
                    self.problems.append(f"{self.name} was told {error!r}")
                await asyncio.sleep(AGAIN_S)
            self._reader = None

    def _start(self) -> Start:
        if self._kept is not None:
            return self._kept
        if self.manners.start != "time":
            return self.manners.start
        if self._since is None:
            now = datetime.fromtimestamp(self.machine.wall_ms() / 1000, UTC)
            self._since = now - timedelta(seconds=self.manners.ago_s)
            owed = self._owed_from(self.machine.wall_ms() / 1000 - self.manners.ago_s)
            self._owed = -1 if owed is None else owed
        ahead_s = self._since.timestamp() - self.machine.wall_ms() / 1000
        return self._since if ahead_s < 0 else "latest"

    async def _follow(self) -> None:
        began, kept = self._tick(), self._kept is not None
        start = self._start()
        reader = TellingReader(
            self._meta,
            self.subject,
            start=start,
            key=self.manners.key,
            follow=True,
            call_timeout_ms=1_000,
            _environment=self._environment(self._identities),
        )
        told: list[Told] = []  # at the opening, which begins a life
        reader.told = told.append
        async with reader:
            reader.told = self.notes.append
            opened = self._tick()
            owed = self._owed if isinstance(start, datetime) and self._owed >= 0 else opened
            self.notes.append(
                Opened(
                    began,
                    0 if start == "earliest" else owed,
                    after_keeping=kept,
                    latest=start == "latest" and not self.sees_copies,
                )
            )
            self.notes += told
            self._passed = {}
            known = start if isinstance(start, dict) else {}
            begun = reader.positions.items() - known.items()  # behind what was removed
            self.notes += starmap(Told, begun)
            self._reader = reader
            await self._read_on(reader)

    async def _read_on(self, reader: TellingReader) -> None:
        rng, manners = self.rng, self.manners
        while not self._closing:
            try:
                async with asyncio.timeout(0.5 * rng.random() if manners.impatient else None):
                    message = await anext(reader)
            except TimeoutError:
                continue
            except ClosedError:
                break
            except UnreachableError:
                if rng.random() < 0.5:
                    self._keep(reader)
                    raise
                await asyncio.sleep(AGAIN_S)  # and goes on with the same reader
                continue
            self._note_positions(reader)
            self._given(message)
            if rng.random() < manners.keeps:
                self._keep(reader)
            if manners.slow_s and not self.calm:
                await asyncio.sleep(manners.slow_s * rng.random())
        self._closing = False
        self._keep(reader)

    def _note_positions(self, reader: TellingReader) -> None:
        moved = dict(reader.positions.items() - self._passed.items())
        self._passed |= moved
        self.notes += starmap(Passed, sorted(moved.items()))

    def _keep(self, reader: TellingReader) -> None:
        self._note_positions(reader)
        if self.manners.keeps:
            self._kept = dict(reader.positions)
            self.notes.append(Kept())

    def _goes_on_behind(self, error: KeylaneError) -> bool:
        """If retention has removed messages behind the kept positions, take the first one that is
        left.
        """
        if not isinstance(error, OffsetOutOfRangeError) or self._kept is None:
            return False
        partition_id, first = error.partition_id or 0, error.first_offset or 0
        if self._kept.get(partition_id, first) >= first:
            return False
        self._kept = self._kept | {partition_id: first}
        self.notes.append(Told(partition_id, first))
        return True


class BroadcastHost(FollowingHost):
    """Follows with a broadcast consumer."""

    def __init__(self, *args: Any, fails: float, slow_s: float, **more: Any) -> None:
        super().__init__(*args, **more)
        self._fails, self._slow_s = fails, slow_s
        self._identities = Identities(random.Random(self.rng.getrandbits(64)))
        self._consumer: Consumer | None = None
        self._settings = ConsumerSettings(
            call_timeout_ms=1_000,
            handover_ms=500,
            handler_backoff=Backoff(first_ms=50, max_ms=500),
            concurrency=self.rng.choice((1, 4, 16)),
            buffer_messages=self.rng.choice((4, 50, 10_000)),
            pull_bytes=self.rng.choice((200, 1 << 20)),
        )

    def end(self, *, machine_down: bool) -> None:
        super().end(machine_down=machine_down)
        self._consumer = None

    def reopen(self) -> None:
        if self.running and self._consumer is not None:
            work = self._consumer.close()
            self._consumer = None
            context = self.process.context.copy()
            context.run(self.spawn, work, context)

    def knows(self, partition_id: int) -> bool:
        opening = None if self._consumer is None else self._consumer._last_opening
        broadcast: Any = None if opening is None else opening.membership
        return broadcast is not None and partition_id in broadcast._lineage

    def is_through(self, hosted: HostedPartition) -> bool:
        if self._consumer is None or self._consumer._last_opening is None:
            return False
        broadcast: Any = self._consumer._last_opening.membership
        partition_id = int(hosted.facts.partition.partition_id)
        acked = broadcast._handled.acked.get(partition_id)
        return _is_through(hosted, None if acked is None else acked.cursor, broadcast._lineage)

    async def _handle(self, message: Message[bytes]) -> None:
        if not self.calm:
            if self.rng.random() < self._fails:
                raise ValueError("the handler fails")
            await asyncio.sleep(self._slow_s * self.rng.random())
        self._given(message)

    async def _run(self) -> None:
        while True:
            began = self._tick()
            consumer = Consumer(
                self._meta,
                subject=self.subject,
                handler=self._handle,
                settings=replace(self._settings, broadcast=True, name=self.name),
                _environment=self._environment(self._identities),
            )
            try:
                async with consumer:
                    latest = not self.sees_copies
                    opened = Opened(began, self._tick(), after_keeping=False, latest=latest)
                    self.notes.append(opened)
                    self._consumer = consumer
                    await consumer.wait()
            except KeylaneError as error:
                passes = self._awaits_subject(error, opened=self._consumer is not None)
                if error.retry is RetryRule.NEVER and not passes:
                    self.problems.append(f"{self.name} was told {error!r}")
            self._consumer = None
            await asyncio.sleep(AGAIN_S)


def _is_through(hosted: HostedPartition, position: int | None, lineage: LineageOrder) -> bool:
    """
    Whether nothing is left to read behind a position, nor to be told of; None: the partition is
    finished, or not begun.

    Where retention has removed all, the follower is told so by its next read. That may be a while:
    a read that waited when its broker lost power is given up when its time is over.
    """
    end, partition_id = hosted.readable_offset, int(hosted.facts.partition.partition_id)
    if position is None:
        finished = partition_id in lineage._parents and partition_id not in lineage.unread_ids
        return finished or end == 0
    return position >= end
