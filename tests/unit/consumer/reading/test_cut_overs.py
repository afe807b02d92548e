"""Readers and broadcast consumers, in a virtual cluster, of a subject whose messages are replaced
by rows, or which is deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from keylane import Admin, Consumer, ConsumerSettings, Message, Producer, Reader
from keylane.errors import PartitionUnknownError, SubjectDeletedError
from keylane.protocol.message import pack_properties
from keylane.protocol.reprocess.manifest import SOURCE
from keylane.testing import VirtualCluster

SUBJECT = "orders"
QUIET_S = 20
"""Longer than a follower needs to notice changes."""


@pytest.fixture(autouse=True)
def rows_say_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a producer send the property that names a row's source, which only jobs may set."""
    of_a_job = partial(pack_properties, kept=[SOURCE])
    monkeypatch.setattr("keylane.producer.sending.pack_properties", of_a_job)


class Replacements:
    """A subject with one partition whose messages are replaced by rows, and which is deleted."""

    def __init__(self, cluster: VirtualCluster, producer: Producer, admin: Admin) -> None:
        self.cluster, self.producer, self.admin = cluster, producer, admin
        self._cuts = 0

    async def send(self, *numbers: int) -> None:
        for number in numbers:
            await self.producer.send(SUBJECT, b"%d" % number, key=b"k")

    async def cut(self) -> str:
        """Seal the stored messages and continue after a hidden subject; return its name."""
        self._cuts += 1
        hidden = f"{SUBJECT}.{self._cuts}"
        await self.admin.hide_subject(SUBJECT, hidden, cut=True)
        await asyncio.sleep(5)
        return hidden

    async def publish(self, hidden: str) -> None:
        """Replace the messages before the cut with rows of the same values, as a job does."""
        view = await self.admin.describe_subject(hidden)
        before = min(int(each.partition_id) for each in view.partitions)
        messages = await self.cluster.messages(SUBJECT)
        for each in messages:
            if each.partition_id < before:
                properties = {SOURCE: f"{each.partition_id}/{each.offset}"}
                await self.producer.send(hidden, each.value, key=each.key, properties=properties)
        await self.admin.publish_subject(hidden, SUBJECT, replace=True)

    async def replace(self) -> None:
        await self.publish(await self.cut())

    async def remake(self) -> None:
        """Delete the subject and create another one with the same name."""
        await self.admin.delete_subject(SUBJECT)
        await self.cluster.create_subject(SUBJECT, partitions=1)


def told(story: Callable[[Replacements], Awaitable[None]]) -> None:
    """Run a scenario in a new cluster."""
    cluster = VirtualCluster()

    async def main() -> None:
        await cluster.create_subject(SUBJECT, partitions=1)
        async with Producer(cluster.address) as producer, Admin(cluster.address) as admin:
            await story(Replacements(cluster, producer, admin))

    cluster.run(main)


def reader_of(story: Replacements, **options: Any) -> Reader[bytes]:
    return Reader(story.cluster.address, SUBJECT, follow=True, **options)


async def values(reader: Reader[bytes], count: int | None = None) -> list[int]:
    """Return the next `count` values; None: all values until the reader is quiet."""
    given: list[int] = []
    try:
        while count is None or len(given) < count:
            async with asyncio.timeout(QUIET_S):
                given.append(int((await anext(reader)).value))
    except TimeoutError:
        assert count is None, f"only {given} came"
    return given


def test_reader_goes_on_behind_rows_of_what_it_gave():
    async def story(story: Replacements) -> None:
        await story.send(1, 2)
        async with reader_of(story) as reader:
            assert await values(reader, 2) == [1, 2]
            hidden = await story.cut()
            await story.send(3)
            await story.publish(hidden)
            assert await values(reader) == [3]

    told(story)


def test_readers_give_each_message_once_when_their_ranges_meet_while_the_rows_were_stored():
    """Messages sent after the cut have earlier times than the rows, which precede them, so they are
    in the last row's range.
    """

    async def story(story: Replacements) -> None:
        await story.send(1, 2)
        hidden = await story.cut()
        await story.send(3)
        await asyncio.sleep(60)
        during = story.cluster.now()
        await asyncio.sleep(60)
        await story.publish(hidden)
        await story.send(4)
        async with Reader(story.cluster.address, SUBJECT, stop=during) as reader:
            assert [message.value async for message in reader] == []
        async with Reader(story.cluster.address, SUBJECT, start=during) as reader:
            assert [int(message.value) async for message in reader] == [1, 2, 3, 4]

    told(story)


def test_reader_is_given_rows_of_what_it_did_not_get_to():
    """It has read half of the messages, and was opened with positions."""

    async def story(story: Replacements) -> None:
        await story.send(1, 2, 3)
        async with reader_of(story) as reader:
            assert await values(reader, 1) == [1]
            positions = dict(reader.positions)
        await story.replace()
        await story.send(4)
        async with reader_of(story, start=positions) as reader:
            assert await values(reader) == [2, 3, 4]
        async with reader_of(story) as reader:
            assert await values(reader) == [1, 2, 3, 4]

    told(story)


@pytest.mark.parametrize("reopened", [False, True])
def test_reader_goes_on_behind_rows_of_rows(reopened: bool):
    """It notices both publications only after the second one."""

    async def story(story: Replacements) -> None:
        await story.send(1, 2)
        async with reader_of(story) as reader:
            assert await values(reader, 2) == [1, 2]
            positions = dict(reader.positions)
            await story.replace()
            await story.send(3)
            await story.replace()
            await story.send(4)
            if not reopened:
                assert await values(reader) == [3, 4]
        if reopened:
            async with reader_of(story, start=positions) as reader:
                assert await values(reader) == [3, 4]

    told(story)


async def handled_by_broadcast(
    story: Replacements, deeds: Callable[[], Awaitable[None]], *, slow_s: dict[int, float]
) -> list[int]:
    """Return what a broadcast consumer handles after it is opened; messages in `slow_s`
    take long.
    """
    given: list[int] = []

    async def handle(message: Message) -> None:
        number = int(message.value)
        if number in slow_s:
            await asyncio.sleep(slow_s.pop(number))
        given.append(number)

    async with Consumer(
        story.cluster.address,
        subject=SUBJECT,
        settings=ConsumerSettings(broadcast=True, concurrency=1),
        handler=handle,
    ):
        await deeds()
        await asyncio.sleep(60)
    return given


@pytest.mark.parametrize("slow_s", [{}, {2: 12.0}, {2: 30.0}])
@pytest.mark.parametrize("rounds", [1, 2])
def test_broadcast_handles_each_message_once_when_rows_replace_it(
    slow_s: dict[int, float], rounds: int
):
    """Also a message that is in a handler during the publication, and later ones."""

    async def story(story: Replacements) -> None:
        await story.send(1)

        async def deeds() -> None:
            await story.send(2, 3)
            hidden = await story.cut()
            await story.send(4)
            await story.publish(hidden)
            if rounds == 2:
                await asyncio.sleep(30)
                await story.replace()
            await story.send(5)

        assert await handled_by_broadcast(story, deeds, slow_s=dict(slow_s)) == [2, 3, 4, 5]

    told(story)


def test_broadcast_is_given_rows_of_rows_when_their_messages_were_not_handled():
    """Both publications happen while its handler runs: no later message is lost."""

    async def story(story: Replacements) -> None:
        async def deeds() -> None:
            await story.send(1, 2, 3)
            await asyncio.sleep(1)
            await story.replace()
            await story.send(4)
            await story.replace()

        given = await handled_by_broadcast(story, deeds, slow_s={1: 60.0})
        assert set(given) == {1, 2, 3, 4}
        assert given[-3:] == [2, 3, 4]

    told(story)


def test_reader_ends_when_another_subject_has_the_name():
    async def story(story: Replacements) -> None:
        await story.send(1)
        async with reader_of(story) as reader:
            assert await values(reader, 1) == [1]
            positions = dict(reader.positions)
            await story.remake()
            await story.send(2)
            with pytest.raises(SubjectDeletedError, match="another subject has its name"):
                await values(reader)
        with pytest.raises(PartitionUnknownError):
            async with reader_of(story, start=positions):
                pass
        async with reader_of(story) as reader:
            assert await values(reader) == [2]

    told(story)


def test_broadcast_ends_when_another_subject_has_the_name():
    async def story(story: Replacements) -> None:
        given: list[bytes] = []

        async def handle(message: Message) -> None:
            given.append(message.value)

        consumer = Consumer(
            story.cluster.address,
            subject=SUBJECT,
            settings=ConsumerSettings(broadcast=True),
            handler=handle,
        )

        async def consume() -> None:
            async with consumer, asyncio.timeout(QUIET_S):
                await story.remake()
                await story.send(2)
                await consumer.wait()

        with pytest.raises(SubjectDeletedError, match="another subject has its name"):
            await consume()
        assert given == []

    told(story)


def test_reader_opens_when_a_partition_goes_meanwhile():
    """The broker drops it after the reader fetched the history, and before it fetches the
    partition's offsets.
    """

    async def story(story: Replacements) -> None:
        await story.send(1, 2)
        hidden = await story.cut()
        reader = reader_of(story)
        find = reader._fetch_offsets
        published = False

        async def look_at(partition: Any) -> Any:
            nonlocal published
            if not published:
                published = True
                await story.publish(hidden)
                await asyncio.sleep(QUIET_S)
            return await find(partition)

        reader._fetch_offsets = look_at  # type: ignore[method-assign]
        async with reader:
            assert await values(reader) == [1, 2]

    told(story)
