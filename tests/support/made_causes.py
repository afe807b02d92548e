"""Makes messages not arrive, on purpose: ten causes, each for many subjects at once, with real
processes, so that `Admin.why` can be held against them.

Each cause is a context manager that yields once the cause holds. The key in question is on g1 or
g2, except for the cause that is broker g3 itself: g3 may stand still while questions are asked.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.errors import GroupUnknownError, UnavailableError
from keylane.protocol.routing import logical_partition
from support.cluster import Cluster, pause, resume

GROUP = "billing"
HANGING = "g3"
"""The broker group that may stand still."""
ASKED_AT_ONCE = 2
TTL_MS = 30_000
CONSUME = """
import asyncio, sys
from keylane import Consumer

async def handle(message):
    print(message.key.decode(), flush=True)

async def main(meta, *subjects):
    await asyncio.gather(
        *(Consumer(meta, subject=each, group="billing", handler=handle).run() for each in subjects)
    )

asyncio.run(main(*sys.argv[1:]))
"""
LOAD = """
import asyncio, sys
from keylane import Consumer, Producer

async def send(meta):
    async with Producer(meta) as producer:
        for number in range(1 << 30):
            receipt = producer.send("load", b"x" * 200, key=f"k{number % 500}")
            if number % 50 == 0:
                await receipt
                await asyncio.sleep(0.05)

async def handle(message):
    return

async def main(meta):
    await asyncio.gather(
        send(meta), Consumer(meta, subject="load", group="load", handler=handle).run()
    )

asyncio.run(main(sys.argv[1]))
"""


class Case(NamedTuple):
    """A subject, and the key whose messages do not arrive."""

    subject: str
    key: str


class Asked(NamedTuple):
    """A question, what was named first, and how long the answer took."""

    cause: str
    subject: str
    first: str
    text: str
    took_ms: float

    @property
    def is_right(self) -> bool:
        return self.first in CAUSES[self.cause].codes


class Scene(NamedTuple):
    """Where a cause is made."""

    cluster: Cluster
    admin: Admin
    producer: Producer
    cases: Sequence[Case]

    async def send(self, *, count: int = 1, **options: object) -> None:
        receipts = [
            self.producer.send(case.subject, b"1", key=case.key, **options)
            for _ in range(count)
            for case in self.cases
        ]
        for receipt in receipts:
            await receipt

    async def until(self, condition: Callable[[Case], Awaitable[bool]]) -> None:
        """Wait until a condition holds for each case."""
        until = time.monotonic() + 60
        for case in self.cases:
            while not await condition(case):
                assert time.monotonic() < until, f"{case} is not ready"
                await asyncio.sleep(0.1)

    async def is_read(self, case: Case) -> bool:
        """True if the group has joined, and has acked everything."""
        try:
            described = await self.admin.describe_group(case.subject, GROUP)
        except GroupUnknownError:
            return False
        owned = all(each.owner for each in described.partitions)
        return owned and described.lag == 0


class Cause(NamedTuple):
    make: Callable[[Scene], AbstractAsyncContextManager[None]]
    codes: tuple[str, ...]
    """What may be named first."""
    hangs: bool = False
    """True if the cause is the broker that stands still."""
    any_key: bool = False
    """True if it comes first without a key too, while a broker with other keys stands still."""


@asynccontextmanager
async def consuming(
    scene: Scene, handler: Callable[[Message], Awaitable[None]], **options: object
) -> AsyncIterator[None]:
    """Run a consumer for each case."""
    consumers = [
        Consumer(scene.cluster.meta, subject=each.subject, group=GROUP, handler=handler, **options)
        for each in scene.cases
    ]
    running = [asyncio.create_task(each.run()) for each in consumers]
    try:
        yield
    finally:
        await asyncio.gather(*(each.close() for each in consumers))
        await asyncio.gather(*running, return_exceptions=True)


async def accept(_message: Message) -> None:
    return


async def fail(_message: Message) -> None:
    raise ValueError("no such customer")


# ── ten causes ────────────────────────────────────────────────────────────────────────────────────
@asynccontextmanager
async def no_consumer(scene: Scene) -> AsyncIterator[None]:
    for case in scene.cases:
        await scene.admin.create_group(case.subject, GROUP)
    await scene.send()
    yield


@asynccontextmanager
async def dead_consumer(scene: Scene) -> AsyncIterator[None]:
    subjects = [each.subject for each in scene.cases]
    process = subprocess.Popen(
        [sys.executable, "-c", CONSUME, scene.cluster.meta, *subjects],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        await scene.send()
        for _ in scene.cases:
            assert await asyncio.to_thread(process.stdout.readline)
        await scene.until(scene.is_read)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    await scene.send()
    await asyncio.sleep(TTL_MS / 2000 + 0.5)
    yield


@asynccontextmanager
async def failing_handler(scene: Scene) -> AsyncIterator[None]:
    async with consuming(scene, fail):
        await scene.send()
        await asyncio.sleep(4)
        yield


@asynccontextmanager
async def hanging_handler(scene: Scene) -> AsyncIterator[None]:
    ended = asyncio.Event()

    async def hang(_message: Message) -> None:
        await ended.wait()

    async with consuming(scene, hang):
        await scene.send()
        await asyncio.sleep(14)
        try:
            yield
        finally:
            ended.set()


@asynccontextmanager
async def parked_key(scene: Scene) -> AsyncIterator[None]:
    async with consuming(scene, fail, on_failure="park", tries_max=1):
        await scene.send()
        await asyncio.sleep(4)
        yield


@asynccontextmanager
async def suspended_group(scene: Scene) -> AsyncIterator[None]:
    async with consuming(scene, accept):
        await scene.send()
        await scene.until(scene.is_read)
        for case in scene.cases:
            await scene.admin.suspend_group(case.subject, GROUP)
        await scene.send()
        yield


@asynccontextmanager
async def unread_parent(scene: Scene) -> AsyncIterator[None]:
    async def take_long(_message: Message) -> None:
        await asyncio.sleep(2)

    async with consuming(scene, take_long):
        await scene.send(count=40)
        for case in scene.cases:
            await scene.admin.wait(await scene.admin.resize(case.subject, 6))
        await scene.send()
        yield


@asynccontextmanager
async def hanging_broker(scene: Scene) -> AsyncIterator[None]:
    async with consuming(scene, accept):
        await scene.send()
        await scene.until(scene.is_read)
        yield


@asynccontextmanager
async def other_tags(scene: Scene) -> AsyncIterator[None]:
    async with consuming(scene, accept, settings=ConsumerSettings(tags=["eu", "uk"])):
        await scene.send(tags=["us"])
        await scene.until(scene.is_read)
        yield


@asynccontextmanager
async def slow_group(scene: Scene) -> AsyncIterator[None]:
    async def take_a_while(_message: Message) -> None:
        await asyncio.sleep(0.1)

    async def has_begun(case: Case) -> bool:
        try:
            described = await scene.admin.describe_group(case.subject, GROUP)
        except GroupUnknownError:
            return False
        return any(each.offset for each in described.partitions)

    async with consuming(scene, take_a_while):
        await scene.send(count=600)
        await scene.until(has_begun)
        yield


CAUSES: dict[str, Cause] = {
    "no consumer": Cause(no_consumer, ("no_consumer",), any_key=True),
    "lease of a dead consumer": Cause(dead_consumer, ("owner_unheard",), any_key=True),
    "handler fails": Cause(failing_handler, ("handler_fails",), any_key=True),
    "handler hangs": Cause(hanging_handler, ("handler_hangs",), any_key=True),
    "parked key": Cause(parked_key, ("parked",), any_key=True),
    "suspended group": Cause(suspended_group, ("group_suspended",), any_key=True),
    "parent not read": Cause(unread_parent, ("parent_unread",), any_key=True),
    "hanging broker": Cause(hanging_broker, ("broker_hangs", "broker_silent"), hangs=True),
    "filtered out": Cause(other_tags, ("filtered_out",)),
    "slow group": Cause(slow_group, ("behind",)),
}


# ── asking ────────────────────────────────────────────────────────────────────────────────────────
async def ask_about(
    cluster: Cluster, name: str, times: int, *, paused: bool | None = None
) -> list[Asked]:
    """
    Make a cause for some subjects, and ask about each of them once.

    Args:
        paused: whether g3 stands still meanwhile; None: for the second half of the questions.
    """
    cause = CAUSES[name]
    found: list[Asked] = []
    broker = cluster.brokers[2].process.pid
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Admin(cluster.meta))
        producer = await stack.enter_async_context(Producer(cluster.meta))
        where = (HANGING,) if cause.hangs else ("g1", "g2")
        names = [f"{name.replace(' ', '-')}-{time.time_ns()}-{number}" for number in range(times)]
        cases = [await _case(admin, each, where) for each in names]
        await stack.enter_async_context(cause.make(Scene(cluster, admin, producer, cases)))
        asker = await stack.enter_async_context(Admin(cluster.meta))
        half = 0 if cause.hangs or paused else times if paused is False else times // 2
        found += await _ask(asker, name, cases[:half])
        if cases[half:]:
            pause(broker)
            try:
                found += await _ask(asker, name, cases[half:], with_key=not cause.any_key)
            finally:
                resume(broker)
    return found


async def _case(admin: Admin, subject: str, where: Iterable[str]) -> Case:
    """Create a subject over three brokers, and choose a key that one of `where` has."""
    until = time.monotonic() + 60
    while sum(each.available for each in (await admin.list_brokers()).brokers) < 3:
        assert time.monotonic() < until, "a broker is silent"
        await asyncio.sleep(0.2)
    while True:
        try:
            await admin.create_subject(subject, partitions=3)
            break
        except UnavailableError:
            await asyncio.sleep(0.2)
    partitions = (await admin.describe_subject(subject)).partitions
    ranges = [
        (each.range_start, each.range_end) for each in partitions if each.broker_group in where
    ]
    for number in range(10_000):
        logical = logical_partition(b"k%d" % number)
        if any(start <= logical < end for start, end in ranges):
            return Case(subject, f"k{number}")
    raise AssertionError(f"none of {where} has a partition of {subject}")


async def _ask(
    admin: Admin, name: str, cases: Sequence[Case], *, with_key: bool = True
) -> list[Asked]:
    free = asyncio.Semaphore(ASKED_AT_ONCE)

    async def ask(case: Case) -> Asked:
        async with free:
            began_s = time.perf_counter()
            found = await admin.why(case.subject, GROUP, key=case.key if with_key else None)
            took_ms = (time.perf_counter() - began_s) * 1000
        return Asked(name, case.subject, found.causes[0].code, found.causes[0].text, took_ms)

    return list(await asyncio.gather(*map(ask, cases)))


@asynccontextmanager
async def under_load(cluster: Cluster) -> AsyncIterator[None]:
    """Send and consume a thousand messages a second beside, on g1 and g2."""
    async with Admin(cluster.meta) as admin:
        while True:
            brokers = (await admin.list_brokers()).brokers
            if sum(each.available for each in brokers) >= 3:
                break
            await asyncio.sleep(0.1)
        await admin.cordon(HANGING)
        await admin.create_subject("load", partitions=4)
        await admin.uncordon(HANGING)
    process = subprocess.Popen([sys.executable, "-c", LOAD, cluster.meta])
    try:
        yield
    finally:
        process.kill()
        process.wait()
