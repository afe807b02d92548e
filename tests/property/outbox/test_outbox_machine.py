"""Rows of an outbox in real SQL, and its deciders, against a model: programs that die, are frozen,
and meet each other.

The senders of a program are modelled after `outbox/partition_sender.py` and `outbox/drainer.py`;
rounds, leases, rows, assignment and steps are the outbox's own, and partitions decide on appends as
brokers do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import event
from sqlalchemy.pool import StaticPool

from keylane.broker.partition.appends import ProducerState, after_append, decide_append
from keylane.outbox.assignment import Capacity, CapacityTable, SubjectKey, capacity_table
from keylane.outbox.batches import OutboxBatch, SendSession, SendStep, decide_send_step
from keylane.outbox.lease import TokenChangedError
from keylane.outbox.round import RoundInput, RoundOutcome, SettledBatches, run_round
from keylane.outbox.rows import insert_statement
from keylane.outbox.settings import OutboxSettings
from keylane.outbox.tables import FAILED, HALTED, OutboxTables
from keylane.outbox.upkeep import (
    SETTLED,
    change_rows,
    delete_rows,
    read_gauges,
    read_status,
    requeue_rows,
)
from keylane.protocol.batch import batch_starts, columns
from keylane.protocol.errors import (
    Fate,
    KeylaneError,
    NotSentError,
    OutcomeUnknownError,
    SequenceReusedError,
    StaleRouteError,
)
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.routing import logical_partition
from support.running.examples import examples

TABLES = OutboxTables()
SETTINGS = OutboxSettings(batch_count=2, in_flight_max=2, read_rows=5, lease_ms=1_000)
KEYS = [b"a", b"b", b"c"]
PROGRAMS = 2
ROUNDS_MAX = 300
"""In the end, until all is sent."""
FROZEN_S = SETTINGS.lease_ms / 1000 + 0.1

Journey = st.sampled_from(["ok", "ok", "answer lost", "delayed", "never sent"])
"""What becomes of a batch on its way."""


class KilledError(Exception):
    """The program dies before its commit."""


class Place:
    """A partition at its broker."""

    def __init__(self, number: int, start: int, end: int) -> None:
        self.number, self.start, self.end = number, start, end
        self.sealed = self.lost = False
        self.log: list[tuple[bytes, int]] = []
        """Key and number of each message."""
        self._producers: dict[int, ProducerState] = {}
        self._clashed: set[int] = set()

    def append(self, data: bytes) -> None:
        """Store a batch, or recognize it."""
        if self.lost:
            raise NotSentError
        ((start, header),) = batch_starts(data)
        known = self._producers.get(header.producer_id)
        try:
            clashed = header.producer_id in self._clashed
            if decide_append(known, header, is_clashed=clashed) is not None:
                return
        except SequenceReusedError:
            self._clashed.add(header.producer_id)
            raise
        if self.sealed:
            raise StaleRouteError
        cut = columns(data, header, start)
        keys, values = (
            [bytes(cut.blob[low:high]) for low, high in pairwise(edges)]
            for edges in (cut.key_edges, cut.value_edges)
        )
        stored = after_append(known, header, base_offset=len(self.log))
        self._producers[header.producer_id] = stored
        self.log += [(key, int(value)) for key, value in zip(keys, values, strict=True)]


@dataclass
class Lane:
    """What a program sends to one partition."""

    place: Place
    session: SendSession
    next_sequence: int = 0
    listed: bool = False
    sealed: bool = False
    gone: bool = False
    batches: list[OutboxBatch] = field(default_factory=list)

    def capacity(self) -> Capacity | None:
        count = SETTINGS.in_flight_max - len(self.batches)
        doubtful = any(batch.doubtful for batch in self.batches)
        if not self.listed or self.sealed or doubtful or count <= 0:
            return None
        return Capacity(self.place.number, self.session, self.next_sequence, count)


class SendingProgram:
    """A process with an opened outbox, as far as it decides."""

    _numbers = itertools.count(1)

    def __init__(self, places: dict[int, Place]) -> None:
        self._places = places
        self.owner = f"program {next(self._numbers)}"
        self.followed: list[Place] | None = None
        """The open partitions of the route that it knows."""
        self.forget()

    def forget(self) -> None:
        self.token: int | None = None
        self.lanes: dict[int, Lane] = {}
        self.settled = SettledBatches()
        self.halted_keys: set[SubjectKey] = set()
        self._producer_id = next(self._numbers)
        self._epochs = itertools.count()
        if self.followed is not None:
            self.learn(self.followed)

    def _session(self) -> SendSession:
        return SendSession(self._producer_id, next(self._epochs))

    def lane(self, number: int) -> Lane:
        if number not in self.lanes:
            self.lanes[number] = Lane(self._places[number], self._session())
        return self.lanes[number]

    def learn(self, still_open: Sequence[Place]) -> None:
        self.followed = list(still_open)
        listed = {place.number for place in still_open}
        for number in listed:
            self.lane(number)
        for number, lane in list(self.lanes.items()):
            lane.listed = number in listed
            lane.gone = lane.place.lost
            if not (lane.listed or lane.batches):
                del self.lanes[number]

    def tables(self) -> dict[str, CapacityTable]:
        if self.followed is None:
            return {}
        numbers = [0] * LOGICAL_PARTITIONS
        for place in self.followed:
            numbers[place.start : place.end] = [place.number] * (place.end - place.start)
        lanes = self.lanes.values()
        capacities = {each.place.number: each.capacity() for each in lanes}
        blocked = [
            (each.place.start, each.place.end) for each in lanes if each.batches and not each.listed
        ]
        known = {number: capacity for number, capacity in capacities.items() if capacity}
        return {"s": capacity_table(numbers, known, blocked)}

    def order(self) -> RoundInput:
        settled, self.settled = self.settled, SettledBatches()
        return RoundInput(
            owner=self.owner,
            token=self.token,
            settled=settled,
            sending=any(lane.batches for lane in self.lanes.values()),
            tables=self.tables(),
            halted_keys=self.halted_keys,
            limits={},
        )

    def apply(self, outcome: RoundOutcome) -> None:
        self.token = outcome.token
        self.halted_keys = outcome.halted_keys
        for batch in outcome.recorded:
            lane = self.lane(batch.partition_id)
            if not outcome.inherited:
                assert (batch.session, batch.sequence) == (lane.session, lane.next_sequence)
                lane.next_sequence += len(batch.rows)
            lane.batches.append(batch)

    def after_failure(self, lane: Lane, error: KeylaneError) -> None:
        if not lane.batches:
            return
        lane.sealed = lane.sealed or isinstance(error, StaleRouteError)
        left = not lane.listed or lane.sealed
        doubtful = lane.batches[0].doubtful
        step = decide_send_step(error, doubtful=doubtful, closed=left, gone=lane.gone)
        if step is SendStep.RETRY:
            return
        failed = [batch for batch in lane.batches if batch.doubtful and step is SendStep.GIVE_UP]
        assert lane.gone or not failed, "its broker can tell"
        self.settled.returned += [batch for batch in lane.batches if batch not in failed]
        self.settled.failed |= dict.fromkeys(failed, error.message)
        lane.batches = []
        lane.session, lane.next_sequence = self._session(), 0


class OutboxMachine(RuleBasedStateMachine):
    """What is committed is stored once, in the order of its key, whatever programs do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.engine = sa.create_engine("sqlite://", poolclass=StaticPool)

        @event.listens_for(self.engine, "connect")
        def connect(raw: Any, _record: Any) -> None:
            raw.create_function("julianday", 1, lambda _now: 2_451_545.0 + self.now_s / 86_400)

        self.transact(TABLES.create)
        self.numbers = itertools.count(1)
        self.places = {1: Place(1, 0, 512), 2: Place(2, 512, LOGICAL_PARTITIONS)}
        self.programs = [SendingProgram(self.places) for _ in range(PROGRAMS)]
        self.delayed: list[tuple[Place, bytes]] = []
        self.committed: set[int] = set()
        self.redriven: Counter[int] = Counter()
        self.given_up: set[int] = set()
        """Purged, or stored in a partition that was lost later."""

    def transact(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.engine.begin() as connection:
            return work(connection, *args, **kwargs)

    def still_open(self) -> list[Place]:
        return [place for place in self.places.values() if not (place.sealed or place.lost)]

    def rows(self) -> list[Any]:
        ask = sa.select(TABLES.rows).order_by(TABLES.rows.c.id)
        return list(self.transact(lambda connection: connection.execute(ask).all()))

    # ── users ─────────────────────────────────────────────────────────────────────────────────────
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5), commit=st.booleans())
    def add(self, keys: list[bytes], commit: bool) -> None:
        numbers = [next(self.numbers) for _ in keys]
        added = [
            {
                "subject": "s",
                "logical": logical_partition(key),
                "order_key": key,
                "value": b"%d" % number,
                "properties": b"",
                "added_at_ns": 0,
            }
            for key, number in zip(keys, numbers, strict=True)
        ]
        with self.engine.connect() as connection:
            connection.execute(insert_statement(TABLES), added)
            if commit:
                connection.commit()
                self.committed.update(numbers)

    # ── programs ──────────────────────────────────────────────────────────────────────────────────
    @rule(
        number=st.integers(0, PROGRAMS - 1),
        end=st.sampled_from(["", "", "", "dies before the commit", "commit not answered"]),
    )
    def work(self, number: int, end: str) -> None:
        """A round; one under a token that has passed does nothing."""
        program = self.programs[number]
        outdated = program.token not in {None, self.transact(read_status, TABLES, now_ns=0).token}

        def transaction(connection: sa.Connection) -> RoundOutcome:
            outcome = run_round(connection, TABLES, SETTINGS, program.order())
            if end == "dies before the commit":
                raise KilledError  # an outdated one has raised before
            return outcome

        try:
            outcome = self.transact(transaction)
        except TokenChangedError:
            assert outdated
            program.forget()
            return
        except KilledError:
            self.programs[number] = SendingProgram(self.places)
            return
        assert not outdated
        if end:
            program.forget()
        else:
            program.apply(outcome)
            if outcome.unknown:
                program.learn(self.still_open())

    @rule(number=st.integers(0, PROGRAMS - 1), journeys=st.lists(Journey, min_size=1, max_size=3))
    def send(self, number: int, journeys: list[str]) -> None:
        """The oldest batches of each partition are sent; then the route is asked for if one
        failed.
        """
        program = self.programs[number]
        for lane in list(program.lanes.values()):
            errors = []
            for batch, journey in list(zip(lane.batches, journeys, strict=False)):
                error = self.travel(lane.place, batch, journey)
                if error is None:
                    lane.batches.remove(batch)
                    program.settled.stored.append(batch)
                else:
                    batch.doubtful = batch.doubtful or error.fate is Fate.UNKNOWN
                    errors.append(error)
            if errors:
                program.learn(self.still_open())
                program.after_failure(lane, errors[0])

    def travel(self, place: Place, batch: OutboxBatch, journey: str) -> KeylaneError | None:
        if journey == "never sent":
            return NotSentError()
        if journey == "delayed":
            self.delayed.append((place, batch.encode()))
            return OutcomeUnknownError()
        try:
            place.append(batch.encode())
        except KeylaneError as error:
            return OutcomeUnknownError() if journey == "answer lost" else error
        return OutcomeUnknownError() if journey == "answer lost" else None

    @precondition(lambda self: self.delayed)
    @rule(choice=st.integers(0, 99))
    def arrive_late(self, choice: int) -> None:
        """A batch whose sender has given the call up."""
        place, data = self.delayed.pop(choice % len(self.delayed))
        try:
            place.append(data)
        except KeylaneError:
            pass

    @rule(number=st.integers(0, PROGRAMS - 1), journeys=st.lists(Journey, min_size=1, max_size=3))
    def go_on(self, number: int, journeys: list[str]) -> None:
        """What one program does when nothing interrupts it: it records, sends, and notes what is
        stored.
        """
        self.work(number, "")
        self.work(number, "")
        self.send(number, journeys)
        self.work(number, "")

    @rule(number=st.integers(0, PROGRAMS - 1), journeys=st.lists(Journey, min_size=1, max_size=3))
    def take_over(self, number: int, journeys: list[str]) -> None:
        """All programs stand still until the lease is over; this one wakes first."""
        self.freeze()
        self.go_on(number, journeys)

    def freeze(self) -> None:
        self.now_s += FROZEN_S

    @rule(number=st.integers(0, PROGRAMS - 1))
    def die(self, number: int) -> None:
        self.programs[number] = SendingProgram(self.places)

    # ── operators ─────────────────────────────────────────────────────────────────────────────────
    @rule(choice=st.integers(0, 99), split=st.booleans())
    def reshape(self, choice: int, split: bool) -> None:
        """Seal a partition, and open one or two in its place."""
        left = self.still_open()
        place = left[choice % len(left)]
        place.sealed = True
        self.continue_with(place, split=split)

    @precondition(lambda self: len(self.places) < 12)
    @rule(choice=st.integers(0, 9))
    def lose(self, choice: int) -> None:
        """The disk of a partition is lost, and that is accepted."""
        left = self.still_open()
        if choice >= len(left):
            return  # it is rare
        place = left[choice]
        place.lost = True
        self.given_up.update(number for _, number in place.log)
        place.log.clear()
        self.continue_with(place, split=False)

    def continue_with(self, place: Place, *, split: bool) -> None:
        middle = (place.start + place.end) // 2
        edges = (
            [place.start, middle, place.end]
            if split and middle > place.start
            else [place.start, place.end]
        )
        for start, end in pairwise(edges):
            number = len(self.places) + 1
            self.places[number] = Place(number, start, end)

    @rule(delete=st.booleans())
    def decide_on_failed_rows(self, delete: bool) -> None:
        self.check_views()
        failed = [int(row.value) for row in self.rows() if row.batch_id == FAILED]
        change = delete_rows if delete else requeue_rows
        assert self.transact(change_rows, TABLES, change, SETTLED).failed == len(failed)
        if delete:
            self.given_up.update(failed)
        else:
            self.redriven.update(failed)
        assert not any(row.batch_id in {FAILED, HALTED} for row in self.rows())

    # ── what holds ────────────────────────────────────────────────────────────────────────────────
    @invariant()
    def stored_messages_are_committed_once_and_in_order(self) -> None:
        for key in KEYS:
            stored = [
                number
                for place in self.places.values()
                for each, number in place.log
                if each == key
            ]
            assert set(stored) <= self.committed
            told_once = [number for number in stored if not self.redriven[number]]
            assert told_once == sorted(set(told_once))
            assert all(times <= 1 + self.redriven[each] for each, times in Counter(stored).items())

    @invariant()
    def rows_of_a_key_are_recorded_in_their_order(self) -> None:
        behind: set[bytes] = set()
        for row in self.rows():
            if row.batch_id <= 0:
                behind.add(row.order_key)
            else:
                assert row.order_key not in behind

    def check_views(self) -> None:
        rows = self.rows()
        gauges = self.transact(read_gauges, TABLES, now_ns=7_000_000)
        status = self.transact(read_status, TABLES, now_ns=7_000_000)
        failed = sum(row.batch_id == FAILED for row in rows)
        assert (gauges.rows, gauges.failed, gauges.counted) == (len(rows), failed, True)
        assert gauges.oldest_age_ms == (7 if rows else 0)
        assert (status.rows, status.failed) == (gauges.rows, gauges.failed)

    def teardown(self) -> None:
        """One program is left, nothing hinders it, and the operator sends failed rows again."""
        self.freeze()
        self.programs[0] = SendingProgram(self.places)
        for _ in range(ROUNDS_MAX):
            if not (left := self.rows()):
                break
            if all(row.batch_id in {FAILED, HALTED} for row in left):
                self.decide_on_failed_rows(delete=False)
            self.work(0, "")
            self.send(0, ["ok"] * SETTINGS.in_flight_max)
        assert not self.rows()
        while self.delayed:
            self.arrive_late(0)
        self.stored_messages_are_committed_once_and_in_order()
        stored = {number for place in self.places.values() for _, number in place.log}
        assert self.committed - self.given_up <= stored
        self.engine.dispose()


OutboxMachine.TestCase.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None
)
TestOutboxMachine = OutboxMachine.TestCase
