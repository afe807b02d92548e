"""What a balance reads of the database, and which metaserver begins a move by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from keylane.metaserver.cluster.brokers import cordon_broker, find_broker
from keylane.metaserver.cluster.copy_sets import change_copy_set, read_copy_set, set_copies
from keylane.metaserver.cluster.subjects import open_subject
from keylane.metaserver.operations.balancing import Balancer, read_balance_inputs
from keylane.metaserver.publications.hiding import plan_hidden
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol.control import Health
from keylane.protocol.copies import ChangeCopySet, HandOver, SetCopies
from keylane.protocol.endpoints import HEALTH
from keylane.protocol.errors import ConflictError, KeylaneError, NotSentError, Reason
from keylane.protocol.operations import HideSubject, OperationKind, Reshape, SetBalance
from support.raising import raises
from support.sql.rows import Rows

COPY = "c" * 32


class AsyncRows(Rows):
    async def write(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.run(work, *args, **kwargs)

    read = renew = write


class UnansweringBrokers:
    """Brokers that do not answer."""

    async def control(self, _method: str, address: str, *_rest: Any, **_fields: Any) -> None:
        raise NotSentError(f"{address} does not answer")


class PlacedBrokers:
    """Brokers of g1 and g2, both on a host a, each with a copy of its set on b."""

    async def control(
        self, _method: str, _address: str, path: str, *_rest: Any, **_more: Any
    ) -> Any:
        if path != HEALTH.path:
            raise NotSentError("it does not answer")
        copies = {COPY: {"in_set": True, "machine": "b", "bytes_behind": 0}}
        details = {"machine": "a", "copies": copies}
        return Health(program="broker", ready=True, reason="", details=details)


class Begun:
    """Stands for the driver of operations: journals those that begin."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.ids: list[int] = []

    async def begin(self, request: Reshape) -> None:
        self.ids += [operation_id for operation_id, _ in self._rows.begin(request)]


class Balancing:
    """A subject with four partitions on g1, which g2 has joined."""

    def __init__(self) -> None:
        self.rows = AsyncRows()
        self.rows.report("g1")
        self.rows.create("s", 4)
        self.rows.report("g2")
        self.begun = Begun(self.rows)
        self.network: Any = UnansweringBrokers()
        self.handed_over: list[tuple[str, str]] = []
        self.refusal: KeylaneError | None = None

    def metaserver(self, holder: str, *, balance: bool = True) -> Balancer:
        settings = MetaserverSettings(
            data=Path("unused"), balance=balance, balance_interval_ms=1_000
        )
        return Balancer(
            self.rows,  # type: ignore[arg-type]
            self.network,
            settings,
            self.begun,  # type: ignore[arg-type]
            holder=holder,
            wait_until_settled=AsyncMock(),
            hand_over=self.hand_over,
        )

    async def hand_over(self, broker_group: str, request: HandOver) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.handed_over.append((broker_group, request.copy_id))


@pytest.fixture
def balancing() -> Balancing:
    return Balancing()


def read(balancing: Balancing, *excluded: str) -> Any:
    return balancing.rows.run(read_balance_inputs, excluded)


def test_inputs_name_what_is_left_out_when_it_cannot_move(balancing: Balancing):
    rows = balancing.rows
    rows.report("g3", "g4", "g5")
    rows.create("busy", 2)
    rows.run(plan_hidden, "s", HideSubject(hidden="job"), subjects_max=100)
    rows.run(open_subject, "job")
    ((operation_id, _),) = rows.begin(
        Reshape(kind=OperationKind.RESIZE, subject="busy", partitions=4)
    )
    rows.run(cordon_broker, "g3", True)
    rows.silence("g4")
    inputs = read(balancing, "g5")
    assert set(inputs.addresses) == {"g1", "g2"}
    assert {each.subject for each in inputs.movable} == {"s"}
    assert [(each.name, each.reason.split(" for ")[0]) for each in inputs.left_out_groups] == [
        ("g3", "it is cordoned"),
        ("g4", "it is silent"),
        ("g5", "it is excluded"),
    ]
    left_out = {each.name: each.reason for each in inputs.left_out_subjects}
    assert left_out == {
        "busy": f"operation {operation_id} on it is running",
        "job": "it is hidden until it is published in s",
    }


def test_inputs_are_refused_when_an_excluded_broker_group_is_unknown(balancing: Balancing):
    with raises(Reason.BROKER_GROUP_UNKNOWN):
        read(balancing, "nowhere")


async def test_plan_counts_unknown_rates_as_zero_when_brokers_do_not_answer(balancing: Balancing):
    plan = await balancing.metaserver("m").plan()
    assert plan.unknown_rates == ("g1", "g2")
    assert [(move.source, move.target) for move in plan.moves] == [("g1", "g2")] * 2


async def test_metaserver_begins_one_move_at_a_time_when_another_wants_to(balancing: Balancing):
    first, second = balancing.metaserver("first"), balancing.metaserver("second")
    assert await first.run_once() is not None
    assert await first.run_once() is None  # the move is running
    assert await second.run_once() is None
    balancing.rows.drive(balancing.begun.ids[0])
    assert await second.run_once() is None  # the first one has the duty
    assert await first.run_once() is not None
    balancing.rows.drive(balancing.begun.ids[1])
    assert await first.run_once() is None  # balanced
    assert len(balancing.begun.ids) == 2


async def test_other_metaserver_goes_on_when_the_first_is_gone(balancing: Balancing):
    assert await balancing.metaserver("first").run_once() is not None
    balancing.rows.drive(balancing.begun.ids[0])
    balancing.rows.clock.advance(60_000)
    assert await balancing.metaserver("second").run_once() is not None


async def test_metaserver_moves_nothing_when_balancing_is_stopped_or_switched_off(
    balancing: Balancing,
):
    balancer = balancing.metaserver("m")
    assert (await balancer.change(SetBalance(stopped=True))).stopped
    assert (await balancer.change(SetBalance(stopped=True))).stopped
    assert await balancer.run_once() is None
    assert not (await balancer.change(SetBalance(stopped=False))).stopped
    off = MetaserverSettings(data=Path("unused"))
    balancer.apply_settings(off)
    assert await balancer.run_once() is None
    assert not (await balancer.plan()).automatic
    assert await balancing.metaserver("m").run_once() is not None


@pytest.fixture
def copied(balancing: Balancing) -> Balancing:
    """Both broker groups are to have two data folders, and g1's copy is in its set."""
    balancing.network = PlacedBrokers()
    for group in ("g1", "g2"):
        balancing.rows.run(set_copies, group, SetCopies(wanted=2))
    fill_set(balancing, "g1")
    return balancing


def fill_set(balancing: Balancing, group: str) -> None:
    rows = balancing.rows
    broker = rows.run(find_broker, group)
    stored = rows.run(read_copy_set, group)
    rows.run(
        change_copy_set,
        group,
        ChangeCopySet(
            broker_id=broker.broker_id,
            opening=broker.opening,
            term=stored.term,
            version=stored.version,
            members=(COPY,),
        ),
    )


async def test_metaserver_hands_over_once_no_set_lacks_a_copy(copied: Balancing):
    balancer = copied.metaserver("m")
    assert (await balancer.plan()).hand_overs == (), "g2 lacks a copy"
    fill_set(copied, "g2")
    assert len((await balancer.plan()).hand_overs) == 1
    await balancer.change(SetBalance(stopped=True))
    assert await balancer.run_once() is None
    await balancer.change(SetBalance(stopped=False))
    assert (await balancer.run_once()).target == "b"
    assert copied.handed_over == [("g1", COPY)]
    assert not copied.begun.ids, "the moves come afterwards"


async def test_metaserver_moves_partitions_when_a_hand_over_is_refused(copied: Balancing):
    fill_set(copied, "g2")
    copied.refusal = ConflictError(Reason.COPY_NOT_READY, "it runs without failover")
    assert (await copied.metaserver("m").run_once()).target == "g2"
    assert len(copied.begun.ids) == 1
