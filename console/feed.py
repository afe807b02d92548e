"""What pages show of a cluster, asked once for all pages that show it.

    pages ─▶ Feed ── at most once in SAMPLE_S ──▶ Admin, with the token of the one who looks
               ╰─ Trends: the last points of lags and ends

Invariants
    However many pages show something, it is asked once at a time, and at most once in SAMPLE_S.
    Nothing is asked while nobody looks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from itertools import islice
from typing import TypeVar, cast

from ..admin import (
    Admin,
    BrokerList,
    Explanation,
    GroupDescription,
    GroupSummary,
    OperationView,
    SubjectDescription,
)
from ..admin.why.lag import STUCK_MS, is_stuck
from ..protocol.clock import Clock
from ..protocol.errors import GroupUnknownError, KeylaneError
from ..protocol.operations import ROUTE_FINAL
from ..rpc.race import shield, start_task
from .cluster import ClusterSample, GroupTotals, Standstills, sum_up
from .trends import SAMPLE_S, Trends

T = TypeVar("T")
BROKER_S = 1.0
"""How long a broker may take to answer, in seconds; after that a page says that it does not."""
KEPT_MAX = 1_000
"""The maximum number of samples that are kept, and of explanations."""
KEPT_S = 10.0
"""How long a sample is kept after it was asked for, in seconds."""
OPERATIONS_S = 5.0
"""How old the operations of a subject may be while none of them runs, in seconds. The metaserver
builds each of them again, with all partitions that it has made.
"""
PROBED_S = 5.0
"""How old it may be that a silent broker hangs, in seconds. One that hangs accepts only so many
connections.
"""
EXPLAINED_MAX = 10
"""How many groups are explained at most."""
EXPLAINED_AT_ONCE = 2
EXPLAINED_S = 5.0
"""How old an explanation may be before it is asked for again, in seconds."""
EXPLAINED_SHOWN_S = 10.0
"""How old an explanation may be that a page shows, in seconds; what is older may be over."""


class Feed:
    """What one principal sees of the cluster."""

    def __init__(self, admin: Admin, clock: Clock) -> None:
        self.admin = admin
        self.trends = Trends()
        self._standstills = Standstills()
        self._began_s: float | None = None
        """When the cluster was first looked at."""
        self._clock = clock
        self._samples: OrderedDict[Hashable, tuple[float, asyncio.Future[object]]] = OrderedDict()
        self._explanations: OrderedDict[tuple[str, str], tuple[float, Explanation | str]] = (
            OrderedDict()
        )
        self._explaining: asyncio.Task[None] | None = None

    @property
    def now_s(self) -> float:
        """The present time of the boot clock, in seconds."""
        return self._clock.boot_ns() / 1e9

    @property
    def now_ms(self) -> int:
        """The present time of the wall clock, in milliseconds since 1970."""
        return self._clock.wall_ms()

    async def sample(
        self, name: Hashable, ask: Callable[[], Awaitable[T]], *, age_s: float = SAMPLE_S
    ) -> T:
        """Return an answer that is at most `age_s` seconds old. Raises the error of `ask`, which is
        at most SAMPLE_S old.
        """
        at_s, future = self._samples.get(name, (0.0, None))
        if future is not None and future.done() and (future.cancelled() or future.exception()):
            age_s = min(age_s, SAMPLE_S)
        if future is None or (future.done() and self.now_s - at_s > age_s):

            async def run() -> object:
                return await ask()

            future = start_task(run())
            future.add_done_callback(_retrieve)
            self._samples[name] = (self.now_s, future)
            self._samples.move_to_end(name)
            self._drop_old_samples()
        return cast(T, await shield(future))

    def _drop_old_samples(self) -> None:
        """Drop those that no page shows any more: one of many partitions is large."""
        for name, (at_s, future) in list(self._samples.items()):
            if self.now_s - at_s <= KEPT_S and len(self._samples) <= KEPT_MAX:
                return
            if future.done():
                del self._samples[name]

    async def cluster(self) -> ClusterSample:
        """Return the whole cluster: subjects, brokers, and what brokers say of partitions."""
        return await self.sample("cluster", self._ask_cluster)

    async def _ask_cluster(self) -> ClusterSample:
        subjects, (brokers, hanging), statuses, waiting = await asyncio.gather(
            self.admin.list_subjects(),
            self._ask_brokers(),
            self.admin.list_hosted(within_s=BROKER_S),
            self.admin.list_waiting_operations(),
        )
        sample = sum_up(subjects, brokers, statuses, waiting, hanging)
        now_s = self.now_s
        self._standstills.note(sample.groups(), now_s)
        self._began_s = self._began_s or now_s
        for subject in sample.subjects.values():
            if not subject.unknown:
                self.trends.add(("end", subject.subject), now_s, subject.end)
            for group in subject.groups.values():
                if not subject.unknown:
                    self._add_group(group, now_s, subject.end)
        return sample

    async def _ask_brokers(self) -> tuple[BrokerList, frozenset[str]]:
        """Return the brokers, and which of the silent ones hang."""
        brokers = await self.admin.list_brokers()
        silent = tuple(each.address for each in brokers.brokers if not each.available)
        if not silent:
            return brokers, frozenset()
        ask = self.admin.find_hanging
        return brokers, await self.sample(("hanging", silent), lambda: ask(brokers), age_s=PROBED_S)

    def _add_group(self, group: GroupTotals, now_s: float, end: int) -> None:
        self.trends.add(("lag", group.subject, group.group), now_s, group.lag)
        self.trends.add(("acked", group.subject, group.group), now_s, end - group.lag)

    async def subject(self, subject: str, *, age_s: float = SAMPLE_S) -> SubjectDescription:
        """Return a subject with its partitions, without holds; see `sample`."""
        ask = self.admin.describe_subject
        return await self.sample(
            ("subject", subject), lambda: ask(subject, holds=False, within_s=BROKER_S), age_s=age_s
        )

    async def groups(self, subject: str) -> list[GroupSummary]:
        """Return the consumer groups of a subject."""
        return await self.sample(("groups", subject), lambda: self.admin.list_groups(subject))

    async def group(self, subject: str, group: str) -> GroupDescription:
        """Return a consumer group."""
        ask = self.admin.describe_group
        return await self.sample(
            ("group", subject, group), lambda: ask(subject, group, within_s=BROKER_S)
        )

    async def present_groups(self, names: Iterable[tuple[str, str]]) -> list[GroupDescription]:
        """Return consumer groups by subject and name, without those that were deleted meanwhile."""

        async def ask(subject: str, group: str) -> GroupDescription | None:
            try:
                return await self.group(subject, group)
            except GroupUnknownError:
                return None

        found = await asyncio.gather(*(ask(*each) for each in names))
        return [each for each in found if each is not None]

    async def operations(self, subject: str) -> list[OperationView]:
        """Return the latest operations of a subject."""
        name = ("operations", subject)

        def ask() -> Awaitable[list[OperationView]]:
            return self.admin.list_operations(subject)

        found = await self.sample(name, ask, age_s=OPERATIONS_S)
        if all(each.state in ROUTE_FINAL for each in found):
            return found
        return await self.sample(name, ask)

    def forget_operations(self) -> None:
        """Ask for operations again, because somebody may have begun one here."""
        for name in list(self._samples):
            if isinstance(name, tuple) and name[0] == "operations":
                del self._samples[name]

    def explanation(self, subject: str, group: str) -> Explanation | str | None:
        """Return why messages do not arrive at a group, or why that cannot be found out, or None
        while it is not known. It is asked for meanwhile, if what is known is old.
        """
        (found,) = self._explain([(subject, group)])
        return found

    def explain(self, sample: ClusterSample) -> list[tuple[GroupTotals, Explanation | str | None]]:
        """Return the first EXPLAINED_MAX groups that have cause for an explanation, each with it;
        see `explanation`.
        """
        caused = (group for group in sample.groups() if self._has_cause(group))
        wanted = list(islice(caused, EXPLAINED_MAX))
        found = self._explain([(group.subject, group.group) for group in wanted])
        return list(zip(wanted, found, strict=True))

    def _explain(self, names: list[tuple[str, str]]) -> list[Explanation | str | None]:
        self._explain_soon(names)
        now_s = self.now_s
        known = (self._explanations.get(each, (0.0, None)) for each in names)
        return [found if now_s - at_s <= EXPLAINED_SHOWN_S else None for at_s, found in known]

    def _explain_soon(self, names: list[tuple[str, str]]) -> None:
        """Ask for the explanations that are missing or old, a few at a time."""
        oldest_s = self.now_s - EXPLAINED_S
        due = [name for name in names if self._explanations.get(name, (-1e9, ""))[0] < oldest_s]
        if due and (self._explaining is None or self._explaining.done()):
            self._explaining = start_task(self._ask_why(due))

    def _has_cause(self, group: GroupTotals) -> bool:
        names = group.subject, group.group
        grows = group.lag > 0 and self.trends.falls_per_s(("lag", *names), over=5) <= 0
        return group.needs_help or grows or self.is_stuck(*names)

    @property
    def is_new(self) -> bool:
        """True if it is too early to say that no group is stuck."""
        return self._began_s is None or self.now_s - self._began_s < STUCK_MS / 1000

    def is_stuck(self, subject: str, group: str) -> bool:
        """
        Return True if a group is stuck, as far as that was seen.

        It may be stuck on one partition while it continues with others, or continue with all and
        fall further and further behind.
        """
        lag = self.trends.last(("lag", subject, group))
        acked = self.trends.last(("acked", subject, group))
        standing_s = self._standstills.longest_s(subject, group, self.now_s)
        falls_per_s = self.trends.falls_per_s(("lag", subject, group))
        oldest_s = self.trends.age_s(("end", subject), acked)
        # It lags on what stands still, also where there is no room for its trend.
        return is_stuck(1, falls_per_s=0.0, oldest_ms=standing_s * 1000) or is_stuck(
            lag, falls_per_s=falls_per_s, oldest_ms=oldest_s * 1000
        )

    async def _ask_why(self, names: list[tuple[str, str]]) -> None:
        limit = asyncio.Semaphore(EXPLAINED_AT_ONCE)

        async def ask(subject: str, group: str) -> None:
            result: Explanation | str
            async with limit:
                asked_s = self.now_s
                try:
                    result = await self.admin.why(subject, group)
                except KeylaneError as error:
                    result = error.message
            self._explanations[subject, group] = asked_s, result
            self._explanations.move_to_end((subject, group))
            if len(self._explanations) > KEPT_MAX:
                self._explanations.popitem(last=False)

        await asyncio.gather(*(ask(*name) for name in names))

    async def close(self) -> None:
        """End what is being asked, and close the client."""
        tasks = [future for _, future in self._samples.values()]
        if self._explaining is not None:
            tasks.append(self._explaining)  # type: ignore[arg-type]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self.admin.close()


def _retrieve(future: asyncio.Future[object]) -> None:
    """Take the error of a sample that nobody waits for any more."""
    if not future.cancelled():
        future.exception()
