"""Members of one object are opened, run and closed together; if one fails, all end."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Consumer, ConsumerSettings, JsonCodec, Message
from keylane.consumer.client import ConsumerSet
from keylane.protocol.errors import ClosedError, ConfigError, HandlerTypeError, Reason
from support.raising import raises


class NotingMember:
    """Notes what it is told; it ends with `error` if that is given."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.told: list[str] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> object:
        self.told.append("open")
        if self.refuses:
            raise OSError("no metaserver")
        return self

    async def close(self) -> None:
        self.told.append("close")
        if not self.ended.done():
            self.ended.set_result(None)

    def begin_close(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.close())

    async def wait(self) -> None:
        await asyncio.shield(self.ended)

    async def suspend(self) -> None:
        self.told.append("suspend")

    async def resume(self) -> None:
        self.told.append("resume")


async def test_members_are_closed_again_when_one_cannot_be_opened():
    consumer_set = ConsumerSet()
    members = [NotingMember(), NotingMember(refuses=True), NotingMember()]
    for member in members:
        consumer_set.add(member)
    with pytest.raises(OSError, match="no metaserver"):
        await consumer_set.open()
    assert [member.told for member in members] == [["open", "close"], ["open"], []]
    assert consumer_set.state == "closed"


async def test_error_of_one_member_ends_all():
    consumer_set = ConsumerSet()
    members = [NotingMember(), NotingMember()]
    for member in members:
        consumer_set.add(member)
    running = asyncio.create_task(consumer_set.run())
    await asyncio.sleep(0.01)
    assert consumer_set.state == "open"
    with raises(Reason.ALREADY_OPEN):
        consumer_set.add(NotingMember())
    members[1].ended.set_exception(ValueError("it ended"))
    with pytest.raises(ValueError, match="it ended"):
        await running
    assert [member.told for member in members] == [["open", "close"], ["open", "close"]]


async def test_begun_close_ends_all_members_and_the_run():
    consumer_set = ConsumerSet()
    members = [NotingMember(), NotingMember()]
    for member in members:
        consumer_set.add(member)
    running = asyncio.create_task(consumer_set.run())
    await asyncio.sleep(0.01)
    closing = consumer_set.begin_close()
    assert closing is not None
    async with asyncio.timeout(10):
        await closing
        await running
    assert all("close" in member.told for member in members)


async def test_opening_of_several_is_an_error_when_they_are_closed_between_two_members():
    """The first one is closed again, and the second one is not opened."""
    consumer_set = ConsumerSet()
    first, second = NotingMember(), NotingMember()
    consumer_set.add(first)
    consumer_set.add(second)

    async def close_meanwhile() -> object:
        consumer_set.begin_close()
        return first

    first.__aenter__ = close_meanwhile  # type: ignore[method-assign]
    with pytest.raises(ClosedError, match="closed while it was opened"):
        await consumer_set.open()
    assert "close" in first.told
    assert "open" not in second.told
    assert consumer_set.state == "closed"


async def test_members_are_suspended_and_resumed_together():
    consumer_set = ConsumerSet()
    member = NotingMember()
    consumer_set.add(member)
    await consumer_set.suspend()
    await consumer_set.resume()
    assert member.told == ["suspend", "resume"]


async def test_object_without_members_is_refused():
    with pytest.raises(HandlerTypeError, match=r"@consumer\.on"):
        await ConsumerSet().open()
    with pytest.raises(ClosedError):
        await ConsumerSet().wait()


def test_handler_without_a_subject_is_refused():
    """`@consumer.on` without a call would bind the function as a subject, and handle nothing."""
    consumer = Consumer("127.0.0.1:1")
    with pytest.raises(HandlerTypeError, match=r'@consumer\.on\("orders", group="billing"\)'):

        @consumer.on  # type: ignore[arg-type]
        def handle(message: Message) -> None: ...


def test_second_handler_of_a_subject_and_a_group_is_refused():
    """Each message would go to one of the two; broadcast handlers each get all."""
    consumer = Consumer("127.0.0.1:1")

    def handle(message: Message) -> None: ...

    consumer.on("orders", group="billing")(handle)
    with raises(Reason.HANDLER_TWICE) as caught:
        consumer.on("orders", group="billing")(handle)
    assert (caught.value.subject, caught.value.group) == ("orders", "billing")
    consumer.on("orders", group="ledger")(handle)
    consumer.on("payments", group="billing")(handle)
    for _ in range(2):
        consumer.on("orders", settings=ConsumerSettings(broadcast=True))(handle)
    assert consumer._consumer_set is not None
    assert len(consumer._consumer_set.members) == 5


def test_limit_of_tries_is_refused_by_its_own_name():
    with pytest.raises(ConfigError, match=r"^tries_max must be .* not 0 \[") as caught:
        Consumer("127.0.0.1:1", subject="s", group="g", tries_max=0)
    assert "retry_tries_max" not in str(caught.value)


def test_start_that_is_no_word_is_refused_with_the_words():
    with pytest.raises(ConfigError, match=r"'LATEST'.* give 'earliest' or 'latest'"):
        Consumer("127.0.0.1:1", subject="s", group="g", start="LATEST")


def test_consumers_of_one_object_have_its_arguments_unless_they_have_their_own():
    def told(partition_ids: list[int]) -> None: ...

    def other(partition_ids: list[int]) -> None: ...

    codec = JsonCodec(int)
    consumer = Consumer(
        "127.0.0.1:1",
        codec=codec,
        settings=ConsumerSettings(name="till", tags=["paid"], on_assigned=told),
    )

    @consumer.on("orders", group="billing")
    @consumer.on(
        "payments", group="ledger", settings=ConsumerSettings(on_assigned=other, name="book")
    )
    def handle(message: Message[int]) -> None: ...

    assert consumer._consumer_set is not None
    payments, orders = consumer._consumer_set.members
    assert isinstance(orders, Consumer)
    assert isinstance(payments, Consumer)
    assert orders._options.codec is payments._options.codec is codec
    assert (orders._options.settings.on_assigned, payments._options.settings.on_assigned) == (
        told,
        other,
    )
    assert (orders._options.settings.name, payments._options.settings.name) == ("till", "book")
    assert orders._options.message_filter is not None
    assert orders._options.message_filter.tags == ("paid",)


def test_member_with_settings_of_its_own_has_the_filter_of_the_object():
    """Without it the member would ack messages that the object was told to leave out."""
    consumer = Consumer("127.0.0.1:1", settings=ConsumerSettings(name="till", tags=["paid"]))

    @consumer.on("orders", group="billing", settings=ConsumerSettings(concurrency=4))
    def handle(message: Message[bytes]) -> None: ...

    assert consumer._consumer_set is not None
    (member,) = consumer._consumer_set.members
    assert isinstance(member, Consumer)
    assert (member._options.settings.name, member._options.settings.tags) == ("till", ["paid"])
    assert member._options.settings.concurrency == 4
    assert member._options.message_filter is not None
