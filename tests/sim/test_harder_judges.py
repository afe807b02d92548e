"""The judges of shares, of resets to a time, and of what is forgotten tell what they are for."""

import asyncio
import sqlite3
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from keylane.protocol.errors import SubjectUnknownError
from keylane.protocol.operations import OperationState, Publication, PublishSubject
from keylane.protocol.progress import CursorView, GroupReset, ResetGroup, ResetTo
from keylane.protocol.routing import PartitionState
from keylane.testing.machines.disk import SimDisk
from sim.actors.operators import late_cursors
from sim.features.carried import Round
from sim.features.cut_overs import CutOvers
from sim.features.deletions import Deletions
from sim.features.harder.killers import number_of
from sim.features.harder.past import KNOWN_S, ForgottenCutOvers, ForgottenDeletions, PastWatch
from sim.machines.clock import ManualClock
from sim.machines.database import Shelf
from sim.machines.movements import moved_for_nothing, needed
from sim.machines.store import Desk, batch, open_store
from support.call_doubles import MetaDouble


# ── shares ────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture
def shelf() -> Iterator[Any]:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    raw.executescript(
        """
        CREATE TABLE groups (group_id INTEGER, name TEXT);
        CREATE TABLE sessions (session TEXT, group_id INTEGER, expires_at INTEGER, suspended INTEGER);
        CREATE TABLE leases (group_id INTEGER, partition_id INTEGER, session TEXT);
        INSERT INTO groups VALUES (1, 'readers');
        INSERT INTO sessions VALUES ('a', 1, 100, 0), ('b', 1, 100, 0), ('c', 1, 100, 1), ('d', 1, 5, 0);
        INSERT INTO leases VALUES (1, 1, 'a'), (1, 2, 'a'), (1, 3, 'b');
        """
    )
    yield SimpleNamespace(_raw=raw, _clock=SimpleNamespace(boot_ms=lambda: 10), problems=[])
    raw.close()


def test_members_are_told_of_when_one_has_two_partitions_more(shelf):
    """Who is suspended, or not heard for its ttl, is no member."""
    assert Shelf.uneven_shares(shelf) == []
    shelf._raw.execute("INSERT INTO leases VALUES (1, 4, 'a')")
    assert Shelf.uneven_shares(shelf) == ["members of readers have [1, 3] partitions"]


def test_grant_is_told_of_when_its_session_is_suspended(shelf):
    Shelf._check_able(shelf, SimpleNamespace(session="a"))  # type: ignore[arg-type]
    assert shelf.problems == []
    Shelf._check_able(shelf, SimpleNamespace(session="c"))  # type: ignore[arg-type]
    assert len(shelf.problems) == 1


# ── movements ─────────────────────────────────────────────────────────────────────────────────────
def test_movements_that_are_needed_are_those_above_the_shares():
    """The larger shares go to those that have most."""
    assert needed([4, 3], 7) == 0
    assert needed([3, 4, 0], 7) == 2
    assert needed([6, 0], 6) == 3
    assert needed([0, 0], 5) == 0


def _settled(wanted: dict[int, str], unreached: dict[int, set[str]] | None = None) -> str:
    """The judge's word on a settling of a and b, which had two partitions each."""
    leases = {
        key: SimpleNamespace(session=session, wanted=session, withdrawn=False)
        for key, session in {1: "a", 2: "a", 3: "b", 4: "b"}.items()
    }
    return moved_for_nothing(leases, ["a", "b"], [1, 2, 3, 4], unreached or {}, wanted)


def test_movement_is_told_of_when_the_shares_need_none():
    assert _settled({1: "a", 2: "a", 3: "b", 4: "b"}) == ""
    assert (
        _settled({1: "b", 2: "a", 3: "a", 4: "b"}) == "partitions [1, 3] move, and 0 of 4 need to"
    )


def test_movement_from_who_does_not_get_at_a_broker_counts_as_needed():
    """Where no member gets at a partition, it stays."""
    assert _settled({1: "b", 2: "a", 3: "b", 4: "b"}, {1: {"a"}}) == ""
    stays = "partition 1 stays with a member that does not get at it"
    assert _settled({1: "a", 2: "a", 3: "b", 4: "b"}, {1: {"a"}}) == stays
    assert _settled({1: "a", 2: "a", 3: "b", 4: "b"}, {1: {"a", "b"}}) == ""
    assert _settled({1: "b", 2: "a", 3: "b", 4: "b"}, {1: {"a", "b"}}) != ""


# ── resets ────────────────────────────────────────────────────────────────────────────────────────
async def test_cursor_is_told_of_when_it_is_behind_a_message_of_the_time_of_the_reset():
    clock = ManualClock()
    store = open_store(SimDisk())
    desk = Desk(store, clock)
    await desk.host()
    await desk.append(batch(sequence=0, count=2))
    at_ms = store.state.partitions[1].appended_at_ms
    world: Any = SimpleNamespace(brokers=[SimpleNamespace(running=True, store=store)])

    def told(cursor: int, time_ms: int) -> list[str]:
        view = CursorView(partition_id=1, queue=0, cursor=cursor, logic_cursor=cursor, token=1)
        ask = ResetGroup(to=ResetTo.TIME, at_ms=time_ms)
        return late_cursors(world, ask, GroupReset(subject="s", group="g", cursors=[view]))

    assert told(0, at_ms) == []
    assert told(2, at_ms + 1) == []
    assert len(told(2, at_ms)) == 1
    assert len(told(1, at_ms)) == 1
    assert (
        late_cursors(
            world, ResetGroup(to=ResetTo.LATEST), GroupReset(subject="s", group="g", cursors=[])
        )
        == []
    )
    await store.close()


# ── what is over ──────────────────────────────────────────────────────────────────────────────────
class Past:
    """A database with one done operation of a subject, and a watch of it."""

    def __init__(self) -> None:
        raw = self.raw = sqlite3.connect(":memory:", isolation_level=None)
        weakref.finalize(self, raw.close)
        raw.executescript(
            """
            CREATE TABLE subjects (subject_id INTEGER, name TEXT, hidden_for TEXT);
            CREATE TABLE operations (operation_id INTEGER, state TEXT, subject_id INTEGER);
            CREATE TABLE publications (hidden TEXT, operation_id INTEGER);
            CREATE TABLE deletions (subject_id INTEGER, group_id INTEGER);
            INSERT INTO subjects VALUES (1, 'orders', '');
            INSERT INTO operations VALUES (7, 'done', 1);
            """
        )
        self.loop = SimpleNamespace(now=0.0)
        world = SimpleNamespace(shelf=SimpleNamespace(_raw=raw), loop=self.loop)
        self.feature: Any = SimpleNamespace(world=world, problems=[])
        self.watch = PastWatch(self.feature)
        self.watch.look()

    def later(self, seconds: float, *statements: str) -> list[str]:
        self.loop.now += seconds
        for statement in statements:
            self.raw.execute(statement)
        self.watch.look()
        return list(self.feature.problems)


def test_row_is_told_of_when_it_is_forgotten_before_its_time():
    assert Past().later(KNOWN_S, "DELETE FROM operations") == []
    (problem,) = Past().later(KNOWN_S / 2, "DELETE FROM operations")
    assert "operations 7 is forgotten" in problem


def test_row_is_told_of_when_it_is_forgotten_under_way():
    past = Past()
    assert past.later(0, "UPDATE operations SET state = 'seal'") == []
    (problem,) = past.later(10 * KNOWN_S, "DELETE FROM operations")
    assert "was not over" in problem


def test_operation_is_told_of_when_it_is_forgotten_while_a_hidden_subject_waits():
    past = Past()
    assert past.later(KNOWN_S, "INSERT INTO subjects VALUES (2, 'h', 'orders')") == []
    (problem,) = past.later(KNOWN_S, "DELETE FROM operations")
    assert "is needed" in problem


def test_operation_goes_with_its_subject():
    past = Past()
    assert past.later(0.1, "DELETE FROM operations", "DELETE FROM subjects") == []
    assert not past.watch.left


def test_past_row_is_left_until_it_is_forgotten():
    past = Past()
    assert past.watch.left
    past.later(KNOWN_S, "DELETE FROM operations")
    assert not past.watch.left


# ── repeats of what is over ───────────────────────────────────────────────────────────────────────
class ForgetfulMeta(MetaDouble):
    """A metaserver that knows nothing of what was asked for, and answers after a while."""

    def __init__(self, loop: Any, *, after_s: float, shown: dict[int, PartitionState]) -> None:
        self._loop, self._after_s, self._shown = loop, after_s, shown

    async def publish_subject(self, _hidden: str, _ask: Any) -> Any:
        self._loop.now += self._after_s
        raise SubjectUnknownError(subject="reworked.h1")

    async def delete_subject(self, _name: str, _ask: Any) -> Any:
        self._loop.now += self._after_s
        raise SubjectUnknownError(subject="doomed")

    async def history(self, _subject: str) -> Any:
        known = [SimpleNamespace(partition_id=n, state=state) for n, state in self._shown.items()]
        return SimpleNamespace(partitions=[SimpleNamespace(partition=each) for each in known])


def _feature(kind: Any, after_s: float, shown: dict[int, PartitionState] | None = None) -> Any:
    feature, loop = kind.__new__(kind), SimpleNamespace(now=0.0)
    meta = ForgetfulMeta(loop, after_s=after_s, shown=shown or {})
    faults = SimpleNamespace(done=0)
    feature.world = SimpleNamespace(loop=loop, _operator_meta=meta, faults=faults, history=[])
    feature.problems = []
    return feature


def _publish(kind: Any, after_s: float, shown: dict[int, PartitionState]) -> OperationState:
    feature = _feature(kind, after_s, shown)
    round_ = Round("reworked.h1", partitions=frozenset({4, 5}))
    ask = PublishSubject(target="reworked")
    answer: Publication = asyncio.run(feature._answered(round_, ask, 0.0))
    return answer.state


def test_operator_sees_its_publication_in_the_route_when_it_may_be_forgotten():
    shown = {1: PartitionState.EXPIRED, 4: PartitionState.OPEN, 5: PartitionState.SEALED}
    assert _publish(ForgottenCutOvers, KNOWN_S, shown) is OperationState.DONE


@pytest.mark.parametrize(
    ("kind", "after_s", "shown"),
    [
        (CutOvers, 1e6, {4: PartitionState.OPEN, 5: PartitionState.OPEN}),
        (ForgottenCutOvers, KNOWN_S / 2, {4: PartitionState.OPEN, 5: PartitionState.OPEN}),
        (ForgottenCutOvers, KNOWN_S, {4: PartitionState.OPEN}),
        (ForgottenCutOvers, KNOWN_S, {4: PartitionState.OPEN, 5: PartitionState.PLANNED}),
    ],
    ids=["nothing_is_forgotten", "too_early", "partition_is_lost", "partition_is_not_shown"],
)
def test_lost_publication_is_told_of_when_it_is_not_known(kind, after_s, shown):
    with pytest.raises(SubjectUnknownError):
        _publish(kind, after_s, shown)


def _delete(kind: Any, after_s: float) -> list[str]:
    feature = _feature(kind, after_s)
    feature.lives, feature._subject_id = [SimpleNamespace(ended=0)], 3
    asyncio.run(feature._delete_subject())
    return list(feature.problems)


def test_deletion_is_told_of_when_it_is_forgotten_before_its_time():
    assert _delete(ForgottenDeletions, KNOWN_S) == []
    assert len(_delete(ForgottenDeletions, KNOWN_S / 2)) == 1
    assert len(_delete(Deletions, 1e6)) == 1


def test_number_of_a_message_is_read_from_a_padded_value():
    assert number_of(b"p0.3:7") == number_of(b"p0.3:7.....") == 7
