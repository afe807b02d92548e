"""Members of one object are opened, run and closed together; if one fails, all end."""

from __future__ import annotations

import asyncio

import pytest

from keylane import Consumer, JsonCodec, Message
from keylane.consumer.several import Several
from keylane.protocol.errors import AlreadyOpenError, ClosedError, HandlerTypeError


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
    several = Several()
    members = [NotingMember(), NotingMember(refuses=True), NotingMember()]
    for member in members:
        several.add(member)
    with pytest.raises(OSError, match="no metaserver"):
        await several.open()
    assert [member.told for member in members] == [["open", "close"], ["open"], []]
    assert several.state == "closed"


async def test_error_of_one_member_ends_all():
    several = Several()
    members = [NotingMember(), NotingMember()]
    for member in members:
        several.add(member)
    running = asyncio.create_task(several.run())
    await asyncio.sleep(0.01)
    assert several.state == "open"
    with pytest.raises(AlreadyOpenError):
        several.add(NotingMember())
    members[1].ended.set_exception(ValueError("it ended"))
    with pytest.raises(ValueError, match="it ended"):
        await running
    assert [member.told for member in members] == [["open", "close"], ["open", "close"]]


async def test_begun_close_ends_all_members_and_the_run():
    several = Several()
    members = [NotingMember(), NotingMember()]
    for member in members:
        several.add(member)
    running = asyncio.create_task(several.run())
    await asyncio.sleep(0.01)
    closing = several.begin_close()
    assert closing is not None
    async with asyncio.timeout(10):
        await closing
        await running
    assert all("close" in member.told for member in members)


async def test_members_are_suspended_and_resumed_together():
    several = Several()
    member = NotingMember()
    several.add(member)
    await several.suspend()
    await several.resume()
    assert member.told == ["suspend", "resume"]


async def test_object_without_members_is_refused():
    with pytest.raises(HandlerTypeError, match=r"@consumer\.on"):
        await Several().open()
    with pytest.raises(ClosedError):
        await Several().wait()


def test_consumers_of_one_object_have_its_arguments_unless_they_have_their_own():
    def told(partition_ids: list[int]) -> None: ...

    def other(partition_ids: list[int]) -> None: ...

    codec = JsonCodec(int)
    consumer = Consumer("127.0.0.1:1", codec=codec, name="till", tags=["paid"], on_assigned=told)

    @consumer.on("orders", group="billing")
    @consumer.on("payments", group="ledger", on_assigned=other, name="book")
    def handle(message: Message[int]) -> None: ...

    assert consumer._several is not None
    payments, orders = consumer._several.members
    assert isinstance(orders, Consumer)
    assert isinstance(payments, Consumer)
    assert orders._codec is payments._codec is codec
    assert (orders._callbacks[0], payments._callbacks[0]) == (told, other)
    assert (orders._name, payments._name) == ("till", "book")
    assert orders._filter is not None
    assert orders._filter.tags == ("paid",)
