"""Members of one object are opened, run and closed together; if one fails, all end."""

from __future__ import annotations

import asyncio

import pytest

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
