"""Asks the servers of a cluster what `causes` needs, within a time limit.

    metaserver: group ─┬─ brokers ─ scheduled messages
                       ├─ operations
                       ╰─ each broker ─┬─ health, clock
                                       ╰─ each partition: status ─┬─ parked keys
                                                                  ├─ newest message
                                                                  ╰─ a second look

A server that hangs delays none of the others, and is named in the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from ...protocol import endpoints
from ...protocol.control import BrokerView, GroupView, Health, PartitionStatus, TimeBound
from ...protocol.errors import (
    GroupUnknownError,
    InvalidRequestError,
    KeylaneError,
    NotSentError,
    UnreachableError,
)
from ...protocol.http.endpoint import Endpoint
from ...protocol.operations import OperationView
from ...protocol.parked import ParkedList, ParkedTotals
from ...protocol.reading.newest import NewestMessage
from ...protocol.routing import Partition
from ...protocol.scheduled.receipt import ScheduledPage
from ...protocol.why import Explanation
from ...rpc.client import BrokerClient
from ...rpc.connections import gather_limited
from ...rpc.race import start_task
from ..parked_views import ParkedKeyView, to_parked_view
from ..views import describe_group
from .causes import explain
from .facts import Facts, LagPace, partitions_of_key
from .lag import STUCK_MS
from .servers import numbered

T = TypeVar("T")
WITHIN_S = 0.6
"""How long servers may take to answer, in seconds, once the metaserver has described the group."""
LATE = f"has not answered within {WITHIN_S} s"
METASERVER_MS = 400
"""How long each metaserver may take at the first attempt, in milliseconds; one that hangs is not
to hold up the answer of another.
"""
PROBE_AFTER_S = 0.3
"""After this time without an answer of a broker, in seconds, it is tried whether something accepts
connections at its address.
"""
PACE_S = 0.25
"""The time between two looks at a partition, in seconds."""
PACED_MAX = 16
"""The largest number of partitions that are looked at twice."""
PARKED_MAX = 100
"""The largest number of parked keys that are asked for, per partition; the others are only
counted.
"""
BROKERS_MAX = 32
"""The largest number of brokers that are asked for scheduled messages."""


class MetaserverCalls(Protocol):
    """Answers the control calls of a metaserver."""

    async def call(
        self, endpoint: Endpoint[T], *, subject: str, group: str, timeout_ms: int | None = None
    ) -> T:
        """Make a control call that has no body. `timeout_ms`: of each metaserver that is tried."""
        ...


async def ask_why(
    subject: str,
    group: str,
    key: bytes | None,
    *,
    meta: MetaserverCalls,
    broker_at: Callable[[str], BrokerClient],
    now_ms: Callable[[], int],
    may_read: bool = True,
) -> Explanation:
    """
    Explain why messages do not arrive at a consumer group.

    Args:
        key: the order key in question; None, or b"" for messages without a key: any.
        broker_at: returns the client of the broker at `host:port`.
        now_ms: returns the time in milliseconds since 1970.
        may_read: False if the caller may not read the messages of the subject; what is parked,
            stored and scheduled is then not asked.

    Raises:
        SubjectUnknownError, GroupUnknownError
        UnreachableError: no metaserver answers.
    """
    view = await _ask_group(meta, subject, group)
    question = _Question(view, key or None, meta, broker_at, now_ms, may_read=may_read)
    await question.ask()
    return explain(question.facts())


async def _ask_group(meta: MetaserverCalls, subject: str, group: str) -> GroupView:
    """Return a group as a metaserver knows it: one that hangs delays another only briefly."""
    try:
        return await _ask_group_twice(meta, subject, group)
    except GroupUnknownError as error:
        error.hint = (
            f"Check the name: keylane group list {subject} shows all groups. A group begins to "
            f"exist with its first consumer, or with keylane group create {subject} {group}."
        )
        raise


async def _ask_group_twice(meta: MetaserverCalls, subject: str, group: str) -> GroupView:
    with contextlib.suppress(UnreachableError):
        return await meta.call(
            endpoints.GROUP, subject=subject, group=group, timeout_ms=METASERVER_MS
        )
    try:
        return await meta.call(endpoints.GROUP, subject=subject, group=group)
    except UnreachableError as error:
        error.hint = (
            "Look at the process and the log of the metaserver. Only it knows the brokers: keylane "
            "broker health HOST:PORT asks one of them without it."
        )
        raise


class _Missed(NamedTuple):
    """Something that was asked in vain."""

    what: str
    """Such as "the operations"; or "the state of", before the partitions."""
    why: str
    silent: str | None = None
    """The broker group that has not answered; "": the metaserver; None: there was an answer."""

    def text(self, partitions: Collection[int]) -> str:
        """Return a sentence for `Facts.unknown`."""
        who = "the metaserver " if self.silent == "" else ""
        if self.silent:
            who = f"broker group {self.silent} "
        return f"{f'{self.what} {numbered(sorted(partitions))}'.rstrip()}: {who}{self.why}"


class _Question:
    """One question, and what servers have answered so far."""

    def __init__(
        self,
        view: GroupView,
        key: bytes | None,
        meta: MetaserverCalls,
        broker_at: Callable[[str], BrokerClient],
        now_ms: Callable[[], int],
        *,
        may_read: bool,
    ) -> None:
        partitions = [owner.partition for owner in view.owners]
        self._partitions = partitions if key is None else partitions_of_key(partitions, key)
        ids = {each.partition_id for each in self._partitions}
        owners = tuple(each for each in view.owners if each.partition.partition_id in ids)
        self._view = replace(view, owners=owners)
        self._key = key
        self._meta = meta
        self._broker_at = broker_at
        self._now_ms = now_ms
        self._may_read = may_read
        self._now_s = asyncio.get_running_loop().time
        self._deadline_s = self._now_s() + WITHIN_S
        self._paced = 0
        self._statuses: dict[int, PartitionStatus] = {}
        self._paces: dict[int, LagPace] = {}
        self._newest: dict[int, NewestMessage] = {}
        self._parked: list[ParkedKeyView] = []
        self._adopted: list[ParkedKeyView] = []
        """Parked keys of partitions whose children have them too, or soon will."""
        self._totals: dict[int, ParkedTotals] = {}
        self._is_parked_partial = False
        self._brokers: list[BrokerView] = []
        self._brokers_known = asyncio.Event()
        """Set once the metaserver has listed the brokers, or has not done so in time."""
        self._accepts: dict[str, bool] = {}
        self._health: dict[str, Health] = {}
        self._clocks_ms: dict[str, int] = {}
        self._missed: dict[_Missed, set[int]] = {}
        """What was asked in vain, with the partitions that it is about."""
        self._scheduled: list[ScheduledPage] = []
        self._operations: list[OperationView] = []

    async def ask(self) -> None:
        """Ask all servers at the same time."""
        if not self._may_read:
            why = f"the caller has no right to read {self._view.subject}"
            self._miss(_Missed("what is parked, stored and scheduled", why))
        by_broker: dict[str, list[Partition]] = {}
        for each in self._partitions:
            by_broker.setdefault(each.broker_group, []).append(each)
        await asyncio.gather(
            self._ask_brokers(),
            self._ask_operations(),
            *(self._ask_broker(name, of_broker) for name, of_broker in by_broker.items()),
        )

    def facts(self) -> Facts:
        """Return what was answered."""
        statuses: dict[int, PartitionStatus | str] = {
            each.partition_id: self._statuses.get(each.partition_id) or "its state is not known"
            for each in self._partitions
        }
        groups = {each.broker_group for each in self._partitions}
        silent = self._silent()
        unknown = [f"what broker group {name} knows: it {why}" for name, why in silent.items()]
        unknown += [
            missed.text(partitions)
            for missed, partitions in self._missed.items()
            if missed.silent not in silent
        ]
        return Facts(
            group=describe_group(self._view, statuses),
            partitions=tuple(self._partitions),
            key=self._key,
            statuses=self._statuses,
            paces=self._paces,
            newest=self._newest,
            parked=tuple(self._parked or self._adopted),
            parked_totals=self._totals,
            is_parked_partial=self._is_parked_partial
            or len(self._statuses) < len(self._partitions),
            brokers=tuple(each for each in self._brokers if each.broker_group in groups),
            health=self._health,
            silent={name: why for name, why in silent.items() if name in groups},
            accepts=self._accepts,
            clocks_ms=self._clocks_ms,
            scheduled=tuple(self._scheduled),
            operations=tuple(self._operations),
            now_ms=self._now_ms(),
            unknown=tuple(unknown),
        )

    def _silent(self) -> dict[str, str]:
        """Return the broker groups that have answered nothing at all, each with the reason."""
        heard = {page.broker_group for page in self._scheduled} | self._health.keys()
        heard |= {p.broker_group for p in self._partitions if p.partition_id in self._statuses}
        late = {each.silent: each.why for each in self._missed if each.silent}
        return {name: why for name, why in late.items() if name not in heard}

    # ── the metaserver ────────────────────────────────────────────────────────────────────────────
    async def _ask_brokers(self) -> None:
        health = await self._answered(
            "the list of brokers", self._call_metaserver(endpoints.HEALTH), ""
        )
        if health is not None:
            self._brokers = msgspec.convert(health.details.get("brokers", []), list[BrokerView])
        self._brokers_known.set()
        if self._may_read and self._key is None:  # scheduled messages have no key
            asked = [each for each in self._brokers if each.available][:BROKERS_MAX]
            await asyncio.gather(*map(self._ask_scheduled, asked))

    async def _ask_scheduled(self, broker: BrokerView) -> None:
        query = {"subject": self._view.subject, "limit": 1}
        page = await self._answered(
            f"the scheduled messages of broker group {broker.broker_group}",
            self._broker_at(broker.address).control(endpoints.SCHEDULED, query=query),
            broker.broker_group,
        )
        if page is not None and page.count:
            self._scheduled.append(page)

    async def _ask_operations(self) -> None:
        listed = await self._answered(
            "the operations", self._call_metaserver(endpoints.OPERATIONS), ""
        )
        if listed is not None:
            self._operations = listed.operations

    def _call_metaserver(self, endpoint: Endpoint[T]) -> Awaitable[T]:
        return self._meta.call(endpoint, subject=self._view.subject, group=self._view.group)

    # ── brokers ───────────────────────────────────────────────────────────────────────────────────
    async def _ask_broker(self, name: str, partitions: list[Partition]) -> None:
        address = next((each.address for each in partitions if each.address), None)
        if address is None:
            await self._probe_silent(name)
            return
        broker = self._broker_at(address)
        await asyncio.gather(
            self._ask_health(name, broker),
            gather_limited(lambda each: self._ask_partition(broker, each), partitions),
        )

    async def _probe_silent(self, name: str) -> None:
        """Find out what is at the address of a broker that the metaserver counts as silent."""
        self._miss(
            _Missed(f"the health of broker group {name}", "is silent for the metaserver", name)
        )
        await self._brokers_known.wait()
        for each in self._brokers:
            if each.broker_group == name:
                await self._probe(name, self._broker_at(each.address))

    async def _probe(self, name: str, broker: BrokerClient) -> None:
        left_ms = round((self._deadline_s - self._now_s()) * 1000)
        if left_ms > 0 and name not in self._accepts:
            self._accepts[name] = await broker.is_accepting(timeout_ms=left_ms)

    async def _ask_health(self, name: str, broker: BrokerClient) -> None:
        before_ms = self._now_ms()
        telling = start_task(
            self._answered(
                f"the health of broker group {name}", broker.control(endpoints.HEALTH), name
            )
        )
        try:
            done, _ = await asyncio.wait([telling], timeout=PROBE_AFTER_S)
            if not done:
                await self._probe(name, broker)
            health = await telling
        finally:
            telling.cancel()
        if health is None:
            return
        self._health[name] = health
        wall_ms = health.details.get("wall_ms")
        if isinstance(wall_ms, int):
            self._clocks_ms[name] = wall_ms - (before_ms + self._now_ms()) // 2

    async def _ask_partition(self, broker: BrokerClient, partition: Partition) -> None:
        number, what = partition.partition_id, "the state of"
        if self._now_s() >= self._deadline_s:
            self._miss(_Missed(what, LATE, partition.broker_group), number)
            return
        status = await self._answered(what, self._status(broker, number), partition)
        if status is None:
            return
        self._statuses[number] = status
        progress = next(iter(status.groups), None)
        further: list[Awaitable[None]] = []
        if self._may_read and progress is not None and progress.parked:
            further.append(self._ask_parked(broker, partition))
        if self._may_read and self._key is not None:
            further.append(self._ask_newest(broker, partition))
        if progress is not None and progress.lag and self._paced < PACED_MAX:
            self._paced += 1
            further.append(self._look_again(broker, partition, status))
        await asyncio.gather(*further)

    def _status(self, broker: BrokerClient, partition_id: int) -> Awaitable[PartitionStatus]:
        query = {"group": self._view.group}
        return broker.control(endpoints.PARTITION, query=query, id=partition_id)

    async def _ask_parked(self, broker: BrokerClient, partition: Partition) -> None:
        number = partition.partition_id
        page = await self._answered_parked(broker, partition, self._key)
        if page is None:
            self._is_parked_partial = True
            return
        views = [to_parked_view(number, each) for each in page.keys]
        if page.more:
            if page.totals is None or page.frozen:
                self._is_parked_partial = True
            else:
                self._totals[number] = page.totals
            # What waits for a retry may be on a later page.
            views = [each for each in views if each.tries is None]
            loose = await self._answered_parked(broker, partition, b"")
            if loose is not None:
                found = (to_parked_view(number, each) for each in loose.keys)
                views += [each for each in found if each.tries is not None]
        (self._adopted if page.frozen else self._parked).extend(views)

    async def _answered_parked(
        self, broker: BrokerClient, partition: Partition, key: bytes | None
    ) -> ParkedList | None:
        query = {
            "group": self._view.group,
            "count": PARKED_MAX,
            "retrying": 1,
            "key": None if key is None else key.hex(),
        }
        return await self._answered(
            "the parked keys of",
            broker.control(endpoints.PARKED, query=query, id=partition.partition_id),
            partition,
        )

    async def _ask_newest(self, broker: BrokerClient, partition: Partition) -> None:
        assert self._key is not None
        number = partition.partition_id
        query = {"group": self._view.group, "key": self._key.hex()}
        newest = await self._answered(
            "the newest message of the key in",
            broker.control(endpoints.NEWEST_MESSAGE, query=query, id=number),
            partition,
        )
        if newest is not None:
            self._newest[number] = newest

    async def _look_again(
        self, broker: BrokerClient, partition: Partition, first: PartitionStatus
    ) -> None:
        """Find out what happens in a partition meanwhile, if there is time."""
        began_s, number = self._now_s(), partition.partition_id
        if began_s + 2 * PACE_S > self._deadline_s:
            return
        await asyncio.sleep(PACE_S)
        second, oldest_ms = await asyncio.gather(
            self._answered("the rate of", self._status(broker, number), partition),
            self._ask_oldest(broker, partition, first),
        )
        if second is None or not (first.groups and second.groups):
            return
        self._statuses[number] = second
        stored = second.next_offset - first.next_offset
        self._paces[number] = LagPace(
            over_ms=max(1, round((self._now_s() - began_s) * 1000)),
            stored=stored,
            acked=max(0, first.groups[0].lag + stored - second.groups[0].lag),
            oldest_ms=oldest_ms,
        )

    async def _ask_oldest(
        self, broker: BrokerClient, partition: Partition, status: PartitionStatus
    ) -> int:
        """Return how long the message at the cursor has waited at least, in milliseconds: STUCK_MS
        or 0.
        """
        at_ms = self._now_ms() + self._clocks_ms.get(partition.broker_group, 0) - STUCK_MS
        found = await self._answered(
            "the age of what is not acked in",
            broker.control(
                endpoints.OFFSET_AT,
                query={"at_ms": max(0, at_ms), "bound": TimeBound.LOWER},
                id=partition.partition_id,
            ),
            partition,
        )
        if found is None or not status.groups:
            return 0
        is_old = found.offset is None or found.offset > status.groups[0].cursor
        return STUCK_MS if is_old else 0

    # ── within the time ───────────────────────────────────────────────────────────────────────────
    async def _answered(self, what: str, answer: Awaitable[T], about: Partition | str) -> T | None:
        """
        Return an answer, or None if it does not come in time.

        Args:
            what: what is asked; see `_Missed`.
            about: the partition that it is about, or only the broker group that is asked; "": the
                metaserver.
        """
        name, number = (
            (about, None) if isinstance(about, str) else (about.broker_group, about.partition_id)
        )
        try:
            async with asyncio.timeout_at(self._deadline_s):
                return await answer
        except TimeoutError:
            missed = _Missed(what, LATE, name)
        except UnreachableError as error:
            missed = _Missed(what, f"does not answer: {error.message}", name)
            if name and isinstance(error, NotSentError) and error.is_refused:
                self._accepts[name] = False
        except KeylaneError as error:
            if isinstance(error, InvalidRequestError) and error.unknown_call:
                return None  # it is older than this call
            missed = _Missed(what, error.message)
        self._miss(missed, number)
        return None

    def _miss(self, missed: _Missed, partition_id: int | None = None) -> None:
        partitions = self._missed.setdefault(missed, set())
        if partition_id is not None:
            partitions.add(partition_id)
