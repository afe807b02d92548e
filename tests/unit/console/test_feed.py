import asyncio

import pytest

from keylane.admin import Cause, Explanation
from keylane.console.cluster import GroupTotals
from keylane.console.feed import EXPLAINED_AT_ONCE, POINTS_MAX, SAMPLE_S, Feed, Trends
from keylane.protocol.errors import NotSentError
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
    assert await feed.sample("x", answer) == 1


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
    assert feed.explain(sample) == ([], 3)
    for _ in range(4):
        feed.explain(sample)
        await asyncio.sleep(0.03)
    known, pending = feed.explain(sample)
    assert (len(known), pending) == (3, 0)
    assert sorted(admin.asked) == ["g0", "g1", "g2"]
    assert admin.most <= EXPLAINED_AT_ONCE


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
    assert trends.is_falling("lag")
    assert not trends.is_falling("stuck")
    assert trends.stands("stuck")
    assert not trends.stands("idle")
    assert not trends.stands("lag")
    assert not trends.stands("nothing")
