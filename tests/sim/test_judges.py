"""The simulation's own facts: which brokers say that a partition is sealed, and which processes hear a signal."""

from dataclasses import dataclass

from keylane.broker.store.store import Store
from keylane.testing.machines.disk import SimDisk
from keylane.testing.machines.loop import Process
from keylane.testing.machines.signals import SimStopSignals, send_stop
from sim.machines.clock import ManualClock
from sim.machines.promises import is_sealed
from sim.machines.store import Desk, open_store


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
