"""The driver's requests to brokers, and when it changes the route, if brokers reply or refuse."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.operations import driver as driver_module
from keylane.metaserver.operations.driver import ATTEMPTS_MAX, IDS_MAX, OperationDriver
from keylane.metaserver.operations.journal import idle_operations
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import PartitionStatus
from keylane.protocol.errors import InvalidRequestError, PartitionUnknownError
from keylane.protocol.operations import OperationKind, OperationState, Reshape
from keylane.protocol.routing import PartitionState
from support.cluster import eventually
from support.sql.rows import Rows

MOVE = Reshape(kind=OperationKind.MOVE, partition_ids=(1,), broker_group="g2")


class InPlace:
    """The database of `rows`, for services."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    async def write(self, work: Any, *args: Any, **kwargs: Any) -> Any:
        return self._rows.run(work, *args, **kwargs)

    read = write


class BrokerNetwork:
    """Brokers that do what they are asked for, unless the partition has a refusal; `calls` are
    (address, call).
    """

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.unsealable = ""
        self.unknown: set[int] = set()
        self.ended_at_ms = 0

    async def control(
        self, method: str, address: str, path: str, answer: type, *, body: Any = None, **_: Any
    ) -> Any:
        assert answer is PartitionStatus
        if method == "POST" and path == endpoints.HOST_PARTITION.path:
            call, partition_id = "host", body.partition.partition_id
            if body.times_from_ms:
                assert body.groups is None
                call = f"from {body.times_from_ms} host"
        else:
            partition_id = int(path.split("/")[3])
            call = "seal" if path.endswith("/seal") else "look"
        self.steps.append(f"{call} {partition_id} at {address}")
        if partition_id in self.unknown:
            raise PartitionUnknownError(partition_id=partition_id)
        return PartitionStatus(
            partition_id=partition_id,
            subject="s",
            name="s.p0",
            state=PartitionState.OPEN,
            first_offset=0,
            next_offset=100,
            unsealable=self.unsealable,
            ended_at_ms=self.ended_at_ms if call == "seal" else 0,
        )


class Announced:
    """Stands for the catalogue and the groups: notes that a new route was announced."""

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps

    def wake_route_waiters(self, subjects: list[str]) -> None:
        self._steps.append(f"wake {subjects[0]}")

    async def settle(self, group_id: int) -> None:
        self._steps.append(f"settle {group_id}")


class Driven:
    """A driver over a subject `s` with partition 1 at g1 and partition 2 at g2; `steps` has all
    that it does, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(driver_module, "BACKOFF", Backoff(first_ms=1, max_ms=1))
        self.steps: list[str] = []
        self.rows = Rows()
        self.rows.report("g1", "g2")
        self.rows.create("s", 2)
        self.network = BrokerNetwork(self.steps)
        announced: Any = Announced(self.steps)
        self.driver = OperationDriver(
            InPlace(self.rows),  # type: ignore[arg-type]
            self.network,  # type: ignore[arg-type]
            MetaserverSettings(data=Path("unused")),
            catalogue=announced,
            groups=announced,
            driver="here",
            rng=random.Random(1),
            after_step=self.steps.append,
        )

    async def view(self) -> Any:
        return (await self.driver.list_operations("s")).operations[0]

    async def ended(self) -> None:
        await eventually(lambda: not self.driver._tasks)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> Driven:
    return Driven(monkeypatch)


async def test_route_changes_after_the_child_is_hosted_and_the_parent_sealed(driven: Driven):
    """The parent's broker is asked whether it can seal before any parent is sealed; the new route
    is told last.
    """
    await driven.driver.begin(MOVE)
    await driven.ended()
    assert driven.steps == [
        "planned",
        "host 3 at g2:1",
        "look 1 at g1:1",
        "hosted",
        "seal 1 at g1:1",
        "sealing",
        "opened",
        "wake s",
    ]
    assert (await driven.view()).state is OperationState.DONE


async def test_broker_of_the_child_is_told_when_the_parent_ended_before_the_route_changes(
    driven: Driven,
):
    driven.network.ended_at_ms = 7
    await driven.driver.begin(MOVE)
    await driven.ended()
    assert driven.steps[4:] == [
        "seal 1 at g1:1",
        "from 7 host 3 at g2:1",
        "sealing",
        "opened",
        "wake s",
    ]


async def test_brokers_of_a_canceled_operation_are_told_no_times(driven: Driven):
    driven.network.ended_at_ms = 7
    driven.network.unsealable = "its disk is full"
    begun = await driven.driver.begin(MOVE)
    await driven.ended()
    await driven.driver.cancel(begun.operations[0].operation_id)
    await driven.ended()
    assert "seal 3 at g2:1" in driven.steps
    assert not [step for step in driven.steps if step.startswith("from")]


async def test_no_parent_is_sealed_while_its_broker_cannot_seal(driven: Driven):
    """The driver asks again, then lets the operation go with the broker's reason, for others to be
    driven.
    """
    driven.network.unsealable = "its disk is full"
    await driven.driver.begin(MOVE)
    await driven.ended()
    assert not [step for step in driven.steps if step.startswith("seal ")]
    assert driven.steps.count("look 1 at g1:1") == ATTEMPTS_MAX
    view = await driven.view()
    assert view.state is OperationState.PLAN
    assert "its disk is full" in view.problem
    assert driven.rows.run(idle_operations) == []
    driven.rows.clock.advance(driver_module.PAUSE_MS)
    driven.network.unsealable = ""
    await driven.driver.resume()
    await driven.ended()
    assert (await driven.view()).state is OperationState.DONE


async def test_operation_that_waits_is_listed_with_since_when_until_it_goes_on(driven: Driven):
    driven.network.unsealable = "its disk is full"
    await driven.driver.begin(MOVE)
    await driven.ended()
    [first] = (await driven.driver.list_waiting()).operations
    assert "its disk is full" in first.problem
    assert first.waiting_since_ms is not None
    driven.rows.clock.advance(driver_module.PAUSE_MS)
    await driven.driver.resume()
    await driven.ended()
    [again] = (await driven.driver.list_waiting()).operations
    assert again.waiting_since_ms == first.waiting_since_ms, "since it began to wait"
    driven.rows.clock.advance(driver_module.PAUSE_MS)
    driven.network.unsealable = ""
    await driven.driver.resume()
    await driven.ended()
    assert (await driven.driver.list_waiting()).operations == []
    assert (await driven.view()).waiting_since_ms is None


async def test_silent_broker_is_not_asked_until_it_reports_itself(driven: Driven):
    """No task waits for it meanwhile."""
    driven.rows.silence("g2")
    with pytest.raises(Exception, match="g2"):
        await driven.driver.begin(MOVE)
    assert driven.steps == []
    driven.rows.report("g2")
    ((operation_id, _),) = driven.rows.begin(MOVE)
    driven.rows.silence("g2")
    await driven.driver.resume()
    await driven.ended()
    assert driven.steps == []
    driven.rows.report("g2")
    assert driven.rows.run(idle_operations) == [operation_id]
    await driven.driver.resume()
    await driven.ended()
    assert (await driven.view()).state is OperationState.DONE


async def test_canceled_child_counts_as_ended_when_its_broker_does_not_know_it(driven: Driven):
    """It was never hosted; nothing of it is left to be sealed."""
    ((operation_id, _),) = driven.rows.begin(MOVE)
    driven.rows.clock.advance(1_000)
    driven.network.unknown = {3}
    assert (await driven.driver.cancel(operation_id)).state is OperationState.CANCELED
    await driven.ended()
    assert driven.steps[0] == "seal 3 at g2:1"
    assert all(step.done for step in (await driven.view()).steps)


async def test_dry_run_journals_nothing_and_asks_no_broker(driven: Driven):
    planned = await driven.driver.begin(Reshape(**{**_fields(MOVE), "dry_run": True}))
    assert len(planned.operations) == 1
    assert driven.steps == []
    assert (await driven.driver.list_operations("s")).operations == []


async def test_request_of_too_many_partitions_is_refused(driven: Driven):
    ask = Reshape(kind=OperationKind.MERGE, partition_ids=tuple(range(IDS_MAX + 1)))
    with pytest.raises(InvalidRequestError, match="at most"):
        await driven.driver.begin(ask)


def _fields(ask: Reshape) -> dict[str, Any]:
    return {name: getattr(ask, name) for name in ask.__struct_fields__}
