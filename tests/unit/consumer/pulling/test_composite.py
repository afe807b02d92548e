"""Pull clients follow grants: made, renewed, handed over, and never under a token that has ended."""

import asyncio
from dataclasses import dataclass, field

from keylane.consumer.pulling.composite import CompositePullClient
from keylane.protocol.control import Grant
from keylane.protocol.routing import Partition, PartitionState

SESSION = "a" * 16


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


@dataclass
class Client:
    """What a composite sees of a pull client."""

    partition_id: int
    token: int
    address: str | None
    session: str = SESSION
    lapsed: bool = False
    fenced: bool = False
    stopped: bool = False
    once: bool = True

    def renew(self, _deadline_ms, address):
        self.address = address

    def stop_starting(self):
        self.stopped = True


@dataclass
class Side:
    """A composite, with what it made, handed over and gave back."""

    made: list[Client] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.composite = CompositePullClient(self._make, self._hand_over, self._give_back)

    def _make(self, one, _deadline_ms):
        self.made.append(Client(one.partition.partition_id, one.token, one.partition.address))
        return self.made[-1]

    async def _hand_over(self, client):
        await asyncio.sleep(0)
        self.ended.append(client.token)

    def _give_back(self, one):
        self.given_back.append(one.token)


async def test_a_lapsed_token_is_not_taken_up_again():
    """After a lapse only a higher token makes a client; the old one is given back until the metaserver knows."""
    side = Side()
    side.composite.apply((grant(1),), 1_000)
    side.made[0].lapsed = True
    side.composite.apply((grant(1),), 2_000)
    await asyncio.sleep(0.01)
    assert side.ended == [1]
    assert len(side.made) == 1
    side.composite.apply((grant(1),), 3_000)
    assert side.given_back[-1] == 1
    side.composite.apply((grant(2),), 4_000)
    assert [one.token for one in side.made] == [1, 2]


async def test_nothing_is_given_back_while_its_hand_over_runs():
    """The metaserver hears that a partition is free only after its handlers have ended."""
    side = Side()
    side.composite.apply((grant(1),), 1_000)
    side.composite.end(side.made[0])
    side.composite.apply((grant(1),), 2_000)
    assert not side.given_back
    assert side.composite.holding(SESSION) == ((1, 1),)
    await asyncio.sleep(0.01)


async def test_a_brokers_new_address_reaches_the_client():
    """A lease goes on over a broker's move, with the same token and the new address."""
    side = Side()
    side.composite.apply((grant(1),), 1_000)
    side.composite.apply((grant(1, address="127.0.0.1:8010"),), 2_000)
    assert [one.address for one in side.made] == ["127.0.0.1:8010"]


async def test_a_shared_token_is_taken_up_again_unless_it_is_fenced():
    """The token of a shared group stays: after a lapse the partition is taken up under it, after a fence it is not."""
    side = Side()
    side.composite.apply((grant(1),), 1_000)
    side.made[0].once = False
    side.made[0].lapsed = True
    side.composite.apply((grant(1),), 2_000)
    await asyncio.sleep(0.01)
    assert [one.token for one in side.made] == [1, 1]
    side.made[1].once = False
    side.made[1].fenced = True
    side.composite.end(side.made[1])
    await asyncio.sleep(0.01)
    side.composite.apply((grant(1),), 3_000)
    assert len(side.made) == 2
    side.composite.apply((grant(2),), 3_000)
    assert side.made[2].token == 2
