"""What pages show of a cluster, asked once for all pages that show it.

    pages ─▶ Feed ── at most once in SAMPLE_S ──▶ Admin, with the token of the one who looks
               ╰─ Trends: the last points of lags and ends

Invariants
    However many pages show something, it is asked once at a time, and at most once in SAMPLE_S.
    Nothing is asked while nobody looks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from itertools import pairwise
from typing import TypeVar, cast

from ..admin import (
    Admin,
    Explanation,
    GroupDescription,
    GroupSummary,
    OperationView,
    SubjectDescription,
)
from ..protocol.clock import Clock
from ..protocol.errors import KeylaneError
from ..rpc.race import shield, start_task
from .cluster import ClusterSample, GroupTotals, sum_up

T = TypeVar("T")
SAMPLE_S = 0.9
"""How old a sample may be, in seconds."""
BROKER_S = 1.0
"""How long a broker may take to answer, in seconds; after that a page says that it does not."""
KEPT_MAX = 1_000
"""The maximum number of samples, and of trends, that are kept."""
POINTS_MAX = 60
EXPLAINED_MAX = 10
"""How many groups are explained at most."""
EXPLAINED_AT_ONCE = 2
EXPLAINED_S = 10.0
"""How old an explanation may be, in seconds."""


class Trends:
    """The last values of figures, by name, with their times in seconds."""

    def __init__(self) -> None:
        self._points: OrderedDict[Hashable, deque[tuple[float, float]]] = OrderedDict()

    def add(self, name: Hashable, at_s: float, value: float) -> None:
        """Add a value, unless there is one of the same moment."""
        points = self._points.setdefault(name, deque(maxlen=POINTS_MAX + 1))
        if not points or at_s - points[-1][0] >= SAMPLE_S / 2:
            points.append((at_s, value))
        self._points.move_to_end(name)
        if len(self._points) > KEPT_MAX:
            self._points.popitem(last=False)

    def values(self, name: Hashable) -> tuple[float, ...]:
        """Return the values, oldest first."""
        return tuple(value for _, value in self._points.get(name, ()))[-POINTS_MAX:]

    def rates(self, name: Hashable) -> tuple[float, ...]:
        """Return the growth per second between two values each, oldest first."""
        points = list(self._points.get(name, ()))
        return tuple(
            max(0.0, round((after - before) / (end_s - start_s), 2))
            for (start_s, before), (end_s, after) in pairwise(points)
        )

    def rate(self, name: Hashable, over: int = 5) -> float | None:
        """Return the growth per second over the last values; None if there is only one."""
        points = list(self._points.get(name, ()))[-over - 1 :]
        if len(points) < 2:
            return None
        return max(0.0, (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0]))

    def is_falling(self, name: Hashable, over: int = 5) -> bool:
        """Return True if the value is lower than `over` values ago."""
        values = self.values(name)[-over - 1 :]
        return len(values) > 1 and values[-1] < values[0]

    def stands(self, name: Hashable, over: int = 5) -> bool:
        """Return True if the value was never 0 for a while, and is not falling."""
        values = self.values(name)[-over - 1 :]
        return len(values) > over // 2 and min(values) > 0 and not self.is_falling(name, over)


class Feed:
    """What one principal sees of the cluster."""

    def __init__(self, admin: Admin, clock: Clock) -> None:
        self.admin = admin
        self.trends = Trends()
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
        """Return an answer that is at most `age_s` seconds old. Raises the error of `ask`."""
        at_s, future = self._samples.get(name, (0.0, None))
        if future is None or (future.done() and self.now_s - at_s > age_s):

            async def run() -> object:
                return await ask()

            future = start_task(run())
            future.add_done_callback(_retrieve)
            self._samples[name] = (self.now_s, future)
            self._samples.move_to_end(name)
            if len(self._samples) > KEPT_MAX:
                self._samples.popitem(last=False)
        return cast(T, await shield(future))

    async def cluster(self) -> ClusterSample:
        """Return the whole cluster: subjects, brokers, and what brokers say of partitions."""
        return await self.sample("cluster", self._ask_cluster)

    async def _ask_cluster(self) -> ClusterSample:
        subjects, brokers, statuses = await asyncio.gather(
            self.admin.list_subjects(),
            self.admin.list_brokers(),
            self.admin.list_hosted(within_s=BROKER_S),
        )
        sample = sum_up(subjects, brokers, statuses)
        now_s = self.now_s
        for subject in sample.subjects.values():
            if not subject.unknown:
                self.trends.add(("end", subject.subject), now_s, subject.end)
            for group in subject.groups.values():
                if not subject.unknown:
                    self._add_group(group, now_s, subject.end)
        return sample

    def _add_group(self, group: GroupTotals, now_s: float, end: int) -> None:
        self.trends.add(("lag", group.subject, group.group), now_s, group.lag)
        self.trends.add(("acked", group.subject, group.group), now_s, end - group.lag)

    async def subject(self, subject: str) -> SubjectDescription:
        """Return a subject with its partitions, without holds."""
        ask = self.admin.describe_subject
        return await self.sample(
            ("subject", subject), lambda: ask(subject, holds=False, within_s=BROKER_S)
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

    async def operations(self, subject: str) -> list[OperationView]:
        """Return the latest operations of a subject."""
        return await self.sample(
            ("operations", subject), lambda: self.admin.list_operations(subject)
        )

    def explanation(self, subject: str, group: str) -> Explanation | None:
        """Return why messages do not arrive at a group, or None while that is not known. It is
        asked for meanwhile, if what is known is old.
        """
        self._explain_soon([(subject, group)])
        found = self._explanations.get((subject, group))
        return found[1] if found is not None and isinstance(found[1], Explanation) else None

    def explain(self, sample: ClusterSample) -> tuple[list[tuple[GroupTotals, Explanation]], int]:
        """
        Return the explanations of the groups that have cause for one, and how many are being looked
        into.
        """
        wanted = [
            group
            for group in sample.groups()
            if group.needs_help or (group.lag and not self._falls(group))
        ][:EXPLAINED_MAX]
        self._explain_soon([(group.subject, group.group) for group in wanted])
        known = []
        pending = 0
        for group in wanted:
            _, explanation = self._explanations.get((group.subject, group.group), (0.0, None))
            if isinstance(explanation, Explanation):
                known.append((group, explanation))
            pending += explanation is None
        return known, pending

    def _explain_soon(self, names: list[tuple[str, str]]) -> None:
        """Ask for the explanations that are missing or old, a few at a time."""
        oldest_s = self.now_s - EXPLAINED_S
        due = [name for name in names if self._explanations.get(name, (-1e9, ""))[0] < oldest_s]
        if due and (self._explaining is None or self._explaining.done()):
            self._explaining = start_task(self._ask_why(due[:EXPLAINED_AT_ONCE]))

    def stands(self, subject: str, group: str) -> bool:
        """Return True if the lag of a group does not fall."""
        return self.trends.stands(("lag", subject, group))

    def _falls(self, group: GroupTotals) -> bool:
        return self.trends.is_falling(("lag", group.subject, group.group))

    async def _ask_why(self, names: list[tuple[str, str]]) -> None:
        async def ask(subject: str, group: str) -> None:
            result: Explanation | str
            try:
                result = await self.admin.why(subject, group)
            except KeylaneError as error:
                result = error.message
            self._explanations[subject, group] = self.now_s, result
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
