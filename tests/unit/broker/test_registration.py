"""A broker reports itself at once, goes on whatever the metaserver does, and says what is wrong."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable

import pytest

from keylane.broker import registration
from keylane.broker.registration import Registration
from keylane.protocol.access.capability import AccessNews
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import BrokerHeartbeat, BrokerWelcome
from keylane.protocol.errors import (
    FolderRefusedError,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    Reason,
    WrongBrokerError,
)
from keylane.rpc.client import MetaClient
from keylane.testing.machines.loop import SimLoop
from sim.machines.clock import ManualClock


class Reception:
    """A metaserver's desk: refuses with each error given, then welcomes."""

    def __init__(self, *errors: KeylaneError) -> None:
        self.errors = list(errors)
        self.reports: list[BrokerHeartbeat] = []
        self.welcomed = asyncio.Event()
        self.fence = 0

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        self.reports.append(body)
        if self.errors:
            raise self.errors.pop(0)
        self.welcomed.set()
        return BrokerWelcome(heartbeat_ms=1, ttl_ms=10, fence=self.fence)


async def test_registration_reports_until_it_is_accepted_and_then_keeps_reporting(monkeypatch):
    """Refusals and silence are waited out with back-off; then a report comes every heartbeat."""
    monkeypatch.setattr(registration, "WAITS", Backoff(first_ms=1, max_ms=2))
    desk = Reception(NotSentError("not there"), WrongBrokerError("another folder"))
    count = iter(range(1000))

    def report() -> BrokerHeartbeat:
        number = next(count)
        return BrokerHeartbeat(broker_group="g1", broker_id="x", address=f"127.0.0.1:{number}")

    loop = Registration(desk, report, rng=random.Random(1))
    assert loop.problem
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(desk.welcomed.wait(), 5)
    while len(desk.reports) < 6:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert loop.problem == ""
    assert [sent_report.address for sent_report in desk.reports[:3]] == [
        f"127.0.0.1:{n}" for n in range(3)
    ]


async def test_its_problem_can_be_read(monkeypatch):
    """While it is not registered, the reason is there for health."""
    monkeypatch.setattr(registration, "WAITS", Backoff(first_ms=1000, max_ms=1000))
    desk = Reception(WrongBrokerError("two folders of one group"))
    loop = Registration(
        desk,
        lambda: BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1"),
        rng=random.Random(1),
    )
    task = asyncio.create_task(loop.run())
    while not desk.reports:
        await asyncio.sleep(0)
    assert loop.problem == "two folders of one group"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def told_of(caplog, monkeypatch, errors, *, take_ms=0, more=()):
    """The levels and texts logged while a broker is refused with `errors`, welcomed, then refused
    with `more`.
    """
    monkeypatch.setattr(registration, "WAITS", Backoff(first_ms=1, max_ms=1))
    caplog.set_level(logging.INFO, "keylane.broker")
    clock = ManualClock()
    desk = Reception(*errors)

    def report() -> BrokerHeartbeat:
        clock.advance(take_ms)
        return BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1")

    task = asyncio.create_task(Registration(desk, report, rng=random.Random(1), clock=clock).run())
    for wave in ((), more):
        desk.errors += wave
        desk.welcomed.clear()
        await asyncio.wait_for(desk.welcomed.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


async def test_start_is_no_trouble(caplog, monkeypatch):
    """A metaserver that starts a moment later than the broker causes no warning; one that goes away
    later does.
    """
    silent = NotSentError("no answer")
    told = await told_of(caplog, monkeypatch, [silent] * 3, more=[silent] * 2)
    assert told == [
        ("INFO", "cannot register with the metaserver: no answer"),
        ("INFO", "registered after 3 failures in 0.0 s"),
        ("WARNING", "cannot register with the metaserver: no answer"),
        ("WARNING", "registered again after 2 failures in 0.0 s"),
    ]


async def test_start_that_lasts_is_trouble(caplog, monkeypatch):
    """After some seconds without a metaserver the broker warns, once."""
    told = await told_of(caplog, monkeypatch, [NotSentError("no answer")] * 9, take_ms=1_000)
    assert told == [
        ("INFO", "cannot register with the metaserver: no answer"),
        ("WARNING", "cannot register with the metaserver: no answer"),
        ("WARNING", "registered after 9 failures in 9.0 s"),
    ]


async def test_refusal_is_trouble_at_once(caplog, monkeypatch):
    """What the metaserver refuses is warned of at once."""
    told = await told_of(caplog, monkeypatch, [WrongBrokerError("another folder")])
    assert told[0] == ("WARNING", "cannot register with the metaserver: another folder")


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (Reason.BROKER_GROUP_TAKEN, "keylane broker evacuate g1 --accept-loss"),
        (Reason.FOLDER_BEHIND, "keylane broker accept g1"),
        (Reason.FOLDER_GIVEN_UP, "start the broker with an empty one"),
    ],
)
async def test_refusal_of_a_folder_names_the_way_out(caplog, monkeypatch, error, way_out):
    """The broker's own log says what to do, with the name of the broker group."""
    refusal = FolderRefusedError(error, "this folder is not the one", broker_group="g1")
    ((level, text), *_) = await told_of(caplog, monkeypatch, [refusal])
    assert level == "WARNING"
    assert text.startswith("cannot register with the metaserver: this folder is not the one; ")
    assert way_out in text


class ThreeMetaservers:
    """As a network, in simulated time: from the fifth second on two of them take reports and answer
    none.
    """

    def __init__(self) -> None:
        self.heard_at: list[float] = []

    async def control(self, _method, address, _path, _answer, *, body, query, timeout_ms, **_):
        now = asyncio.get_running_loop().time()
        if now >= 5 and address != "c":
            await asyncio.sleep(timeout_ms / 1_000)
            raise OutcomeUnknownError
        self.heard_at.append(now)
        return BrokerWelcome(heartbeat_ms=1_000, ttl_ms=10_000)


def test_broker_is_heard_within_its_ttl_while_all_metaservers_but_one_hang():
    """Each of three has a share of the ttl, so none is silent for the others."""
    loop = SimLoop(random.Random(1))

    async def main() -> list[float]:
        network = ThreeMetaservers()
        meta = MetaClient(network, ["a", "b", "c"])
        report = BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1")
        task = asyncio.create_task(Registration(meta, lambda: report, rng=random.Random(1)).run())
        await asyncio.sleep(60)
        task.cancel()
        return network.heard_at

    try:
        heard_at = loop.run_until_complete(main())
    finally:
        loop.dispose()
    assert heard_at[-1] > 58
    assert max(late - early for early, late in itertools.pairwise(heard_at)) < 8


class NotingDesk:
    """A metaserver that notes when it is told what."""

    def __init__(self, *, ttl_ms: int = 10_000, access: AccessNews | None = None) -> None:
        self.welcome = BrokerWelcome(heartbeat_ms=1_000, ttl_ms=ttl_ms, access=access)
        self.told: list[tuple[float, int]] = []

    async def broker_heartbeat(
        self, body: BrokerHeartbeat, *, within_ms: int | None = None
    ) -> BrokerWelcome:
        self.told.append((asyncio.get_running_loop().time(), body.log_end))
        return self.welcome


def told_in(
    desk: NotingDesk, log_end: Callable[[float], int], **more: object
) -> list[tuple[float, int]]:
    """(seconds, end of the log) of each report in 8.5 s."""
    loop = SimLoop(random.Random(1))

    async def main() -> list[tuple[float, int]]:
        began = loop.time()

        def report() -> BrokerHeartbeat:
            end = log_end(loop.time() - began)
            return BrokerHeartbeat(
                broker_group="g1", broker_id="x", address="127.0.0.1:1", log_end=end, **more
            )

        task = asyncio.create_task(Registration(desk, report, rng=random.Random(1)).run())
        await asyncio.sleep(8.5)
        task.cancel()
        return [(round(at - began), end) for at, end in desk.told]

    try:
        return loop.run_until_complete(main())
    finally:
        loop.dispose()


def test_report_is_left_out_while_there_is_no_news():
    """They stay a quarter of the ttl apart at most: 2.5 s."""
    assert told_in(NotingDesk(), lambda _: 5) == [(0, 5), (2, 5), (4, 5), (6, 5), (8, 5)]


def test_news_is_reported_at_the_next_interval():
    """What is stored is told as soon as if every report was sent: an older copy of the folder is
    known by it.
    """
    told = told_in(NotingDesk(), lambda now: 7 if now > 2.5 else 5)
    assert told == [(0, 5), (2, 5), (3, 7), (5, 7), (7, 7)]


def test_no_report_is_left_out_where_the_metaserver_has_to_hear_it():
    """A short ttl, rights that may be taken back, earlier openings, partitions that lack groups."""
    every_second = [(second, 5) for second in range(9)]
    news = AccessNews(cluster="c", now_ms=1, keys={})
    assert told_in(NotingDesk(ttl_ms=7_000), lambda _: 5) == every_second
    assert told_in(NotingDesk(access=news), lambda _: 5) == every_second
    assert told_in(NotingDesk(), lambda _: 5, untold=(1,)) == every_second
    assert told_in(NotingDesk(), lambda _: 5, opened_after=("a",)) == every_second


async def test_fence_is_raised_before_any_client_is_served(monkeypatch):
    """A folder that was set aside, and then accepted, refuses older tokens first."""
    monkeypatch.setattr(registration, "WAITS", Backoff(first_ms=1, max_ms=2))
    raised: list[int] = []

    async def on_fence(token: int) -> None:
        assert loop.set_aside
        await asyncio.sleep(0.01)
        assert loop.set_aside
        raised.append(token)

    desk = Reception(FolderRefusedError(Reason.FOLDER_BEHIND, "an older copy"))
    desk.fence = 7
    loop = Registration(
        desk,
        lambda: BrokerHeartbeat(broker_group="g1", broker_id="x", address="127.0.0.1:1"),
        rng=random.Random(1),
        on_fence=on_fence,
    )
    task = asyncio.create_task(loop.run())
    await asyncio.wait_for(loop.wait_accepted(), 5)
    assert not loop.set_aside
    assert raised[0] == 7
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
