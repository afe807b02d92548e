"""A session with the metaserver: which grants count, and until when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

import pytest

from keylane.consumer.group.membership import Member, Membership
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.control import Done, Grants, Join, Joined
from keylane.protocol.errors import (
    FencedError,
    GroupDeletedError,
    OutcomeUnknownError,
    Reason,
    SessionUnknownError,
    StorageError,
    UnauthenticatedError,
    UnreachableError,
)
from sim.machines.clock import ManualClock
from support.call_doubles import MetaDouble
from support.cluster import eventually
from support.quiet_holder import QuietHolder


class VersionedMeta(MetaDouble):
    """Answers heartbeats with these versions, one after another, each after `took_ms`."""

    address_count = 1

    def __init__(self, clock: ManualClock, *versions: int, took_ms: int = 0) -> None:
        self._clock = clock
        self.versions = list(versions)
        self._took_ms = took_ms
        self.known: list[int] = []

    async def join(self, _body):
        return Joined(ttl_ms=1_000, heartbeat_ms=300)

    async def heartbeat(self, body, *, timeout_ms=None):
        self.known.append(body.known_version)
        if not self.versions:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self._clock.now_ms += self._took_ms
        return Grants(version=self.versions.pop(0), ttl_ms=1_000, grants=())

    async def leave(self, _body, *, timeout_ms=None):
        return Done()


class Holder(QuietHolder):
    """The consumer's side of a session: notes (version, deadline) of the grants it is told."""

    def __init__(self) -> None:
        self.grants: list[tuple[int, int]] = []

    def apply_grants(self, grants: Grants, deadline_ms: int) -> None:
        self.grants.append((grants.version, deadline_ms))


def membership_with(meta: Any, clock: ManualClock) -> Membership:
    """A membership, not started, with this metaserver and a ttl of a second."""
    return Membership(
        Member("s", "g", "c"),
        meta=meta,
        settings=ConsumerSettings(ttl_ms=1_000),
        clock=clock,
        rng=random.Random(1),
        identity=random.Random(2).getrandbits,
    )


async def granted(meta: VersionedMeta, clock: ManualClock) -> list[tuple[int, int]]:
    """(version, deadline) of each answer that counts in a session with this metaserver."""
    holder = Holder()
    membership = membership_with(meta, clock)
    await membership.start(holder)
    await eventually(lambda: not meta.versions)
    await asyncio.sleep(0.01)
    await membership.stop()
    return holder.grants


async def test_older_answer_does_not_replace_grants():
    """A version lower than the last one is ignored when it is told once, by whichever
    metaserver.
    """
    clock = ManualClock()
    counted = await granted(VersionedMeta(clock, 3, 5, 4, 5, 6), clock)
    assert [version for version, _ in counted] == [3, 5, 5, 6]


async def test_lower_version_counts_when_it_is_told_again():
    """After the drop the next heartbeat says that nothing is known; its answer counts, and so do
    later ones.
    """
    clock = ManualClock()
    meta = VersionedMeta(clock, 12, 10, 10, 11)
    counted = await granted(meta, clock)
    assert [version for version, _ in counted] == [12, 10, 11]
    assert meta.known == [-1, 12, -1, 10, 11]


async def test_deadline_counts_from_the_sending_of_the_heartbeat():
    """A late answer leaves less of the ttl, and a tenth of the ttl is the margin."""
    clock = ManualClock()
    began_ms = clock.now_ms
    counted = await granted(VersionedMeta(clock, 1, 2, took_ms=400), clock)
    assert [deadline_ms - began_ms for _, deadline_ms in counted] == [900, 1_300]


class RefusingMeta(VersionedMeta):
    """Refuses the first three heartbeats, as after the token was revoked."""

    refusals = 3

    async def heartbeat(self, body, *, timeout_ms=None):
        if self.refusals:
            self.refusals -= 1
            raise UnauthenticatedError("the token was revoked")
        return await super().heartbeat(body, timeout_ms=timeout_ms)


async def test_refusal_of_heartbeats_is_told_once_and_its_end_too(
    caplog: pytest.LogCaptureFixture,
):
    """Its consumer gets nothing meanwhile, so its log says why."""
    clock = ManualClock()
    with caplog.at_level(logging.INFO):
        await granted(RefusingMeta(clock, 1, 2), clock)
    told = [record.message for record in caplog.records if "revoked" in record.message]
    told += [record.message for record in caplog.records if "again" in record.message]
    assert told == [
        (
            "the metaserver refuses consumer of s in group g, which keeps trying: "
            "the token was revoked"
        ),
        "the metaserver accepts consumer of s in group g again, after 3 failures in 0.0 s",
    ]


class OneJoinMeta(VersionedMeta):
    """The answer of the first join is lost, the first heartbeat ends the session, and its instance
    is taken then.
    """

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.joins: list[Join] = []

    async def join(self, body: Join) -> Joined:
        self.joins.append(body)
        if len(self.joins) == 1:
            raise OutcomeUnknownError
        if body.again:
            raise FencedError(Reason.INSTANCE_TAKEN)
        return await super().join(body)

    async def heartbeat(self, body, *, timeout_ms=None):
        raise SessionUnknownError


class LosingHolder(Holder):
    """Notes that its session was lost, and the error that ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = 0
        self.error: BaseException | None = None

    def on_session_lost(self) -> None:
        self.lost += 1

    def fail(self, error: BaseException) -> None:
        self.error = error


class FailingMeta(VersionedMeta):
    """Its first heartbeat is not answered, and its second ends the session."""

    failures = 2

    async def heartbeat(self, body, *, timeout_ms=None):
        self.failures -= 1
        if self.failures == 1:
            raise UnreachableError("no answer")
        if not self.failures:
            raise SessionUnknownError("it was silent")
        return await super().heartbeat(body, timeout_ms=timeout_ms)


async def test_failed_heartbeats_and_the_end_of_a_session_name_subject_and_group(
    caplog: pytest.LogCaptureFixture,
):
    """A program with many consumers tells them apart."""
    clock = ManualClock()
    meta = FailingMeta(clock, 1, 2)
    membership = membership_with(meta, clock)
    with caplog.at_level(logging.INFO, "keylane.consumer"):
        await membership.start(LosingHolder())
        await eventually(lambda: not meta.versions)
        await membership.stop()
    assert caplog.messages[:3] == [
        "consumer of s in group g joined as c",
        "consumer of s in group g: a heartbeat failed: no answer",
        "consumer of s in group g lost its session: it was silent",
    ]


class RestartedMeta(VersionedMeta):
    """Its database was away for longer than the ttl, and is away again when the consumer joins
    anew.
    """

    def __init__(self, clock: ManualClock, *versions: int) -> None:
        super().__init__(clock, *versions)
        self.joins = 0
        self._ended = False

    async def join(self, body: Join) -> Joined:
        self.joins += 1
        if self.joins in {2, 3}:
            raise StorageError("the database system is starting up")
        return await super().join(body)

    async def heartbeat(self, body, *, timeout_ms=None):
        if not self._ended:
            self._ended = True
            raise SessionUnknownError
        return await super().heartbeat(body, timeout_ms=timeout_ms)


async def test_consumer_joins_again_when_the_database_fails_at_its_first_tries():
    """A database that restarts answers some calls between others that fail."""
    clock, holder = ManualClock(), LosingHolder()
    meta = RestartedMeta(clock, 1, 2)
    membership = membership_with(meta, clock)
    await membership.start(holder)
    await eventually(lambda: not meta.versions or holder.error is not None)
    await membership.stop()
    assert holder.error is None
    assert (holder.lost, meta.joins) == (1, 4)


async def test_consumer_ends_when_a_later_process_has_its_instance():
    """It says that it joins again, so it takes no place from the other; a join whose answer was
    lost is repeated as it was.
    """
    clock, holder = ManualClock(), LosingHolder()
    meta = OneJoinMeta(clock)
    membership = Membership(
        Member("s", "g", "c"),
        meta=meta,
        settings=ConsumerSettings(instance="a"),
        clock=clock,
        rng=random.Random(1),
        identity=random.Random(2).getrandbits,
    )
    with pytest.raises(OutcomeUnknownError):
        await membership.start(holder)
    await membership.start(holder)
    await eventually(lambda: holder.error is not None)
    assert holder.error.reason is Reason.INSTANCE_TAKEN
    assert holder.lost == 1
    first, repeated, rejoin = meta.joins
    assert first == repeated
    assert (first.instance, first.again) == ("a", False)
    assert (rejoin.again, rejoin.session == first.session) == (True, False)
    await membership.stop()


class GrantingMeta(VersionedMeta):
    """Answers joins with grants of version 7, after `took_ms`; the answers of the first `lost`
    joins are lost.
    """

    def __init__(self, clock: ManualClock, *, took_ms: int = 0, lost: int = 0) -> None:
        super().__init__(clock)
        self.took_ms = took_ms
        self.lost = lost
        self.waited_ms: list[int] = []

    async def join(self, body: Join) -> Joined:
        self._clock.now_ms += self.took_ms
        if self.lost:
            self.lost -= 1
            raise OutcomeUnknownError
        grants = Grants(version=7, ttl_ms=1_000, grants=())
        return Joined(ttl_ms=1_000, heartbeat_ms=300, grants=grants)

    async def heartbeat(self, body, *, timeout_ms=None):
        self.waited_ms.append(body.wait_ms)
        return await super().heartbeat(body, timeout_ms=timeout_ms)


async def first_heartbeat(
    meta: GrantingMeta, clock: ManualClock
) -> tuple[list[tuple[int, int]], int, int]:
    """What a session is granted until its first heartbeat, and the version and the wait of that."""
    holder = Holder()
    membership = membership_with(meta, clock)
    while True:
        try:
            await membership.start(holder)
        except OutcomeUnknownError:
            continue
        break
    granted = list(holder.grants)
    await eventually(lambda: bool(meta.known))
    await membership.stop()
    return granted, meta.known[0], meta.waited_ms[0]


async def test_grants_are_taken_from_the_answer_to_a_join():
    """The first heartbeat knows their version, and waits for a change."""
    clock = ManualClock()
    began_ms = clock.now_ms
    granted, known, waited_ms = await first_heartbeat(GrantingMeta(clock, took_ms=100), clock)
    assert granted == [(7, began_ms + 900)]
    assert (known, waited_ms) == (7, 250)


async def test_first_heartbeat_waits_for_nothing_when_the_join_was_slow():
    """A long poll could be answered after the lease's end."""
    clock = ManualClock()
    began_ms = clock.now_ms
    granted, known, waited_ms = await first_heartbeat(GrantingMeta(clock, took_ms=300), clock)
    assert granted == [(7, began_ms + 900)]
    assert (known, waited_ms) == (-1, 0)


async def test_deadline_counts_from_the_first_join_when_its_answer_was_lost():
    """The metaserver may have begun the session then; the repeat of the join renews nothing."""
    clock = ManualClock()
    began_ms = clock.now_ms
    granted, known, waited_ms = await first_heartbeat(
        GrantingMeta(clock, took_ms=200, lost=1), clock
    )
    assert granted == [(7, began_ms + 900)]
    assert (known, waited_ms) == (-1, 0)


class LaterGroupMeta(VersionedMeta):
    """Grants what is of a later group of the name than the join's; that one was deleted."""

    def __init__(self, clock: ManualClock, *, at_once: bool) -> None:
        super().__init__(clock)
        self.at_once = at_once
        self.joins: list[int] = []
        self.asked: list[int] = []

    async def join(self, body: Join) -> Joined:
        self.joins.append(body.group_id)
        if body.group_id:
            raise GroupDeletedError(subject="s", group="g")
        grants = Grants(version=1, ttl_ms=1_000, grants=(), group_id=4) if self.at_once else None
        return Joined(ttl_ms=1_000, heartbeat_ms=300, group_id=3, grants=grants)

    async def heartbeat(self, body, *, timeout_ms=None):
        self.asked.append(body.group_id)
        return Grants(version=1, ttl_ms=1_000, grants=(), group_id=4)


class FailingHolder(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.failure: BaseException | None = None

    def on_session_lost(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.failure = error


@pytest.mark.parametrize("at_once", [True, False])
async def test_grants_of_a_later_group_end_the_session_when_its_own_was_deleted(at_once: bool):
    """A join that comes a second time, late, begins the same session in the group that has the name
    by then.
    """
    clock = ManualClock()
    meta, holder = LaterGroupMeta(clock, at_once=at_once), FailingHolder()
    membership = membership_with(meta, clock)
    await membership.start(holder)
    await eventually(lambda: holder.failure is not None)
    assert isinstance(holder.failure, GroupDeletedError)
    assert (meta.joins, meta.asked, holder.grants) == ([0, 3], [3], [])
    with contextlib.suppress(GroupDeletedError):
        await membership.stop()


class NoReleaseMeta(VersionedMeta):
    """Takes no report of a release while it is down."""

    is_down = True

    async def call(self, *_arguments: Any, **_options: Any) -> Any:
        if self.is_down:
            raise UnreachableError("nobody listens")
        return Done()


async def test_failed_reports_of_a_release_make_a_line_for_each_partition(
    caplog: pytest.LogCaptureFixture,
):
    """Further ones are counted, until one succeeds."""
    caplog.set_level(logging.INFO, "keylane.consumer")
    clock = ManualClock()
    meta = NoReleaseMeta(clock)
    membership = membership_with(meta, clock)

    async def report(times: int) -> list[str]:
        caplog.clear()
        for _ in range(times):
            for partition_id in (1, 2):
                await membership.releases.report("a" * 16, partition_id, 7)
            clock.advance(300)
        return [record.getMessage() for record in caplog.records]

    lines = await report(20)
    assert len(lines) == 2
    assert all(line.endswith(": cannot report the release: nobody listens") for line in lines)
    clock.advance(10_000)
    lines = await report(1)
    assert ["21 failures in 16 s" in line for line in lines] == [True, True]
    meta.is_down = False
    assert await report(3) == []
