import asyncio
import gc
import random
import weakref
from collections.abc import Callable

import pytest

from keylane.admin import (
    BrokerList,
    BrokerView,
    Cause,
    Explanation,
    GroupReport,
    OperationView,
    PartitionReport,
    SubjectSummary,
)
from keylane.admin.why.servers import silent_broker, waiting_operation
from keylane.console.cluster import GroupTotals
from keylane.console.feed import (
    EXPLAINED_AT_ONCE,
    EXPLAINED_S,
    KEPT_S,
    PROBED_S,
    Feed,
)
from keylane.console.trends import POINTS_MAX, SAMPLE_S, Trends
from keylane.console.views.brokers import brokers
from keylane.console.views.overview import overview
from keylane.protocol.errors import GroupUnknownError, NotSentError
from keylane.protocol.operations import OperationKind, OperationState
from keylane.protocol.routing import OrderStrategy, PartitionState
from sim.machines.clock import ManualClock


class LaggingGroups:
    """A sample of a cluster in which these groups are behind."""

    def __init__(self, *lags: int) -> None:
        self._lags = lags

    def groups(self) -> list[GroupTotals]:
        return [
            GroupTotals(subject="s", group=f"g{n}", lag=lag) for n, lag in enumerate(self._lags)
        ]


class SlowAdmin:
    """Explains groups, and counts how many at once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.at_once = 0
        self.most = 0

    async def why(self, subject: str, group: str) -> Explanation:
        self.asked.append(group)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0.01)
        self.at_once -= 1
        cause = Cause(code="no_consumer", text="x", step="y")
        return Explanation(subject=subject, group=group, key=None, causes=(cause,))

    async def close(self) -> None:
        pass


def explained(feed: Feed, sample: LaggingGroups) -> tuple[int, int]:
    """How many groups are explained, and how many are being looked into."""
    found = [explanation for _, explanation in feed.explain(sample)]
    return sum(each is not None for each in found), found.count(None)


async def test_answer_is_asked_once_for_all_who_want_it_and_again_when_it_is_old():
    clock = ManualClock()
    feed, asked = Feed(SlowAdmin(), clock), []

    async def ask() -> int:
        asked.append(1)
        await asyncio.sleep(0.01)
        return len(asked)

    assert await asyncio.gather(*(feed.sample("x", ask) for _ in range(20))) == [1] * 20
    assert await feed.sample("x", ask) == 1
    clock.advance(int(SAMPLE_S * 1000) + 100)
    assert await feed.sample("x", ask) == 2


async def test_operations_are_asked_for_each_second_while_one_runs_and_after_an_act():
    """Otherwise less often: each has all partitions that it has made."""
    states = {"now": OperationState.DONE}
    asked: list[str] = []

    class ListingAdmin(SlowAdmin):
        async def list_operations(self, subject: str) -> list[OperationView]:
            asked.append(subject)
            view = OperationView(
                operation_id=1,
                subject=subject,
                kind=OperationKind.RESIZE,
                state=states["now"],
                sealed=(),
                children=(),
            )
            return [view]

    clock = ManualClock()
    feed = Feed(ListingAdmin(), clock)

    async def asked_in_a_second() -> int:
        before = len(asked)
        clock.advance(1_000)
        await feed.operations("s")
        return len(asked) - before

    assert [await asked_in_a_second() for _ in range(4)] == [1, 0, 0, 0]
    states["now"] = OperationState.SEAL
    feed.forget_operations()
    assert [await asked_in_a_second() for _ in range(3)] == [1, 1, 1]
    states["now"] = OperationState.DONE
    assert [await asked_in_a_second() for _ in range(3)] == [1, 0, 0]


async def test_error_is_for_those_who_asked_and_is_not_kept_for_long():
    clock = ManualClock()
    feed = Feed(SlowAdmin(), clock)

    async def fail() -> int:
        raise NotSentError("no metaserver")

    async def answer() -> int:
        return 1

    with pytest.raises(NotSentError):
        await feed.sample("x", fail)
    clock.advance(2_000)
    assert await feed.sample("x", answer, age_s=60) == 1


async def test_answer_comes_to_others_when_one_leaves():
    feed = Feed(SlowAdmin(), ManualClock())

    async def ask() -> int:
        await asyncio.sleep(0.05)
        return 1

    first = asyncio.ensure_future(feed.sample("x", ask))
    second = asyncio.ensure_future(feed.sample("x", ask))
    await asyncio.sleep(0.01)
    first.cancel()
    assert await second == 1


async def test_groups_are_explained_a_few_at_a_time_and_not_again_at_once():
    admin = SlowAdmin()
    feed = Feed(admin, ManualClock())
    sample = LaggingGroups(9, 8, 7, 0)
    assert explained(feed, sample) == (0, 3)
    for _ in range(4):
        feed.explain(sample)
        await asyncio.sleep(0.03)
    assert explained(feed, sample) == (3, 0)
    assert sorted(admin.asked) == ["g0", "g1", "g2"]
    assert admin.most <= EXPLAINED_AT_ONCE


async def test_explanation_of_minutes_ago_is_not_shown_while_it_is_asked_for_anew():
    clock = ManualClock()
    feed, sample = Feed(SlowAdmin(), clock), LaggingGroups(9)
    assert feed.explanation("s", "g0") is None
    await asyncio.sleep(0.03)
    clock.advance(int(EXPLAINED_S * 1000) + 100)
    assert feed.explanation("s", "g0") is not None, "it is asked for anew, and still shown"
    await asyncio.sleep(0.03)
    clock.advance(180_000)
    assert explained(feed, sample) == (0, 1)
    assert feed.explanation("s", "g0") is None
    await asyncio.sleep(0.03)
    assert explained(feed, sample) == (1, 0)


async def test_group_page_says_why_it_has_no_explanation_instead_of_looking_for_ever():
    class RefusingAdmin(SlowAdmin):
        async def why(self, subject: str, group: str) -> Explanation:
            raise NotSentError("the metaserver does not answer")

    feed, sample = Feed(RefusingAdmin(), ManualClock()), LaggingGroups(9)
    assert feed.explanation("s", "g0") is None
    await asyncio.sleep(0.03)
    assert feed.explanation("s", "g0") == "the metaserver does not answer"
    assert [found for _, found in feed.explain(sample)] == ["the metaserver does not answer"]


async def test_groups_that_were_deleted_meanwhile_are_left_out():
    class DeletingAdmin(SlowAdmin):
        async def describe_group(self, subject: str, group: str, *, within_s: float) -> str:
            if group == "gone":
                raise GroupUnknownError("no such group", subject=subject, group=group)
            return group

    feed = Feed(DeletingAdmin(), ManualClock())
    assert await feed.present_groups([("s", "a"), ("s", "gone"), ("s", "b")]) == ["a", "b"]


async def test_samples_that_no_page_shows_any_more_are_dropped():
    clock = ManualClock()
    feed = Feed(SlowAdmin(), clock)

    class Large:
        """The description of a subject with many partitions."""

    async def ask() -> Large:
        return Large()

    kept = [weakref.ref(await feed.sample(("subject", number), ask)) for number in range(100)]
    clock.advance(int(KEPT_S * 1000) + 100)
    await feed.sample("another", ask)
    gc.collect()
    assert [each() for each in kept] == [None] * 100


def test_trend_has_rates_and_says_whether_a_value_falls():
    trends = Trends()
    for second in range(100):
        trends.add("end", float(second), second * 10.0)
        trends.add("lag", float(second), 100.0 - second)
        trends.add("stuck", float(second), 7.0)
        trends.add("idle", float(second), 0.0)
    assert len(trends.values("end")) == POINTS_MAX
    assert set(trends.rates("end")) == {10.0}
    assert trends.rate("end") == 10.0
    assert trends.rate("nothing") is None
    assert trends.falls_per_s("lag") == 1.0
    assert trends.falls_per_s("end") == -10.0
    assert trends.falls_per_s("stuck") == trends.falls_per_s("nothing") == 0.0
    assert trends.age_s("end", 900.0) == 8.0
    assert trends.age_s("end", 0.0) == POINTS_MAX, "no point is older"
    assert trends.age_s("end", 990.0) == 0.0
    assert trends.age_s("nothing", 1.0) == 0.0


def test_trends_that_are_there_are_kept_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr("keylane.console.trends.TRENDS_MAX", 2)
    trends = Trends()
    for second in range(20):
        for name in ("a", "b", "c"):
            trends.add(name, float(second), second * 10.0)
    assert (trends.rate("a"), trends.rate("b"), trends.rate("c")) == (10.0, 10.0, None)
    for second in range(20, 40):  # b is gone
        for name in ("a", "c"):
            trends.add(name, float(second), second * 10.0)
    assert (trends.rate("a"), trends.rate("b"), trends.rate("c")) == (10.0, None, 10.0)


# ── whether a group is stuck ──────────────────────────────────────────────────────────────────────
class ListedCluster:
    """A cluster of one subject with two partitions on one broker, and the group `g` on it."""

    def __init__(self) -> None:
        self.ends = [0, 0]
        self.lags = [0, 0]
        self.waiting: list[OperationView] = []
        self.hanging: set[str] = set()
        self.probes = 0
        self.brokers = [
            BrokerView(broker_group="b", address="h:1", available=True, silent_ms=0),
        ]

    async def list_subjects(self) -> list[SubjectSummary]:
        return [
            SubjectSummary(
                subject="s", order_strategy=OrderStrategy.STRICT, partitions=2, route_version=1
            )
        ]

    async def list_brokers(self) -> BrokerList:
        return BrokerList(brokers=self.brokers, refused=[])

    async def find_hanging(self, brokers: BrokerList) -> frozenset[str]:
        self.probes += 1
        return frozenset(self.hanging)

    async def list_waiting_operations(self) -> list[OperationView]:
        return self.waiting

    async def list_hosted(self, *, within_s: float) -> dict[str, list[PartitionReport]]:
        reports = [
            PartitionReport(
                partition_id=number,
                subject="s",
                state=PartitionState.OPEN,
                first_offset=0,
                next_offset=end,
                groups=(GroupReport(group="g", lag=lag, parked=0),),
            )
            for number, (end, lag) in enumerate(zip(self.ends, self.lags, strict=True), 1)
        ]
        return {"b": reports}

    async def why(self, subject: str, group: str) -> Explanation:
        """Explain as `Admin.why` does for every group that lags."""
        causes = tuple(
            Cause(code=code, text=f"{group}: {code}", step="x") for code in ("not_read", "behind")
        )
        return Explanation(subject=subject, group=group, key=None, causes=causes)


async def watched(
    cluster: ListedCluster, changes: Callable[[int], tuple[list[int], list[int]]], seconds: int
) -> list[list[str]]:
    """What the overview says is wrong, in each second; `changes` gives ends and lags by second."""
    clock = ManualClock()
    feed = Feed(cluster, clock)
    said = []
    for second in range(seconds):
        cluster.ends, cluster.lags = changes(second)
        page = await overview(feed, {}, {})
        await asyncio.sleep(0)  # the explanation comes
        await asyncio.sleep(0)
        said.append([each.text for each in page.wrong])
        clock.advance(1_000)
    return said


@pytest.mark.parametrize("seed", range(5))
async def test_overview_names_no_group_that_keeps_up_under_load(seed: int):
    rng = random.Random(seed)

    def under_load(second: int) -> tuple[list[int], list[int]]:
        return [second * 1_000, second * 800], [rng.randrange(1, 900), rng.randrange(1, 900)]

    assert not any(await watched(ListedCluster(), under_load, 60))


async def test_overview_names_no_group_that_keeps_up_when_nobody_has_looked_for_an_hour():
    cluster, clock = ListedCluster(), ManualClock()
    feed = Feed(cluster, clock)
    for end in (1_000, 900_000):
        cluster.ends, cluster.lags = [end, end], [5, 7]
        await overview(feed, {}, {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        page = await overview(feed, {}, {})
        clock.advance(3_600_000)
    assert page.wrong == ()


async def test_overview_names_no_group_that_works_through_a_batch():
    def batch(second: int) -> tuple[list[int], list[int]]:
        return [100_000 + second * 50, 7], [100_000 - second * 500, 0]

    assert not any(await watched(ListedCluster(), batch, 60))


async def test_overview_names_a_group_that_is_stuck_on_one_partition_and_goes_on_with_another():
    def stuck(second: int) -> tuple[list[int], list[int]]:
        return [second * 1_000, 3], [second % 7, 1]

    said = await watched(ListedCluster(), stuck, 20)
    assert not any(said[:10])
    assert all(each == ["g: not_read", "g: behind"] for each in said[12:])


async def test_overview_names_a_stuck_group_for_whose_trend_there_is_no_room(monkeypatch):
    monkeypatch.setattr("keylane.console.trends.TRENDS_MAX", 1)
    said = await watched(ListedCluster(), lambda _second: ([10, 0], [5, 0]), 20)
    assert said[-1] == ["g: not_read", "g: behind"]


async def test_overview_names_a_group_that_falls_further_and_further_behind():
    def slow(second: int) -> tuple[list[int], list[int]]:
        return [second * 1_000, 0], [second * 300, 0]

    said = await watched(ListedCluster(), slow, 60)
    assert said[-1] == ["g: not_read", "g: behind"]


async def test_overview_is_looking_until_it_can_know_whether_a_group_that_lags_is_stuck():
    cluster, clock = ListedCluster(), ManualClock()
    cluster.ends, cluster.lags = [10, 0], [5, 0]
    feed = Feed(cluster, clock)
    await overview(feed, {}, {})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    page = await overview(feed, {}, {})
    assert (page.wrong, page.pending) == ((), "looking whether a group is stuck")
    clock.advance(11_000)
    await overview(feed, {}, {})
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    page = await overview(feed, {}, {})
    assert page.pending == ""
    assert page.wrong


async def test_overview_names_brokers_and_operations_that_wait_in_the_sentences_of_why():
    cluster = ListedCluster()
    cluster.brokers += [
        BrokerView(broker_group="b2", address="h:2", available=False, silent_ms=12_000)
    ]
    cluster.waiting = [
        OperationView(
            operation_id=7,
            subject="s",
            kind=OperationKind.EVACUATE,
            state=OperationState.SEAL,
            sealed=(),
            children=(),
            problem="broker group b2 is silent",
            waiting_since_ms=60_000,
        )
    ]
    page = await overview(Feed(cluster, ManualClock()), {}, {})
    causes = [silent_broker(cluster.brokers[1]), waiting_operation(cluster.waiting[0])]
    assert [(each.text, each.step) for each in page.wrong] == [
        (each.text, each.step) for each in causes
    ]
    assert [each.href for each in page.wrong] == ["/console/brokers/b2", "/console/subjects/s"]


async def test_pages_say_to_end_a_silent_broker_that_hangs_and_try_it_only_now_and_then():
    cluster, clock = ListedCluster(), ManualClock()
    feed = Feed(cluster, clock)
    await overview(feed, {}, {})
    assert cluster.probes == 0, "no broker is silent"
    silent = BrokerView(broker_group="b2", address="h:2", available=False, silent_ms=12_000)
    cluster.brokers, cluster.hanging = [*cluster.brokers, silent], {"b2"}
    for _ in range(5):
        clock.advance(1_000)
        for page in (await overview(feed, {}, {}), await brokers(feed, {}, {})):
            assert [each.step for each in page.wrong or ()] == [
                "end the process at h:2, which hangs; then start the broker again"
            ]
    assert cluster.probes == 1
    cluster.hanging = set()
    clock.advance(int(PROBED_S * 1000))
    page = await overview(feed, {}, {})
    assert page.wrong[0].step == "start the broker at h:2 again; keylane broker list"
