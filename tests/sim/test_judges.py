"""The simulation's own facts: which brokers say that a partition is sealed, which processes hear a
signal, what order is.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from keylane.broker.store.store import Store
from keylane.testing.machines.disk import SimDisk
from keylane.testing.machines.loop import Process
from keylane.testing.machines.machine import SimStopSignals, send_stop
from sim.actors.onlooker import ancestors_of, disorder_of
from sim.machines.clock import ManualClock
from sim.machines.promises import is_sealed
from sim.machines.store import Desk, open_store
from sim.times import early


@dataclass
class ShownBroker:
    """A broker as its host shows it."""

    store: Store | None
    running: bool = True
    copied: bool = False


async def test_seal_is_not_asked_of_an_older_copy():
    """An older copy of a data folder may lack the seal; it is not served, so it does not count."""
    store = open_store(SimDisk())
    await Desk(store, ManualClock()).host()
    assert is_sealed([ShownBroker(store)], 1) is False
    assert is_sealed([ShownBroker(store, copied=True)], 1) is None
    assert is_sealed([ShownBroker(store, running=False)], 1) is None
    assert is_sealed([ShownBroker(None)], 1) is None
    _, durable = store.seal(1)
    await durable
    assert is_sealed([ShownBroker(None), ShownBroker(store)], 1) is True
    await store.close()


def test_signal_says_whether_the_process_listens():
    """A signal would end a process that does not listen, so its sender has to know."""
    process = Process("c0")
    assert not send_stop(process)

    def listen() -> bool:
        with SimStopSignals() as stop:
            assert send_stop(process)
            return stop.event.is_set()

    assert process.context.run(listen)
    assert not send_stop(process)


def message_at(partition_id: int, offset: int, key: bytes = b"k") -> Any:
    return SimpleNamespace(partition_id=partition_id, offset=offset, key=key)


def past(partition_id: int, *parents: int) -> Any:
    return SimpleNamespace(partition=SimpleNamespace(partition_id=partition_id, parents=parents))


def test_order_of_readers_is_that_of_the_lineage_also_past_partitions_without_messages():
    ancestors = ancestors_of([past(1), past(2, 1), past(3, 2), past(4)])
    assert ancestors[3] == {1, 2}
    first, second, third = message_at(1, 0), message_at(1, 1), message_at(3, 0)
    assert disorder_of([first, second, third], ancestors) == []
    assert (
        disorder_of([first, message_at(4, 0), message_at(3, 0, b"other"), second], ancestors) == []
    )
    for disordered in ([first, third, second], [second, first, third], [first, first]):
        assert len(disorder_of(disordered, ancestors)) == 1, disordered


def test_partition_behind_a_cut_may_begin_before_the_rows_end_that_lie_before_it():
    """1 was sealed by a cut, 2 has the rows, 3 goes on behind both, and 4 behind 3: only rows come
    later than what follows.
    """
    parents = {1: (), 2: (1,), 3: (1, 2), 4: (3,)}
    assert early({3: 20, 4: 30}, {1: 20, 2: 40, 3: 30}, parents) == []
    assert early({3: 20, 4: 30}, {1: 21, 2: 40, 3: 30}, parents) == [
        "partition 3 begins at 20, before 21, where its parent 1 ends"
    ]
    assert early({3: 20, 4: 30}, {1: 20, 2: 40, 3: 31}, parents) == [
        "partition 4 begins at 30, before 31, where its parent 3 ends"
    ]
    assert len(early({2: 10}, {1: 11}, parents)) == 1
