"""What a child does about an ancestor's parked messages where the ancestor's broker lacks it, or is
gone.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from keylane.consumer import ConsumerSettings
from keylane.consumer.parked_reads import inherits_loose
from keylane.protocol.errors import KeylaneError, PartitionUnknownError, UnreachableError
from keylane.protocol.frames import (
    Acquire,
    Acquired,
    AdoptParked,
    ChangeParked,
    ListParked,
    ParkedKeys,
    ParkedToAdopt,
    ReleaseParked,
)
from keylane.protocol.operations import SubjectHistory
from keylane.protocol.parked import (
    Adopt,
    AncestorNotified,
    RequestedChange,
    decode_changes,
    encode_parked,
)
from keylane.protocol.routing import Partition, PartitionState
from support.cluster import eventually
from support.pulling import FAST, NotingOwner, ScriptedBroker, opened
from unit.consumer.reading.test_lineage_order import past

ANCESTOR = 70
AWAY = "b:2"
GONE = [{"lost": True}, {"state": PartitionState.EXPIRED}]
NO_SUCH = PartitionUnknownError(partition_id=ANCESTOR)


class KnowingOwner(NotingOwner):
    """Its metaserver tells this of the ancestor."""

    def __init__(self, **told) -> None:
        super().__init__()
        entry = past(ANCESTOR, 0, 1024, **told)
        there = replace(entry.partition, address=AWAY)
        entry = replace(entry, partition=there)
        self._history = SubjectHistory(subject="s", route_version=1, partitions=[entry])

    async def history(self) -> SubjectHistory:
        return self._history


class HomeBroker(ScriptedBroker):
    """Has the partition, and keeps what is changed of what is parked."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[RequestedChange] = []

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, ChangeParked):
            self.changes += decode_changes(payload)
        return await super().call(request, payload, wait_ms=wait_ms)


class NamingBroker(HomeBroker):
    """Has nothing parked any more that the ancestor keeps."""

    async def call(self, request, payload=b"", *, wait_ms=0):
        match request:
            case Acquire():
                return Acquired(0, (), 0, False, parked_version=1), b""
            case ListParked():
                return ParkedKeys(1, None, (ANCESTOR,)), encode_parked(())
        return await super().call(request, payload, wait_ms=wait_ms)


class Silent(ScriptedBroker):
    """Has an older copy from before the ancestor."""

    address = AWAY

    async def call(self, request, payload=b"", *, wait_ms=0):
        if isinstance(request, AdoptParked | ReleaseParked):
            self.requests.append(request)
            raise NO_SUCH
        return await super().call(request, payload, wait_ms=wait_ms)


async def test_ancestor_counts_as_told_only_when_its_broker_has_heard_it():
    """Its messages would be kept for ever when the original comes back."""
    home, away = NamingBroker(), Silent()
    settings = ConsumerSettings(backoff=FAST)
    async with opened(home, KnowingOwner(), settings, others=(away,)):
        await eventually(lambda: len(away.requests) >= 3)
    assert {type(request) for request in away.requests} == {ReleaseParked}
    assert home.changes == []


async def test_ancestor_counts_as_told_when_its_broker_has_heard_it():
    home, away = NamingBroker(), ScriptedBroker()
    away.address = AWAY
    async with opened(home, KnowingOwner(), ConsumerSettings(), others=(away,)):
        await eventually(lambda: home.changes)
    [told] = away.requests
    assert (type(told), told.partition_id, told.group) == (ReleaseParked, ANCESTOR, "g")
    assert home.changes == [AncestorNotified(ANCESTOR)]


@pytest.mark.parametrize("gone", GONE)
async def test_ancestor_counts_as_told_when_its_messages_are_gone(gone):
    """No broker is asked."""
    home, away = NamingBroker(), Silent()
    async with opened(home, KnowingOwner(**gone), ConsumerSettings(), others=(away,)):
        await eventually(lambda: home.changes)
    assert home.changes == [AncestorNotified(ANCESTOR)]
    assert away.requests == []


async def adopted_from(home: HomeBroker, owner: KnowingOwner) -> None:
    """Have what the parent has parked taken over."""
    parent = past(ANCESTOR, 0, 1024).partition
    async with opened(home, owner, ConsumerSettings(), others=(Silent(),)) as shell:
        await shell.calls.reads._ancestors._adopt(parent)


async def test_child_takes_nothing_over_when_the_broker_of_its_parent_lacks_it():
    home = HomeBroker()
    with pytest.raises(KeylaneError) as caught:
        await adopted_from(home, KnowingOwner())
    assert caught.value is NO_SUCH
    assert home.changes == []


class Parted(ScriptedBroker):
    """Has parked messages of the group, two pages of each range that is asked for."""

    address = AWAY

    async def call(self, request, payload=b"", *, wait_ms=0):
        assert isinstance(request, AdoptParked)
        self.requests.append(request)
        return ParkedToAdopt(None if request.first_row else 7, (2,)), encode_parked(())


async def test_ancestor_past_the_parents_is_asked_for_parts_of_the_range_alone():
    """What came by way of the partitions between is not taken over a second time."""
    home, away = HomeBroker(), Parted()
    parent = replace(past(ANCESTOR, 0, 1024).partition, address=away.address)
    owner = KnowingOwner()
    async with opened(home, owner, ConsumerSettings(), others=(away,)) as shell:
        ancestors = shell.calls.reads._ancestors
        grant = ancestors._reads.grant
        told = {"parked_parents": (parent,), "parked_tokens": (4,)}
        ancestors._reads.grant = replace(grant, **told, parked_ranges=(((0, 256), (512, 700)),))
        await ancestors.adopt_all(Acquired(0, (), 0, False))
    asked = [(ask.range_start, ask.range_end, ask.first_row) for ask in away.requests]
    assert asked == [(0, 256, 0), (0, 256, 7), (512, 700, 0), (512, 700, 7)]
    assert [change.last for change in home.changes] == [False, False, False, True]


async def test_child_goes_on_when_its_parent_has_expired(caplog):
    """What was parked there is given up, with a warning: a child that waits for it gives no
    message.
    """
    home = HomeBroker()
    await adopted_from(home, KnowingOwner(state=PartitionState.EXPIRED))
    assert home.changes == [Adopt(ANCESTOR, (), True)]
    assert (
        f"messages parked at parent partition {ANCESTOR} were removed by retention" in caplog.text
    )


async def test_child_waits_for_what_its_grant_says_next_when_its_parent_is_lost():
    """What the parent had taken over may lie behind it still, as only a grant says that was made
    since.
    """
    home = HomeBroker()
    parent = replace(past(ANCESTOR, 0, 1024).partition, address=None)
    async with opened(home, KnowingOwner(lost=True), ConsumerSettings()) as shell:
        grant = shell.calls.reads.grant

        async def adopt(parents: tuple[Partition, ...]) -> None:
            shell.calls.reads.update_grant(replace(grant, parked_parents=parents))
            await shell.calls.reads._ancestors.adopt_all(Acquired(0, (), 0, False))

        with pytest.raises(UnreachableError):
            await adopt((parent,))
        assert home.changes == []
        await adopt((replace(parent, state=PartitionState.EXPIRED),))
        assert home.changes == [Adopt(ANCESTOR, (), True)]
        shell.calls.reads.update_grant(grant)
        assert shell.calls.reads.grant != grant, "all was taken over"


def resized_twice(*, lost: bool = False) -> SubjectHistory:
    """Partition 2 has the children 5 and 6; 8 is a child of 5, and 9 of both. 5 may be lost."""
    partitions = [
        past(2, 341, 682),
        past(5, 256, 512, 2, lost=lost),
        past(6, 512, 768, 2),
        past(8, 0, 341, 5),
        past(9, 341, 682, 5, 6),
    ]
    return SubjectHistory(subject="s", route_version=1, partitions=partitions)


@pytest.mark.parametrize(("heir", "inherits"), [(5, True), (6, False), (8, True), (9, False)])
def test_loose_messages_pass_to_the_child_with_the_first_logical_partition_of_its_parent(
    heir, inherits
):
    """Partition 9 contains the first logical partition of 2, and gets none of its loose messages:
    5 had them, which begins in the range of 8.
    """
    assert inherits_loose(resized_twice(), 2, heir) is inherits


def test_nobody_inherits_loose_messages_for_certain_when_the_partition_between_was_lost():
    history = resized_twice(lost=True)
    assert not any(inherits_loose(history, 2, heir) for heir in (8, 9))
