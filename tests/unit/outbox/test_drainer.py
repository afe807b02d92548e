"""What a round costs a process that sends to many subjects."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from keylane.outbox import OutboxSettings
from keylane.outbox.drainer import Drainer
from keylane.outbox.routes import KnownRoute
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


def known_route(subject: str, first_id: int) -> KnownRoute:
    partitions = tuple(
        Partition(
            partition_id=first_id + number, name=f"{subject}.p{number}", queue=number,
            range_start=256 * number, range_end=256 * number + 256, broker_group="g",
            state=PartitionState.OPEN,
        )
        for number in range(4)
    )  # fmt: skip
    route = Route(
        subject=subject, version=1, order_strategy=OrderStrategy.STRICT, partitions=partitions
    )
    return KnownRoute(
        route=route,
        open={each.partition_id: each for each in partitions},
        partition_ids=[each.partition_id for each in route_table(route)],
    )


async def test_round_asks_for_the_senders_of_each_subject_without_a_look_at_all_of_them():
    """With 1,000 subjects of 4 partitions a round kept the event loop of the program for 0.4 s."""
    nothing: Any = None
    routes: Any = type("Routes", (), {"known": {}})()
    drainer = Drainer(
        SilentDatabase(), OutboxTables(), routes, owner="o", broker_at=nothing,
        settings=OutboxSettings(), rng=random.Random(1), draw_identity=lambda _bits: 5, waiters=nothing,
    )  # fmt: skip
    for number in range(50):
        name = CountedName(f"s{number}")
        routes.known[name] = known_route(name, 4 * number + 1)
        drainer._lead(name, routes.known[name])
    CountedName.compared = 0
    tables = drainer._capacity_tables()
    assert not drainer._limits()
    assert {capacity.partition_id for capacity in tables["s7"]} == {29, 30, 31, 32}
    assert CountedName.compared < 4 * 50
    drainer._task.cancel()
    await drainer._close_senders()
