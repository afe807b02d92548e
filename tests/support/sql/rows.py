"""The metaserver's real tables in memory, with a clock that is moved by hand, for tests of its
SQL.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import sqlalchemy as sa

from keylane.metaserver.cluster.brokers import broker_views, store_report
from keylane.metaserver.cluster.subjects import open_subject, plan_subject
from keylane.metaserver.operations.begin import begin_operations
from keylane.metaserver.operations.journal import claim_operation, finish_round
from keylane.metaserver.sql.migrate import migrate
from keylane.protocol.control import BrokerHeartbeat, CreateSubject
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.testing.machines.database import memory_engine
from sim.machines.clock import ManualClock


class _Made(NamedTuple):
    """The first database of a process; `tables` is one without rows, `compiled` has what all of
    them ask.
    """

    engine: sa.Engine
    compiled: Any
    tables: bytes


@cache
def _made() -> _Made:
    engine, raw = memory_engine(ManualClock())
    with engine.begin() as connection:
        migrate(connection)
    return _Made(engine, engine._compiled_cache, raw.serialize())


class Rows:
    """One database; every `run` is a transaction."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.engine, raw = memory_engine(self.clock)
        made = _made()
        # SQLAlchemy compiles a statement once for each dialect.
        self.engine.dialect, self.engine._compiled_cache = made.engine.dialect, made.compiled
        with self.engine.connect():  # the pool's connection is prepared before it has tables
            pass
        raw.deserialize(made.tables)

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.engine.begin() as connection:
            return work(connection, *args, **kwargs)

    def report(self, *groups: str) -> None:
        """These broker groups are alive for a day."""
        for group in groups:
            body = BrokerHeartbeat(broker_group=group, broker_id=group, address=f"{group}:1")
            self.run(store_report, body, ttl_ms=86_400_000)

    def create(self, name: str, count: int, **settings: Any) -> None:
        ask = CreateSubject(subject=name, partitions=count, **settings)
        self.run(plan_subject, ask, subjects_max=100)
        self.run(open_subject, name)

    def begin(self, ask: Reshape) -> list[tuple[int, Any]]:
        """Begin operations; returns (id of the operation, plan) of each subject."""
        return list(self.run(begin_operations, ask, driver="d", lease_ms=1_000))

    def resize(self, name: str, count: int) -> None:
        """With brokers that answer at once; every parent ends at 100."""
        ask = Reshape(kind=OperationKind.RESIZE, subject=name, partitions=count)
        ((operation_id, _),) = self.begin(ask)
        self.drive(operation_id)

    def drive(self, operation_id: int, *, driver: str = "d") -> OperationState | None:
        """With brokers that answer at once unless they are silent; every parent ends at 100. The
        state in which it waits, None if it is done.
        """
        while True:
            operation = self.run(claim_operation, operation_id, driver=driver, lease_ms=1_000)
            if operation is None:
                return None
            hosts = operation.state in {OperationState.PLAN, OperationState.OPEN}
            end = None if hosts else 100
            done = {
                partition.partition_id: end
                for partition in operation.targets
                if partition.address is not None
            }
            heard = [group_id for group_id, _ in operation.groups]
            state: OperationState = self.run(finish_round, operation_id, done, group_ids=heard)
            if state is operation.state and not done:
                return state

    def silence(self, *groups: str) -> None:
        """All broker groups but these report themselves again, and these are silent from now on."""
        known = [view.broker_group for view in self.run(broker_views)]
        self.clock.advance(86_400_000)
        self.report(*(group for group in known if group not in groups))
