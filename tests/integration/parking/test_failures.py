"""How each dead letter failed is known behind a killed broker and at a child; so is the next try of
what waits for retry.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from integration.parking.test_edited_messages import consumer_of as strict_consumer
from integration.parking.test_poison_in_a_change import sealed_behind
from integration.parking.test_retries import retrying
from keylane import Admin, Consumer, ConsumerSettings, Message, Producer
from keylane.admin import ParkedKeyView, ParkedMessage
from keylane.protocol.backoff import Backoff
from keylane.protocol.clock import SystemClock
from support.cluster import Cluster, eventually

ERRORS = {b"town": (KeyError, "no such town"), b"bank": (TimeoutError, "the bank")}


class Failing:
    """A handler that fails as the values say; `mended`: it fails no more."""

    def __init__(self) -> None:
        self.mended: set[bytes] = set()
        self.handled: list[int] = []

    async def __call__(self, message: Message) -> None:
        if message.value in ERRORS and message.value not in self.mended:
            kind, text = ERRORS[message.value]
            raise kind(text)
        self.handled.append(message.offset)


async def failures(admin: Admin, subject: str) -> list[tuple[int, str, int, int | None]]:
    """Offset, type, tries and time of each dead letter."""
    return [
        (each.offset, each.failure.kind, each.failure.attempts, each.since_ms)
        async for each in admin.parked_messages(subject, "g", dead=True)
        if each.failure is not None
    ]


async def dead_letters(admin: Admin, subject: str) -> int:
    return sum([view.messages async for view in admin.parked(subject, "g", dead=True)])


async def test_failure_of_each_dead_letter_is_known_behind_a_killed_broker_and_at_a_child(
    tmp_path: Path,
):
    """Then those of one error are retried, and others stay."""
    subject = "each-failure"
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create(subject, partitions=1)
        async with asyncio.timeout(120), Admin(cluster.meta) as admin:
            async with Producer(cluster.meta) as producer:
                for value in (b"town", b"bank", b"fine", b"town", b"bank", b"bank"):
                    await producer.send(subject, value, key=value)
            handler = Failing()
            async with strict_consumer(cluster, subject, handler, "dead"):  # type: ignore[arg-type]
                while await dead_letters(admin, subject) < 5:
                    await asyncio.sleep(0.02)
            told = await failures(admin, subject)
            kinds = {0: "KeyError", 3: "KeyError"} | dict.fromkeys((1, 4, 5), "TimeoutError")
            assert {offset: kind for offset, kind, _, _ in told} == kinds
            assert {tries for _, _, tries, _ in told} == {2}
            cluster.brokers[0].kill()
            cluster.brokers[0].restart()
            assert await failures(admin, subject) == told
            await sealed_behind(admin, subject, "resize")
            handler.mended = set(ERRORS)
            async with strict_consumer(cluster, subject, handler, "dead"):  # type: ignore[arg-type]
                while 1 in {view.partition_id async for view in admin.parked(subject, "g")}:
                    await asyncio.sleep(0.02)
                assert await failures(admin, subject) == told
                (chosen,) = await admin.redrive(subject, "g", dead=True, error="no such town")
                assert chosen.messages == 2
                await eventually(lambda: sorted(handler.handled)[-2:] == [2, 3])
                while await dead_letters(admin, subject) > 3:
                    await asyncio.sleep(0.02)
            assert sorted(handler.handled) == [0, 2, 3]
            assert await failures(admin, subject) == [
                each for each in told if each[1] != "KeyError"
            ]


async def test_dead_letters_that_fail_again_have_their_new_failures(shared_cluster: Cluster):
    """Each its own: of all that are retried at once one is handled, and one fails otherwise."""
    subject, handler = "failed-again", Failing()
    await shared_cluster.create(subject, partitions=1)
    async with asyncio.timeout(60), Admin(shared_cluster.meta) as admin:
        async with Producer(shared_cluster.meta) as producer:
            for value in (b"town", b"bank", b"town"):
                await producer.send(subject, value, key=value)
        async with strict_consumer(shared_cluster, subject, handler, "dead"):  # type: ignore[arg-type]
            while await dead_letters(admin, subject) < 3:
                await asyncio.sleep(0.02)
            first = await bank_letter(admin, subject)
            handler.mended = {b"town"}
            await admin.redrive(subject, "g", dead=True)
            await eventually(lambda: handler.handled == [0, 2])
            while (last := await bank_letter(admin, subject)).failure == first.failure:
                await asyncio.sleep(0.02)
            while await dead_letters(admin, subject) > 1:
                await asyncio.sleep(0.02)
        assert first.failure is not None
        assert last.failure is not None
        assert (last.offset, last.failure.kind, last.since_ms) == (
            1,
            "TimeoutError",
            first.since_ms,
        )
        assert last.failure.at_ms > first.failure.at_ms


async def bank_letter(admin: Admin, subject: str) -> ParkedMessage:
    """The only dead letter of the error."""
    chosen = admin.parked_messages(subject, "g", dead=True, error="the bank")
    (letter,) = [each async for each in chosen]
    return letter


async def waiting(admin: Admin, subject: str) -> list[ParkedKeyView]:
    return [view async for view in admin.parked(subject, "g", retrying=True)]


async def test_next_try_is_known_behind_a_killed_broker_and_not_behind_another_owner(
    tmp_path: Path,
):
    """While the owner is there that said it; the next owner tries at once what waits."""
    subject = "next-try"
    slow = ConsumerSettings(ttl_ms=2_000, retry_backoff=Backoff(first_ms=60_000, max_ms=60_000))
    with Cluster(tmp_path, brokers=1) as cluster:
        await cluster.create(subject, partitions=1, strategy="best_tried")

        def consumer(handler: Failing) -> Consumer:
            return Consumer(
                cluster.meta, subject=subject, group="g", handler=handler, settings=slow
            )

        async with asyncio.timeout(120), Admin(cluster.meta) as admin:
            async with consumer(Failing()):
                async with Producer(cluster.meta) as producer:
                    for value in (b"town", b"bank"):
                        await producer.send(subject, value, key=value)
                while await retrying(admin, subject) < 2:
                    await asyncio.sleep(0.02)
                (told,) = await waiting(admin, subject)
                assert told.next_ms is not None
                assert 20_000 < told.next_ms - SystemClock().wall_ms() <= 60_000
                cluster.brokers[0].kill()
                cluster.brokers[0].restart()
                while (again := await waiting(admin, subject))[0].next_ms is None:
                    await asyncio.sleep(0.02)
                assert again == [told]
                by_error = [
                    (view.failure.kind, view.next_ms)
                    async for view in admin.parked(subject, "g", retrying=True, by_error=True)
                    if view.failure is not None
                ]
                assert {kind for kind, _ in by_error} == {"KeyError", "TimeoutError"}
                assert min(at_ms or 0 for _, at_ms in by_error) == told.next_ms
            (gone,) = await waiting(admin, subject)
            assert (gone.messages, gone.next_ms) == (2, None)
            mended = Failing()
            mended.mended = {b"town"}
            async with consumer(mended):
                await eventually(lambda: mended.handled == [0])
                while [view.tries for view in await waiting(admin, subject)] != [2]:
                    await asyncio.sleep(0.02)
                (last,) = await waiting(admin, subject)
                assert last.next_ms is not None
                assert 20_000 < last.next_ms - SystemClock().wall_ms() <= 60_000
