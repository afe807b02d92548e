"""A broker that hands over to a copy: what it asks, tells and refuses, and when it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from keylane.broker.copies import hand_over
from keylane.broker.copies.follow_service import FollowService
from keylane.broker.copies.hand_over import HandingOver
from keylane.protocol.copies import HandedOver, HandOver
from keylane.protocol.errors import (
    ConflictError,
    NotSentError,
    Reason,
    WrongBrokerError,
)
from keylane.protocol.frames import Follow, Followed
from sim.machines.store import batch, in_place
from support.brokers.kept_set import COPY_ID, KeptSet
from support.cluster import eventually
from support.raising import raises

OTHER_ID = "d" * 32


class Serving:
    """A broker with a copy of its set, which follows by hand."""

    def __init__(self) -> None:
        self.kept = KeptSet()
        desk = self.kept.desk
        self.following = FollowService(
            desk.store,
            broker_group="g1",
            broker_id="b1",
            opening="o1",
            clock=self.kept.clock,
            run_read=in_place,
            background_turn=desk.service.wait_background_turn,
        )
        self.following.on_report = self.kept.keeper.note_report
        self.following.may_be_ahead = self.kept.keeper.may_be_ahead
        self.replaced: list[str] = []
        self.handing = HandingOver(
            desk.store.commit,
            self.following,
            self.kept.keeper,
            broker_group="g1",
            clock=self.kept.clock,
            folder_ownership=None,
            on_replaced=self.replaced.append,
        )

    async def follow(
        self, copy_id: str = COPY_ID, *, takes_over: bool = True, has_taken_over: bool = False
    ) -> Followed:
        """As a copy that has everything that is written."""
        request = Follow(
            "g1", copy_id, self.kept.desk.store.log.written_end, 1_000, 0, follower="f"
        )
        request = replace(request, takes_over=takes_over, has_taken_over=has_taken_over)
        if not self.following.known(copy_id):
            request = replace(request, tail_start=request.position)
        answer, _ = await self.following.follow(request, memoryview(b""))
        assert isinstance(answer, Followed)
        return answer

    def begin(self, copy_id: str = "") -> asyncio.Task[HandedOver]:
        return asyncio.ensure_future(self.handing.run(HandOver(copy_id=copy_id)))

    def append(self, sequence: int) -> asyncio.Task[object]:
        return asyncio.ensure_future(self.kept.desk.append(batch(sequence=sequence)))

    async def offered(self) -> None:
        await eventually(lambda: self.kept.offers == [COPY_ID])
        await asyncio.sleep(0.01)

    def promote(self) -> None:
        """A metaserver has given the place to the copy."""
        self.kept.error = ConflictError(Reason.COPY_SET_TAKEN, "opened elsewhere")


@pytest.fixture
async def serving() -> AsyncIterator[Serving]:
    serving = Serving()
    await serving.kept.desk.host()
    serving.kept.start()
    await serving.follow()
    await eventually(lambda: serving.kept.stored.members == (COPY_ID,))
    await eventually(lambda: serving.kept.keeper.changes == 1)
    yield serving
    await serving.kept.stop()


async def test_copy_is_told_once_the_broker_stores_nothing_more(serving: Serving) -> None:
    """What is sent meanwhile waits, and is refused by the broker whose place was taken: its clients
    send it to the copy.
    """
    assert not (await serving.follow()).is_offered
    handing = serving.begin()
    await serving.offered()
    end = serving.kept.desk.store.log.end
    appending = serving.append(0)
    await asyncio.sleep(0.01)
    assert (await serving.follow()).is_offered
    assert not (await serving.follow(OTHER_ID)).is_offered
    assert serving.kept.desk.store.log.written_end == end
    serving.promote()
    await serving.follow(has_taken_over=True)
    assert (await handing).copy_id == COPY_ID
    with pytest.raises(WrongBrokerError):
        await appending
    assert len(serving.replaced) == 1
    assert serving.kept.desk.store.log.written_end == end


async def test_commit_in_progress_ends_before_the_copy_is_told(serving: Serving) -> None:
    appending = serving.append(0)
    await asyncio.sleep(0.01)
    handing = serving.begin()
    await eventually(lambda: serving.kept.offers == [COPY_ID])
    assert not (await serving.follow(OTHER_ID)).is_offered
    await serving.follow()  # has the commit now
    await appending
    assert (await serving.follow()).is_offered
    serving.promote()
    await serving.follow(has_taken_over=True)
    await handing


async def test_broker_goes_on_when_nobody_takes_its_place(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "HAND_OVER_MS", 100)
    handing = serving.begin()
    await serving.offered()
    appending = serving.append(0)
    with raises(Reason.PLACE_NOT_TAKEN):
        await handing
    assert serving.kept.offers == [COPY_ID, ""]
    await asyncio.sleep(0.01)
    assert not (await serving.follow()).is_offered
    await appending
    assert not serving.replaced


async def test_broker_whose_copy_cannot_tell_it_asks_a_metaserver(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "LOOK_MS", 20)
    handing = serving.begin()
    await serving.offered()
    serving.promote()
    await handing
    assert serving.replaced


async def test_broker_believes_its_copy_when_no_metaserver_answers(serving: Serving) -> None:
    handing = serving.begin()
    await serving.offered()
    appending = serving.append(0)
    serving.kept.error = NotSentError("away")
    await serving.follow(has_taken_over=True)
    await handing
    with pytest.raises(WrongBrokerError):
        await appending


async def test_commits_go_on_when_no_metaserver_stores_the_offer(serving: Serving) -> None:
    serving.kept.error = NotSentError("away")
    with pytest.raises(NotSentError):
        await serving.begin()
    appending = serving.append(0)
    await asyncio.sleep(0.01)
    await serving.follow()
    await appending


async def test_broker_runs_one_hand_over_at_a_time(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "HAND_OVER_MS", 100)
    handing = serving.begin()
    await serving.offered()
    with raises(Reason.HAND_OVER_RUNNING):
        await serving.begin()
    with raises(Reason.PLACE_NOT_TAKEN):
        await handing


async def test_copy_that_cannot_take_the_place_is_refused_with_the_reason(
    serving: Serving,
) -> None:
    with raises(Reason.COPY_UNKNOWN):
        await serving.begin("e" * 32)
    await serving.follow(OTHER_ID)
    with raises(Reason.COPY_NOT_READY, match="is not in the set"):
        await serving.begin(OTHER_ID)
    await serving.follow(takes_over=False)
    with raises(Reason.COPY_NOT_READY, match="runs without failover"):
        await serving.begin(COPY_ID)
    with raises(Reason.NO_COPY_IN_SET):
        await serving.begin()
    await serving.follow()
    serving.kept.clock.advance(5_000)
    with raises(Reason.COPY_NOT_READY, match="has not been heard of lately"):
        await serving.begin(COPY_ID)
    assert serving.kept.offers == []
