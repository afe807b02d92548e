"""Pull clients follow grants: made, renewed, handed over, and never again under a token that has
ended.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

from keylane.consumer.group import assignments as module
from keylane.consumer.group.assignments import Assignments
from keylane.consumer.group.membership import Member
from keylane.consumer.session.offsets import HeldLease
from keylane.consumer.settings import ConsumerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.control import Grant, Grants
from keylane.protocol.routing import Partition, PartitionState
from keylane.rpc.operating.histogram import Histogram
from sim.machines.clock import ManualClock

SESSION = "a" * 16
FAR_MS = 1 << 40


def grant(token, partition_id=1, address="127.0.0.1:8000"):
    partition = Partition(
        partition_id=partition_id,
        name=f"p{partition_id}",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g1",
        state=PartitionState.OPEN,
        address=address,
    )
    return Grant(partition=partition, token=token)


class PartitionClient:
    """What assignments need of a shell."""

    def __init__(self, granted: Grant) -> None:
        self.partition_id = int(granted.partition.partition_id)
        self.token = granted.token
        self.address = granted.partition.address
        lease = HeldLease(self.partition_id, "g", SESSION, granted.token)
        self.state = SimpleNamespace(
            tenure=SimpleNamespace(lease=lease, fence=None), is_drained=False
        )
        self.lapsed = False
        self.stopped = False
        self.handed_over = False
        self.abandoned = False
        self.token_is_single_use = True
        self.renewed_ms = 0
        self.deadline_ms = 0
        self.handlers_end = asyncio.Event()
        self.handlers_end.set()
        self.grants: list[Grant] = []
        self.calls = SimpleNamespace(reads=SimpleNamespace(update_grant=self.grants.append))

    def renew(self, deadline_ms, address):
        self.deadline_ms = deadline_ms
        self.address = address

    def stop(self):
        self.stopped = True

    def abandon(self):
        self.abandoned = True

    async def hand_over(self, *, flush_ms):
        assert self.stopped
        self.handed_over = True


class AssignmentsAlone:
    """Assignments between a metaserver and handlers that only note what they are told."""

    def __init__(self) -> None:
        self.session = SESSION
        self.member = Member("s", "g", "client")
        self.releases = self
        self.suspended = False
        self.released: list[tuple[int, int, int]] = []
        """(partition id, token, fence) of each report."""
        self.nudges = 0
        self.left = False
        self.failures: list[BaseException] = []
        self.handling = Histogram()
        self.made: list[PartitionClient] = []
        self.assignments = Assignments(
            settings=ConsumerSettings(backoff=Backoff(first_ms=1, max_ms=1)),
            clock=ManualClock(),
            rng=random.Random(1),
            connections=None,
            membership=self,
            dispatcher=self,
            codec=None,
            fail=self.failures.append,
        )
        self.assignments._new_client = self._new_client

    def _new_client(self, granted):
        self.made.append(PartitionClient(granted))
        return self.made[-1]

    def give(self, *grants, deadline_ms=FAR_MS):
        self.assignments.apply_grants(Grants(version=1, ttl_ms=1_000, grants=grants), deadline_ms)

    # as a membership
    async def report(self, _session, partition_id, token, *, fence=0):
        self.released.append((partition_id, token, fence))

    async def announce_leave(self):
        self.left = True

    def nudge(self):
        self.nudges += 1

    # as handlers
    async def quiesce(self, client):
        await client.handlers_end.wait()

    def check_long_running(self):
        pass


async def test_lapsed_token_is_not_taken_up_again():
    """After a lapse only a higher token makes a client; the old token is reported until the
    metaserver knows.
    """
    side = AssignmentsAlone()
    side.give(grant(1))
    side.made[0].lapsed = True
    side.give(grant(1))
    await asyncio.sleep(0.01)
    assert side.made[0].handed_over
    assert side.released[0] == (1, 1, 0)
    assert len(side.made) == 1
    side.give(grant(1))
    await asyncio.sleep(0.01)
    assert len(side.released) >= 2
    assert set(side.released) == {(1, 1, 0)}
    side.give(grant(2))
    assert [client.token for client in side.made] == [1, 2]


async def test_partition_is_reported_only_after_its_handlers_ended():
    """While a hand-over runs, its partition is held, and a grant of it is left alone."""
    side = AssignmentsAlone()
    side.give(grant(1))
    side.made[0].handlers_end.clear()
    side.assignments.start_hand_over(side.made[0])
    side.give(grant(1))
    await asyncio.sleep(0.01)
    assert not side.released
    assert side.assignments.holding(SESSION) == ((1, 1),)
    assert side.assignments.holding("b" * 16) == ()
    side.made[0].handlers_end.set()
    await asyncio.sleep(0.01)
    assert side.released
    assert side.assignments.holding(SESSION) == ()


async def test_lease_is_renewed_while_a_hand_over_runs():
    """The last acks need a lease; the broker's address stays what it was."""
    side = AssignmentsAlone()
    side.give(grant(1))
    side.made[0].handlers_end.clear()
    side.assignments.start_hand_over(side.made[0])
    side.give(grant(1), deadline_ms=FAR_MS + 7)
    assert (side.made[0].deadline_ms, side.made[0].address) == (FAR_MS + 7, None)
    side.made[0].handlers_end.set()


async def test_new_address_of_a_broker_reaches_the_client():
    """A lease outlives a broker's move, with the same token and the new address."""
    side = AssignmentsAlone()
    side.give(grant(1))
    side.give(grant(1, address="127.0.0.1:8010"))
    assert [client.address for client in side.made] == ["127.0.0.1:8010"]
    assert [each.partition.address for each in side.made[0].grants] == ["127.0.0.1:8010"]


async def test_partition_without_a_broker_gets_no_client_until_it_has_one():
    """There is no broker to pull from."""
    side = AssignmentsAlone()
    side.give(grant(1, address=None))
    assert not side.made
    side.give(grant(1))
    assert len(side.made) == 1


async def test_grant_that_arrives_after_its_deadline_makes_no_client():
    """The answer took longer than the lease."""
    side = AssignmentsAlone()
    side.give(grant(1), deadline_ms=0)
    assert not side.made


async def test_shared_token_is_taken_up_again_unless_it_is_fenced():
    """The token of a shared group stays: after a lapse the partition is taken up under it, after a
    fence it is not.
    """
    side = AssignmentsAlone()
    side.give(grant(1))
    side.made[0].token_is_single_use = False
    side.made[0].lapsed = True
    side.give(grant(1))
    await asyncio.sleep(0.01)
    assert [client.token for client in side.made] == [1, 1]
    assert not side.released, "other sessions have the token too"
    side.made[1].token_is_single_use = False
    side.made[1].state.tenure.fence = 9
    side.assignments.start_hand_over(side.made[1])
    await asyncio.sleep(0.1)
    assert (1, 1, 9) in side.released
    side.give(grant(1))
    assert len(side.made) == 2
    side.give(grant(2))
    assert side.made[2].token == 2


async def test_drained_partitions_are_listed_and_reported_at_once():
    """A heartbeat is sent now, and it lists what is drained."""
    side = AssignmentsAlone()
    side.give(grant(1, partition_id=1), grant(1, partition_id=2))
    assert side.assignments.drained() == ()
    side.made[1].state.is_drained = True
    side.assignments.nudge()
    assert (side.nudges, side.assignments.drained()) == (1, (2,))


async def test_lost_session_ends_every_client():
    """Nothing is granted any more, until the next session."""
    side = AssignmentsAlone()
    side.give(grant(1, partition_id=1), grant(1, partition_id=2))
    side.assignments.on_session_lost()
    assert all(client.stopped for client in side.made)
    await asyncio.sleep(0.01)
    assert all(client.handed_over for client in side.made)
    assert not side.assignments.clients


async def test_closing_announces_the_leave_and_takes_no_grant():
    """Everything is handed over and reported; a grant that arrives meanwhile makes no client."""
    side = AssignmentsAlone()
    side.assignments.start()
    side.give(grant(1))
    side.made[0].handlers_end.clear()
    closing = asyncio.create_task(side.assignments.close())
    await asyncio.sleep(0.01)
    assert side.left
    side.give(grant(1), grant(5, partition_id=2))
    assert len(side.made) == 1
    assert not closing.done()
    side.made[0].handlers_end.set()
    await asyncio.wait_for(closing, 5)
    assert side.released == [(1, 1, 0)]


async def test_watch_ends_a_client_whose_lease_lapsed():
    """No heartbeat is needed for it: running handlers are cancelled when the lease ends."""
    side = AssignmentsAlone()
    side.give(grant(1))
    side.assignments._held.deadline_ms = 0
    side.made[0].lapsed = True
    side.assignments.start()
    await asyncio.sleep(0.01)
    assert side.made[0].handed_over
    await side.assignments.close()


async def test_ended_tokens_are_of_the_latest_partitions_when_partitions_come_and_go(monkeypatch):
    """A consumer kept the token of each partition that was ever moved away from it."""
    monkeypatch.setattr(module, "ENDED_TOKENS_MAX", 5)
    consumer = AssignmentsAlone()
    for partition_id in range(1, 101):
        consumer.give(grant(partition_id, partition_id), grant(partition_id + 1, partition_id + 1))
        while consumer.assignments.handing_over:
            await asyncio.sleep(0)
    assert len(consumer.assignments._held._retired_tokens) <= 5 + 2
    consumer.give(grant(99, 99))
    await asyncio.sleep(0)
    assert not [client for client in consumer.made if client.partition_id == 99][1:]


async def test_ended_tokens_that_are_forgotten_are_those_that_ended_first(monkeypatch):
    """Those of partitions that the consumer has are beyond the bound: all of them may end at
    once.
    """
    monkeypatch.setattr(module, "ENDED_TOKENS_MAX", 2)
    consumer = AssignmentsAlone()
    for partition_id in (1, 2, 1, 3):
        consumer.assignments._held.retire_token(partition_id, 7)
    assert consumer.assignments._held._retired_tokens.keys() == {1, 3}
    consumer.give(grant(11, 11), grant(12, 12))
    for partition_id in (11, 12):
        consumer.assignments._held.retire_token(partition_id, 7)
    assert consumer.assignments._held._retired_tokens.keys() == {1, 3, 11, 12}


async def test_tasks_of_a_partition_end_when_its_hand_over_fails():
    """They sent acks for a consumer that was closed, and the fault was told nowhere."""
    side = AssignmentsAlone()
    side.give(grant(1))
    error = ValueError("a fault of ours")

    async def fail(_client):
        raise error

    side.quiesce = fail
    side.assignments.start_hand_over(side.made[0])
    await asyncio.sleep(0.01)
    assert side.made[0].abandoned
    assert not side.made[0].handed_over
    assert side.failures == [error]
    assert side.assignments.handing_over == []
