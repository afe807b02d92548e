"""What a broker that was restarted answers before the copies that acks wait for have its log."""

from __future__ import annotations

import asyncio
import random

import pytest

from keylane.broker import registration as registrations
from keylane.broker.control import BrokerControl
from keylane.broker.copies.commitment import Commitment
from keylane.broker.parking import Parking
from keylane.broker.registration import Registration
from keylane.broker.service import BrokerService
from keylane.protocol.control import BrokerHeartbeat
from keylane.protocol.errors import OverloadedError, WrongBrokerError
from keylane.protocol.frames import Read
from keylane.protocol.reading.bounds import AskBounds
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store


class Restarted:
    """A broker with one partition, whose copies have not answered yet."""

    def __init__(self, disk: SimDisk) -> None:
        self.clock = ManualClock()
        self.desk = Desk(open_store(disk, clock=self.clock), self.clock)
        self.registration = Registration(
            None,  # type: ignore[arg-type]  # it reports nothing here
            lambda: BrokerHeartbeat(broker_group="g1", broker_id="b1", address="h:1"),
            rng=random.Random(1),
            clock=self.clock,
            awaits_copies=True,
        )
        self.service = BrokerService(
            self.desk.store, clock=self.clock, folder_ownership=self.registration
        )
        self.control = BrokerControl(
            self.desk.store,
            broker_group="g1",
            broker_id="b1",
            clock=self.clock,
            registration=lambda: "",
            folder_ownership=self.registration,
        )
        self.parking = Parking(
            self.desk.store,
            self.desk.service,
            clock=self.clock,
            folder_ownership=self.registration,
        )

    def ask(self, call: str) -> asyncio.Task[object]:
        place = {"id": "1"}
        calls = {
            "list": lambda: self.control.list(None, {}),
            "describe": lambda: self.control.describe(None, place),
            "offset": lambda: self.control.find_offset(None, place | {"at_ms": "1"}),
            "bounds": lambda: self.control.bounds(AskBounds(partitions=[]), {}),
            "parked": lambda: self.parking.list_keys(None, place | {"group": "g"}),
            "read": lambda: self.service.handle(Read(1, 0, 100), memoryview(b"")),
        }
        return asyncio.ensure_future(calls[call]())


@pytest.fixture
async def restarted() -> Restarted:
    restarted = Restarted(SimDisk())
    await restarted.desk.host()
    return restarted


OPERATORS_CALLS = ["list", "describe", "parked"]
CLIENTS_CALLS = ["offset", "bounds", "read"]
CALLS = OPERATORS_CALLS + CLIENTS_CALLS


@pytest.mark.parametrize("call", CALLS)
async def test_broker_says_nothing_of_its_log_until_copies_have_it(restarted: Restarted, call: str):
    """The end of the log may be lost with its disk: a seal or an offset was never so."""
    asking = restarted.ask(call)
    await asyncio.sleep(0.01)
    assert not asking.done()
    restarted.registration.note_copied()
    await asyncio.wait((asking,))
    assert not isinstance(asking.exception(), OverloadedError)


@pytest.mark.parametrize("call", OPERATORS_CALLS)
async def test_folder_that_is_refused_is_described_as_it_is(restarted: Restarted, call: str):
    """An operator who accepts it asks what it has, and no copy follows it any more."""
    restarted.registration.set_aside = "it is an older copy"
    asking = restarted.ask(call)
    await asyncio.wait((asking,))
    assert not isinstance(asking.exception(), OverloadedError)


@pytest.mark.parametrize("call", CLIENTS_CALLS)
async def test_client_gets_no_answer_when_the_folder_is_refused_before_copies_had_its_log(
    restarted: Restarted, call: str
):
    """The broker that has its place may store other messages at the same offsets."""
    restarted.registration.set_aside = "a copy has its place"
    with pytest.raises(WrongBrokerError, match="a copy has its place"):
        await restarted.ask(call)
    restarted.registration.note_copied()  # it had served before it was refused
    assert await restarted.ask(call)


async def test_reader_gets_nothing_of_a_commit_that_no_copy_had():
    """A broker is killed in the middle of a commit, a copy takes its place, and the broker is
    started again.
    """
    disk = SimDisk()
    desk = Desk(open_store(disk), ManualClock())
    await desk.host()
    await desk.append(batch())
    desk.store.commit.copy_wait.copies = Commitment(members=frozenset({"its copy"}))
    desk.store.append(1, memoryview(batch(sequence=2)), lambda _error: None)
    await asyncio.sleep(0.01)
    assert (await desk.read(0))[0].next_offset == 2
    restarted = Restarted(disk.disk_after_crash(random.Random(1)))
    assert restarted.desk.store.state.partition(1).readable_offset == 4
    restarted.registration.set_aside = "a copy has its place"
    with pytest.raises(WrongBrokerError):
        await restarted.service.handle(Read(1, 2, 100), memoryview(b""))


async def test_call_is_refused_when_copies_have_not_the_log_in_time(
    restarted: Restarted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(registrations, "COPIED_MS_MAX", 10)
    for call in CALLS:
        with pytest.raises(OverloadedError, match="the copies that acks wait for"):
            await restarted.ask(call)
