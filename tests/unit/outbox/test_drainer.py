"""What a round costs a process that sends to many subjects."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from keylane.outbox import OutboxSettings
from keylane.outbox import drainer as module
from keylane.outbox.drainer import Drainer
from keylane.outbox.routes import RouteState
from keylane.outbox.tables import OutboxTables
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route, route_table


class CountedName(str):
    """A subject's name that counts how often it is compared with another one."""

    __slots__ = ()
    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


class SilentDatabase:
    """A database that answers nothing: no round is made."""

    async def run(self, *_work: Any, **_more: Any) -> Any:
        await asyncio.Event().wait()


def known_route(subject: str, first_id: int) -> RouteState:
    partitions = tuple(
        Partition(
            partition_id=first_id + number,
            name=f"{subject}.p{number}",
            queue=number,
            range_start=256 * number,
            range_end=256 * number + 256,
            broker_group="g",
            state=PartitionState.OPEN,
        )
        for number in range(4)
    )
    route = Route(
        subject=subject, version=1, order_strategy=OrderStrategy.STRICT, partitions=partitions
    )
    return RouteState(
        route=route,
        open={each.partition_id: each for each in partitions},
        partition_ids=[each.partition_id for each in route_table(route)],
    )


def drainer_alone() -> tuple[Drainer, Any]:
    """A drainer that makes no round, and what it knows of routes."""
    nothing: Any = None
    routes: Any = type("Routes", (), {"states": {}})()
    drainer = Drainer(
        SilentDatabase(),
        OutboxTables(),
        routes,
        owner="o",
        broker_at=nothing,
        settings=OutboxSettings(),
        rng=random.Random(1),
        draw_identity=lambda _bits: 5,
        waiters=nothing,
    )
    return drainer, routes


async def test_round_asks_for_the_senders_of_each_subject_without_a_look_at_all_of_them():
    """With 1,000 subjects of 4 partitions a round kept the event loop of the program for 0.4 s."""
    drainer, routes = drainer_alone()
    for number in range(50):
        name = CountedName(f"s{number}")
        routes.states[name] = known_route(name, 4 * number + 1)
        drainer._apply_route(name, routes.states[name])
    CountedName.compared = 0
    tables = drainer._capacity_tables()
    assert not drainer._size_limits()
    assert {capacity.partition_id for capacity in tables["s7"]} == {29, 30, 31, 32}
    assert CountedName.compared < 4 * 50
    drainer._task.cancel()
    await drainer._close_senders()


async def test_subjects_that_are_forgotten_have_no_batches_and_wait_for_no_route(
    monkeypatch: pytest.MonkeyPatch,
):
    """A sender with batches knows what was sent, and those that wait for a route are told it by
    their name.
    """
    monkeypatch.setattr(module, "CACHED_SUBJECTS_MAX", 1)
    drainer, routes = drainer_alone()
    for number in range(6):
        name = f"s{number}"
        routes.states[name] = known_route(name, 4 * number + 1)
        drainer._apply_route(name, routes.states[name])
    ended = [sender._task for sender in drainer._senders_of("s0")]
    batch: Any = object()
    drainer.senders[6].batches.append(batch)  # of "s1"
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    # it is only looked for
    drainer._routing_tasks["s2"] = drainer._limit_checks["s3"] = waiting  # type: ignore[assignment]
    await drainer._evict_idle_subjects()
    assert routes.states.keys() == {"s1", "s2", "s3"}
    assert drainer._by_subject.keys() == {"s1", "s2", "s3"}
    assert drainer.senders.keys() == set(range(5, 17))
    assert all(task.done() for task in ended)
    for task in (drainer._task, waiting):
        task.cancel()
    drainer.senders[6].batches.clear()
    await drainer._close_senders()
