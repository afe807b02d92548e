"""Leases in real SQL against a model: random joins, silences, hand-overs, splits, lost answers, cut
transactions.

The machine runs the metaserver's own store functions on an SQLite database in memory, with a clock
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy.pool import StaticPool

from keylane.metaserver.groups.lease_rows import read_grants, release_leases, store_drained
from keylane.metaserver.groups.sessions import (
    join_group,
    leave_group,
    read_live_session,
    renew_sessions,
)
from keylane.metaserver.groups.views import read_due_work, read_group
from keylane.metaserver.sql.dialect import prepare_sqlite
from keylane.metaserver.sql.schema import (
    brokers,
    drained,
    leases,
    metadata,
    partition_parents,
    partitions,
    sessions,
    subjects,
)
from keylane.protocol.control import Join, ReleaseGrant
from keylane.protocol.errors import SessionUnknownError, TokenUnknownError
from keylane.protocol.ids import ConsumerGroup
from keylane.protocol.routing import PartitionState, split_ranges
from sim.machines.clock import ManualClock
from support.running.examples import examples
from support.sql.told_groups import settle_group

GROUP = ConsumerGroup("g")
SESSIONS = [f"{index:016x}" for index in range(3)]


mostly = st.integers(0, 4).map(bool)
sometimes = st.integers(0, 9).map(lambda number: number == 1)


class CutOffError(Exception):
    """The transaction ends before its commit."""


class LeaseMachine(RuleBasedStateMachine):
    """Compares what the database grants with what may be granted."""

    tokens = Bundle("tokens")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(calendar=False)
        self.engine = sa.create_engine("sqlite://", poolclass=StaticPool)
        prepare_sqlite(self.engine, self.clock)
        with self.engine.begin() as connection:
            metadata.create_all(connection)
        self.ends_at: dict[str, int] = {}  # session → when it dies
        self.ttl_ms: dict[str, int] = {}
        self.group_id = 0
        self.owners: dict[
            int, tuple[str, int]
        ] = {}  # partition → (session, token), while it counts
        self.withdrawn: set[tuple[int, int]] = set()
        self.highest = 0
        self.parents: dict[int, set[int]] = {}
        self.sealed: set[int] = set()
        self.drained: set[int] = set()
        self.versions: dict[str, int] = {}

    def teardown(self) -> None:
        if self.group_id:
            self.everything_is_served_in_the_end()
        self.engine.dispose()

    # ── the database ──────────────────────────────────────────────────────────────────────────────
    def run(self, work: Callable[..., Any], *args: Any, cut: bool = False, **kwargs: Any) -> Any:
        try:
            with self.engine.begin() as connection:
                result = work(connection, *args, **kwargs)
                if cut:
                    raise CutOffError
                return result
        except CutOffError:
            return None

    def alive(self, session: str) -> bool:
        return self.ends_at.get(session, 0) > self.clock.now_ms

    # ── what may happen ───────────────────────────────────────────────────────────────────────────
    @initialize(count=st.integers(1, 4))
    def create(self, count: int) -> None:
        def work(connection: sa.Connection) -> None:
            connection.execute(
                sa.insert(brokers).values(
                    broker_group="b",
                    broker_id="b",
                    address="b:1",
                    readable=True,
                    writable=True,
                    seen_at=0,
                    expires_at=0,
                )
            )
            connection.execute(
                sa.insert(subjects).values(
                    name="s",
                    order_strategy="strict",
                    partitions_wanted=count,
                    partitions_named=count,
                    route_version=1,
                )
            )
            for index, (start, end) in enumerate(split_ranges(count)):
                self.insert_partition(connection, f"s.p{index}", start, end)

        self.run(work)

    def insert_partition(self, connection: sa.Connection, name: str, start: int, end: int) -> int:
        row = sa.insert(partitions).values(
            subject_id=1,
            name=name,
            queue=0,
            range_start=start,
            range_end=end,
            broker_group="b",
            state=PartitionState.OPEN,
        )
        key = connection.execute(row).inserted_primary_key
        assert key is not None
        self.parents[key[0]] = set()
        return int(key[0])

    @rule(
        session=st.sampled_from(SESSIONS),
        ttl_ms=st.sampled_from([1_000, 3_000]),
        cut=sometimes,
        settle=mostly,
    )
    def join(self, session: str, ttl_ms: int, cut: bool, settle: bool) -> None:
        ask = Join(subject="s", group=GROUP, session=session, ttl_ms=ttl_ms)
        row = self.run(join_group, ask, sessions_max=100, cut=cut)
        if row is None:
            return
        self.group_id = row.group_id
        if not self.alive(session):
            self.drop(session)
            self.ends_at[session] = self.clock.now_ms + ttl_ms
            self.ttl_ms[session] = ttl_ms
        if settle:
            self.settle(cut=False)

    @rule(session=st.sampled_from(SESSIONS))
    def join_again_after_silence(self, session: str) -> None:
        """The same id joins again after its ttl, before it was swept."""
        self.clock.now_ms = max(self.clock.now_ms, self.ends_at.get(session, 0))
        self.join(session, 1_000, cut=False, settle=True)

    @rule(ms=st.sampled_from([1, 500, 999, 1_000, 3_000]), attend=mostly)
    def pass_time(self, ms: int, attend: bool) -> None:
        self.clock.advance(ms)
        if not attend:
            return
        for group_id in self.run(read_due_work).groups:
            self.run(settle_group, group_id)
        assert self.run(read_due_work).groups == ()

    @rule(some=st.sets(st.sampled_from(SESSIONS), min_size=1))
    def renew(self, some: set[str]) -> None:
        renewed = self.run(renew_sessions, sorted(some))
        assert renewed.keys() == {session for session in some if self.alive(session)}
        for session in renewed:
            self.ends_at[session] = self.clock.now_ms + self.ttl_ms[session]

    @precondition(lambda self: self.group_id)
    @rule(cut=sometimes)
    def settle(self, cut: bool) -> None:
        self.run(settle_group, self.group_id, cut=cut)

    @precondition(lambda self: any(map(self.alive, SESSIONS)))
    @rule(target=tokens, data=st.data())
    def read(self, data: st.DataObject) -> Any:
        """A client reads its grants; it may still use old ones much later."""
        session = data.draw(
            st.sampled_from([session for session in SESSIONS if self.alive(session)])
        )
        grants = self.run(read_grants, session)
        assert grants.version >= self.versions.get(session, 0)
        self.versions[session] = grants.version
        for grant in grants.grants:
            assert self.owners[grant.partition.partition_id] == (session, grant.token)
        return multiple(
            *((session, grant.partition.partition_id, grant.token) for grant in grants.grants)
        )

    @rule(known=tokens, thief=st.sampled_from(SESSIONS))
    def release_of_anothers(self, known: tuple[str, int, int], thief: str) -> None:
        """A session tries to release what may be another's."""
        self.release((thief, *known[1:]), cut=False)

    @rule(known=tokens, cut=sometimes)
    def release(self, known: tuple[str, int, int], cut: bool) -> None:
        session, partition_id, token = known
        ask = ReleaseGrant(session=session, partition_id=partition_id, token=token)
        try:
            released = self.run(release_leases, [ask], cut=cut)
            if released is None:
                return
            if released.errors:
                raise released.errors[ask]
        except SessionUnknownError:
            assert not self.alive(session)
            return
        except TokenUnknownError:
            assert self.owners.get(partition_id, (session, 0)) != (session, token)
            return
        assert self.alive(session)
        if self.owners.get(partition_id) == (session, token):
            del self.owners[partition_id]

    @precondition(lambda self: self.group_id)
    @rule()
    def release_withdrawn(self) -> None:
        rows = sa.select(leases).where(leases.c.withdrawn)
        for row in self.run(lambda connection: connection.execute(rows).all()):
            self.release((row.session, row.partition_id, row.token), cut=False)

    @rule(session=st.sampled_from(SESSIONS), cut=sometimes, settle=mostly)
    def leave(self, session: str, cut: bool, settle: bool) -> None:
        self.run(leave_group, session, cut=cut)
        if not cut:
            self.drop(session)
        if settle and self.group_id:
            self.settle(cut=False)

    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        """Seal an open partition and open two children."""
        opened = sorted(self.parents.keys() - self.sealed)
        if len(self.parents) > 12:
            return
        parent = data.draw(st.sampled_from(opened))

        def work(connection: sa.Connection) -> None:
            here = partitions.c.partition_id == parent
            row = connection.execute(sa.select(partitions).where(here)).one()
            if row.range_end - row.range_start < 2:
                return
            connection.execute(
                sa.update(partitions).where(here).values(state=PartitionState.SEALED)
            )
            middle = (row.range_start + row.range_end) // 2
            for start, end in ((row.range_start, middle), (middle, row.range_end)):
                child = self.insert_partition(connection, f"s.p{len(self.parents)}", start, end)
                connection.execute(
                    sa.insert(partition_parents).values(partition_id=child, parent_id=parent)
                )
                self.parents[child] = {parent}
            connection.execute(
                sa.update(subjects).values(route_version=subjects.c.route_version + 1)
            )
            self.sealed.add(parent)

        self.run(work)

    @rule(known=tokens)
    def drain(self, known: tuple[str, int, int]) -> None:
        """A client says that its group is through; it counts if it holds the partition, and that is
        sealed.
        """
        session, partition_id, _ = known
        held = self.owners.get(partition_id, ("", 0))[0] == session
        try:
            self.run(store_drained, session, [partition_id, 10**30, -1], ())
        except SessionUnknownError:
            assert not self.alive(session)
            return
        assert self.alive(session)
        if partition_id in self.sealed and held:
            self.drained.add(partition_id)

    @precondition(lambda self: self.sealed - self.drained)
    @rule(session=st.sampled_from(SESSIONS))
    def drain_all(self, session: str) -> None:
        """A session claims every sealed partition to be drained; only its own ones count."""
        for partition_id in sorted(self.sealed):
            self.drain((session, partition_id, 0))

    def drop(self, session: str) -> None:
        """The session's grants do not count any more."""
        self.ends_at.pop(session, None)
        self.versions.pop(session, None)
        self.owners = {key: owner for key, owner in self.owners.items() if owner[0] != session}

    # ── what must hold ────────────────────────────────────────────────────────────────────────────
    @invariant()
    def grants_are_rightful(self) -> None:
        """Each new grant has a token above all others, its partition was free, its parents
        drained.
        """
        held = sa.select(leases).where(leases.c.session.is_not(None))
        rows = self.run(lambda connection: connection.execute(held).all())
        for row in sorted(rows, key=lambda row: row.token):
            grant = (row.partition_id, row.token)
            assert row.withdrawn or grant not in self.withdrawn, "asked back, then granted again"
            if row.withdrawn:
                self.withdrawn.add(grant)
            before = self.owners.get(row.partition_id)
            if before == (row.session, row.token):
                continue
            if row.token <= self.highest:  # not granted just now: it died or was let go unseen
                assert not self.alive(row.session)
                continue
            self.highest = row.token
            assert before is None or not self.alive(before[0]), "two grants at once"
            assert self.parents[row.partition_id] <= self.drained, "before its parents"
            self.owners[row.partition_id] = (row.session, row.token)

    @invariant()
    def drained_is_what_was_said(self) -> None:
        rows = self.run(lambda connection: connection.execute(sa.select(drained)).all())
        assert {row.partition_id for row in rows} == self.drained

    @rule(session=st.sampled_from(SESSIONS))
    def the_dead_stay_dead(self, session: str) -> None:
        try:
            self.run(read_live_session, session)
        except SessionUnknownError:
            assert not self.alive(session)
        else:
            assert self.alive(session)

    def everything_is_served_in_the_end(self) -> None:
        """With one live consumer or more, every readable partition has a live owner, shared
        evenly.
        """
        self.join(SESSIONS[0], 30_000, cut=False, settle=True)
        for _ in range(2):
            self.run(settle_group, self.group_id)
            self.release_withdrawn()
            self.grants_are_rightful()
        self.clock.calendar = True  # what people see has times of the calendar
        view = self.run(read_group, "s", GROUP)
        owners = {
            owner.partition.partition_id: owner.session for owner in view.owners if owner.session
        }
        wanted = {
            key
            for key, parents in self.parents.items()
            if parents <= self.drained and key not in self.drained
        }
        assert owners.keys() == wanted
        live = [session for session in SESSIONS if self.alive(session)]
        assert view.sessions == len(live)
        loads = [list(owners.values()).count(session) for session in live]
        assert max(loads) - min(loads) <= 1
        count = self.run(
            lambda connection: connection.execute(
                sa.select(sa.func.count()).select_from(sessions)
            ).scalar_one()
        )
        assert count == len(live)


def test_leases_follow_the_model() -> None:
    """Tokens strictly rise, no partition has two unexpired grants, no expired session is renewed,
    parents drain first.
    """
    run_state_machine_as_test(
        LeaseMachine,
        settings=settings(max_examples=examples(60), stateful_step_count=40, deadline=None),
    )
