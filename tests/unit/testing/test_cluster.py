"""Stories in virtual time: clients made as always, the same run for the same seed, limits, and what
a story may not do.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from keylane import (
    NACK,
    Consumer,
    ConsumerSettings,
    Message,
    Producer,
    Reader,
    SubjectUnknownError,
    testing,
)
from keylane.admin import Admin
from keylane.cli.main import app
from keylane.consumer.dispatch.workers import WorkerPool
from keylane.errors import (
    ConfigError,
    GroupUnknownError,
    InvalidRequestError,
    Reason,
    StoryError,
)
from keylane.outbox import Outbox, create_tables
from keylane.protocol.address import parse_address
from keylane.sync import Producer as SyncProducer
from keylane.testing import VirtualCluster
from support.raising import raises

ADDRESS = "127.0.0.1:7000"
TURNS_MAX = 5_600
"""Of the event loop, some 7 us each, for ten minutes of one consumer of one partition."""


async def failover(cluster: VirtualCluster) -> list[tuple[float, str, bytes]]:
    """A story of ten minutes: (when, by which consumer, value) of what was handled."""
    handled: list[tuple[float, str, bytes]] = []
    await cluster.create_subject("orders", partitions=1)

    async def work(name: str) -> None:
        async def handle(message: Message) -> None:
            await asyncio.sleep(0.1)
            handled.append((cluster.now_s, name, message.value))

        await Consumer(cluster.address, subject="orders", group="g", handler=handle).run()

    first = cluster.start(work, "first")
    async with Producer(cluster.address) as producer:
        await producer.send("orders", b"1", key=b"a")
        await cluster.until(lambda: handled)
        first.kill()
        cluster.start(work, "second")
        await producer.send("orders", b"2", key=b"a")
    await asyncio.sleep(600)
    return handled


def test_story_is_the_same_run_when_its_seed_is_the_same():
    """To the microsecond; another seed is another run."""
    runs = [testing.run(failover, seed=seed) for seed in (1, 2, 1)]
    assert runs[0] == runs[2] != runs[1]
    assert {value for _, _, value in runs[1]} == {b"1", b"2"}


def test_ten_minutes_take_few_turns_of_the_event_loop():
    """What decides how long a test takes, and is the same on every machine."""
    cluster = VirtualCluster()
    cluster.run(failover, cluster)
    assert 600 < cluster.now_s < 640
    assert cluster._loop.steps < TURNS_MAX


async def test_poison_key_is_parked_and_redriven(keylane_cluster: VirtualCluster):
    """Its later messages wait with it; other keys go on."""
    handled: list[bytes] = []
    broken = True

    async def work() -> None:
        async def handle(message: Message) -> None:
            if broken and message.key == b"poison":
                raise ValueError("no such customer")
            handled.append(message.value)

        consumer = Consumer(
            ADDRESS, subject="orders", group="g", handler=handle, on_failure="park", tries_max=3
        )
        await consumer.run()

    await keylane_cluster.create_subject("orders")
    keylane_cluster.start(work)
    async with Producer(keylane_cluster.address) as producer:
        for number in range(4):
            await producer.send("orders", b"%d" % number, key=(b"well", b"poison")[number % 2])
    await keylane_cluster.until(lambda: keylane_cluster.parked("orders", "g"))
    await keylane_cluster.until(lambda: handled == [b"0", b"2"])
    await asyncio.sleep(600)
    (parked,) = await keylane_cluster.parked("orders", "g")
    assert (parked.key, parked.messages, handled) == (b"poison", 2, [b"0", b"2"])
    broken = False
    async with Admin(keylane_cluster.address) as admin:
        await admin.redrive("orders", "g", key=b"poison")
    await keylane_cluster.until(lambda: len(handled) == 4)
    assert handled == [b"0", b"2", b"1", b"3"]
    assert await keylane_cluster.parked("orders", "g") == []


async def test_age_of_parked_keys_is_counted_in_virtual_time_when_an_admin_asks(
    keylane_cluster: VirtualCluster,
):
    """The calendar of the machine that runs the test says another time."""

    async def work() -> None:
        async def handle(_message: Message) -> None:
            raise ValueError("no such customer")

        await Consumer(
            ADDRESS, subject="orders", group="g", handler=handle, on_failure="park", tries_max=1
        ).run()

    await keylane_cluster.create_subject("orders")
    keylane_cluster.start(work)
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"0", key=b"poison")
    await keylane_cluster.until(lambda: keylane_cluster.parked("orders", "g"))
    age_ms = 600_000
    async with Admin(keylane_cluster.address) as admin:
        assert [view async for view in admin.parked("orders", "g", older_than_ms=age_ms)] == []
        await asyncio.sleep(age_ms / 1_000)
        (view,) = [view async for view in admin.parked("orders", "g", older_than_ms=age_ms)]
    assert view.key == b"poison"


program = Consumer(ADDRESS)
"""As programs have it: made when their module is imported."""
billed: list[bytes] = []


@program.on("orders", group="billing", settings=ConsumerSettings(threads=4))
def bill(message: Message) -> None:
    billed.append(message.value)


@program.on("orders", group="nacks")
async def nack(message: Message) -> object:
    return NACK if message.attempt < 3 else None


async def test_clients_made_at_import_run_in_every_cluster(keylane_cluster: VirtualCluster):
    """A consumer of several, one of whose handlers blocks; its threads are none here."""
    for _ in range(2):
        billed.clear()
        await keylane_cluster.create_subject("orders")
        running = keylane_cluster.start(program.run)
        async with Producer(keylane_cluster.address) as producer:
            await producer.send("orders", b"1")
            await keylane_cluster.until(lambda: billed)
        await keylane_cluster.until(lambda: _drained(keylane_cluster))
        await running.stop()
        assert billed == [b"1"]


async def _drained(cluster: VirtualCluster) -> bool:
    return not await cluster.lag("orders", "nacks") and not await cluster.lag("orders", "billing")


async def test_scheduled_message_arrives_at_its_virtual_time(keylane_cluster: VirtualCluster):
    """The calendar is virtual too."""
    await keylane_cluster.create_subject("orders")
    start_s = keylane_cluster.now_s
    async with Producer(keylane_cluster.address) as producer:
        deliver_at = keylane_cluster.now() + timedelta(minutes=30)
        await producer.send("orders", b"later", deliver_at=deliver_at)
    await asyncio.sleep(1_790)
    assert not await keylane_cluster.messages("orders")
    await keylane_cluster.until(lambda: keylane_cluster.messages("orders"))
    assert 1_800 <= keylane_cluster.now_s - start_s < 1_805
    assert keylane_cluster.now() > datetime(2023, 11, 14, tzinfo=UTC)


async def test_story_does_not_begin_in_another_event_loop():
    """This one is pytest-asyncio's: a test without the fixture is left to it."""
    with pytest.raises(StoryError, match="an event loop is running"):
        testing.run(failover)


@pytest.mark.keylane(brokers=2, auto_create="events.*")
async def test_marker_has_the_options_of_the_cluster(keylane_cluster: VirtualCluster, tmp_path):
    """Beside other fixtures."""
    assert [broker.group for broker in keylane_cluster.brokers] == ["g0", "g1"]
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("events.a", b"1", key=b"k")
    assert keylane_cluster.now_s < 1
    (message,) = await keylane_cluster.messages("events.a", key=b"k")
    assert message.value == b"1"
    assert tmp_path.is_dir()


def test_story_without_an_end_says_what_it_waits_for():
    """The line of the test, and what it is in."""

    async def story(cluster: VirtualCluster) -> None:
        never = asyncio.Event()
        await never.wait()  # the line

    with raises(Reason.STORY_STUCK) as raised:
        testing.run(story, limit_s=1_000, seed=5)
    said = str(raised.value)
    assert "1000 s of virtual time have passed" in said
    assert "test waits at test_cluster.py" in said
    assert "await never.wait()  # the line   (in Event.wait)" in said
    assert raised.value.virtual_s > 1_000
    assert "seed 5" in raised.value.__notes__[-1]


def test_story_that_takes_too_long_in_real_time_is_ended():
    async def story(cluster: VirtualCluster) -> None:
        while True:
            await asyncio.sleep(1)

    with raises(Reason.STORY_STUCK, match=r"0\.2 s of real time"):
        testing.run(story, limit_s=1e9, real_limit_s=0.2)


def test_loop_that_lets_no_time_pass_is_ended():
    async def story(cluster: VirtualCluster) -> None:
        while True:
            await asyncio.sleep(0)

    with raises(Reason.STORY_STUCK, match="time no longer passes"):
        testing.run(story)


def connect() -> None:
    with socket.socket() as opened:
        opened.connect(("127.0.0.1", 1))


REAL: dict[str, Callable[[], object]] = {
    "time.sleep": lambda: time.sleep(0.001),
    "Thread.start": lambda: threading.Thread(target=print).start(),
    "socket.getaddrinfo": lambda: socket.getaddrinfo("127.0.0.1", 1),
    "socket.connect": connect,
}


@pytest.mark.parametrize("call", REAL)
def test_real_world_is_refused_even_if_the_error_is_swallowed(call):
    """And outside of a story it is there."""

    async def story(cluster: VirtualCluster) -> None:
        try:
            REAL[call]()
        except StoryError:
            await asyncio.sleep(1)

    with raises(Reason.REAL_WORLD, match=call) as raised:
        testing.run(story)
    assert raised.value.call == call
    time.sleep(0)
    threading.Thread(target=lambda: None).start()


async def test_blocking_code_runs_in_place_when_it_is_sent_to_a_thread(
    keylane_cluster: VirtualCluster,
):
    """As code under test does with what blocks; sleep(0) is no sleep."""

    def fail() -> None:
        raise ValueError("failed")

    assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
    await asyncio.to_thread(time.sleep, 0)
    with pytest.raises(ValueError, match="failed"):
        await asyncio.to_thread(fail)


@pytest.mark.parametrize("within", [asyncio.run, "thread", "sync"])
def test_cluster_is_refused_when_no_story_reaches_it(within: Any, tmp_path: Path):
    """Its address was that of `keylane dev`: what left the story wrote to a real cluster."""
    cluster = VirtualCluster()
    database = sa.create_engine(f"sqlite:///{tmp_path / 'own.db'}")

    async def outside() -> list[str]:
        await create_tables(database)
        hints: list[str] = []
        for client in (
            Producer(cluster.address, wait_s=60),
            Consumer(cluster.address, subject="orders", group="g"),
            Reader(cluster.address, "orders"),
            Outbox(cluster.address, database),
        ):
            with pytest.raises(StoryError, match="virtual cluster") as refused:
                async with client:
                    raise AssertionError
            hints.append(refused.value.hint)
        async with Admin(cluster.address) as admin:
            with pytest.raises(StoryError, match="virtual cluster"):
                await admin.list_subjects()
        return hints

    if within == "sync":
        with pytest.raises(StoryError, match="virtual cluster") as refused:
            SyncProducer(cluster.address).open()
        hints = [refused.value.hint]
    elif within == "thread":
        with ThreadPoolExecutor(1) as pool:
            hints = pool.submit(asyncio.run, outside()).result(60)
    else:
        hints = asyncio.run(outside())
    cluster.close()
    database.dispose()
    assert all("cluster.run(story)" in hint and "keylane.sync" in hint for hint in hints)


class OfUnittest(unittest.IsolatedAsyncioTestCase):
    """A test in an event loop of unittest's own."""

    cluster = VirtualCluster()

    async def test_cluster_is_refused_in_the_event_loop_of_unittest(self) -> None:
        """It wrote to a real cluster."""
        with pytest.raises(StoryError, match="virtual cluster"):
            async with Producer(self.cluster.address):
                pass
        self.cluster.close()


def test_address_of_a_cluster_leads_to_no_machine():
    cluster = VirtualCluster(brokers=2)
    places = [cluster.address, *(broker.address for broker in cluster.brokers)]
    cluster.close()
    assert all(parse_address(place)[0].endswith(".invalid") for place in places)
    for place in places:
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo(*parse_address(place))


def test_command_is_refused_when_its_cluster_is_virtual():
    told = CliRunner().invoke(app, ["subject", "list", "--meta", "metaserver.keylane.invalid:7000"])
    assert told.exit_code == 1
    assert "virtual cluster" in told.output


def test_client_with_a_thread_of_its_own_is_refused():
    async def story(cluster: VirtualCluster) -> None:
        SyncProducer(cluster.address).open()

    with raises(Reason.REAL_WORLD, match="thread"):
        testing.run(story)


async def test_unknown_subject_is_told_at_once(keylane_cluster: VirtualCluster):
    """Also in a new cluster, whose database is empty."""
    with pytest.raises(SubjectUnknownError):
        await keylane_cluster.messages("nothing")
    assert keylane_cluster.now_s < 1


def test_cluster_has_one_story():
    cluster = VirtualCluster()
    cluster.run(asyncio.sleep, 1)
    with pytest.raises(StoryError, match="one story"):
        cluster.run(asyncio.sleep, 1)


def test_stories_do_not_see_each_other():
    """Of two clusters that are made at the same time, each has an empty database."""

    async def story(cluster: VirtualCluster) -> int:
        async with Admin(cluster.address) as admin:
            before = len(await admin.list_subjects())
        await cluster.create_subject("orders")
        return before

    clusters = [VirtualCluster(), VirtualCluster(brokers=2)]
    assert [cluster.run(story, cluster) for cluster in clusters] == [0, 0]


def test_story_does_not_begin_inside_another():
    async def story(cluster: VirtualCluster) -> None:
        testing.run(failover)

    with pytest.raises(StoryError, match="an event loop is running"):
        testing.run(story)


def test_error_of_a_story_has_the_seed_that_was_drawn():
    async def story(cluster: VirtualCluster) -> None:
        raise ValueError(cluster.seed)

    with pytest.raises(ValueError, match=r"\d+") as raised:
        testing.run(story, seed=None)
    assert f"seed {raised.value.args[0]}" in raised.value.__notes__[-1]


async def test_condition_that_does_not_come_true_is_an_error(keylane_cluster: VirtualCluster):
    with raises(Reason.CONDITION_NOT_MET, match="still 0 after 5 virtual seconds"):
        await keylane_cluster.until(lambda: 0, within_s=5)
    assert await keylane_cluster.until(lambda: "yes") == "yes"


@pytest.mark.parametrize(
    "options",
    [
        {"brokers": 0},
        {"brokers": 101},
        {"brokers": True},
        {"copies": 0},
        {"copies": 6},
        {"limit_s": 0},
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        VirtualCluster(**options)


def test_idle_consumer_checks_its_leases_a_few_times_in_a_ttl():
    """While a message is with a handler it looks each second; idle consumers are cheap."""
    looks = 0

    async def story(cluster: VirtualCluster) -> tuple[int, int]:
        async def handle(_message: Message) -> None:
            await asyncio.sleep(30)

        await cluster.create_subject("orders", partitions=1)
        consumer = Consumer(cluster.address, subject="orders", group="billing", handler=handle)
        async with consumer, Producer(cluster.address) as producer:
            await asyncio.sleep(60)
            idle = looks
            await producer.send("orders", b"1", key=b"a")
            await asyncio.sleep(30)
            return idle, looks - idle

    def look(_workers: WorkerPool) -> None:
        nonlocal looks
        looks += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerPool, "check_long_running", look)
        idle, busy = testing.run(story)
    assert 15 <= idle <= 25, "each 3 s of a ttl of 30 s"
    assert busy >= 27, "each second"


NOT_FUNCTIONS = (None, 5, "story", ["story"])


@pytest.mark.parametrize("given", NOT_FUNCTIONS)
def test_run_refuses_what_is_no_function(given: Any):
    with pytest.raises(InvalidRequestError, match="takes an async function, not"):
        testing.run(given)
    cluster = VirtualCluster()
    with pytest.raises(InvalidRequestError, match="takes an async function, not"):
        cluster.run(given)
    cluster.close()


def test_run_refuses_a_plain_function_by_its_name():
    def story(_cluster: VirtualCluster) -> int:
        return 5

    with pytest.raises(InvalidRequestError, match=r"story returned 5: .*`async def`"):
        testing.run(story)  # type: ignore[arg-type]  # that is the test


async def test_program_is_an_async_function(keylane_cluster: VirtualCluster):
    async def work() -> None: ...

    for given in (*NOT_FUNCTIONS, work()):
        with pytest.raises(InvalidRequestError, match=r"takes (an|the) async function"):
            keylane_cluster.start(given)  # type: ignore[arg-type]  # that is the test
    plain = keylane_cluster.start(print)  # type: ignore[arg-type]  # that is the test
    with pytest.raises(InvalidRequestError, match="print returned None"):
        await plain.wait()


async def test_cut_refuses_what_is_no_program_and_cuts_nothing(keylane_cluster: VirtualCluster):
    broker: Any = keylane_cluster.brokers[0]
    for programs in (("broker 0",), (broker, "test"), (broker, keylane_cluster)):
        with pytest.raises(InvalidRequestError, match="cut takes programs, such as"):
            keylane_cluster.cut(*programs)  # type: ignore[arg-type]  # that is the test
    await keylane_cluster.create_subject("orders")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"within_s": "5"}, "within_s"),
        ({"within_s": -1}, "within_s"),
        ({"within_s": float("nan")}, "within_s"),
        ({"within_s": 10**400}, "within_s"),
        ({"every_s": 0}, "every_s"),
        ({"every_s": -1}, "every_s"),
        ({"every_s": float("nan")}, "every_s"),
        ({"every_s": True}, "every_s"),
    ],
)
async def test_until_refuses_times_that_are_no_seconds(
    keylane_cluster: VirtualCluster, given: Any, text: str
):
    with pytest.raises(InvalidRequestError, match=f"{text} must be a number of seconds"):
        await keylane_cluster.until(lambda: True, **given)
    with pytest.raises(InvalidRequestError, match="until takes a function"):
        await keylane_cluster.until(True)  # type: ignore[arg-type]  # that is the test


async def test_until_ends_with_the_error_of_its_condition_when_the_group_does_not_exist(
    keylane_cluster: VirtualCluster,
):
    await keylane_cluster.create_subject("orders")
    for look in (keylane_cluster.parked, keylane_cluster.lag):
        with pytest.raises(GroupUnknownError):
            await keylane_cluster.until(partial(look, "orders", "billing"))
    async with Admin(keylane_cluster.address) as admin:
        await admin.create_group("orders", "billing")
    assert await keylane_cluster.parked("orders", "billing") == []
    assert await keylane_cluster.lag("orders", "billing") == 0


async def test_group_is_neither_made_nor_reset_when_its_time_is_ahead_in_virtual_time(
    keylane_cluster: VirtualCluster,
):
    """An admin client reads the calendar of the cluster, which is not that of the machine."""
    await keylane_cluster.create_subject("orders")
    await asyncio.sleep(600)
    now = keylane_cluster.now()
    async with Admin(keylane_cluster.address) as admin:
        await admin.create_group("orders", "billing", start=now)
        now_ms = int(now.timestamp() * 1_000)
        await admin.reset_group("orders", "billing", "time", at_ms=now_ms)
        with pytest.raises(InvalidRequestError, match="in the future"):
            await admin.reset_group("orders", "billing", "time", at_ms=now_ms + 90_000)


def test_limits_may_be_infinite_and_no_number_larger_than_every_float():
    async def story(cluster: VirtualCluster) -> float:
        return cluster.now_s

    assert testing.run(story, limit_s=float("inf"), real_limit_s=float("inf")) < 1
    for name in ("limit_s", "real_limit_s"):
        with pytest.raises(ConfigError, match=f"{name} must be a number of seconds"):
            VirtualCluster(**{name: 10**400})
