"""A producer with brokers that fail and recover, in virtual time: reordered messages were due, and
are declared.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keylane import Producer, Receipt
from keylane.producer import ProducerSettings
from keylane.protocol.backoff import Backoff
from keylane.protocol.routing import OrderStrategy, logical_partition
from keylane.rpc.environment import Environment
from keylane.testing.machines.loop import SimLoop
from keylane.testing.machines.machine import Machine
from support.running.examples import examples
from support.scripted_network import ScriptedNetwork, route_over

LEAVE_MS = 1_000
RANGES = {1: (0, 341), 2: (341, 682), 3: (682, 1024)}
KEYS = [b"", *(b"k%d" % number for number in range(5))]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(KEYS)),
        st.tuples(st.sampled_from(["unreachable", "lost", "mute"]), st.sampled_from([1, 2, 3])),
        st.tuples(st.just("mend"), st.sampled_from([1, 2, 3])),
        st.tuples(st.just("wait"), st.sampled_from([10, 100, 400, 900, 1_500])),
    ),
    max_size=60,
)


@dataclass(slots=True)
class SentMessage:
    key: bytes
    value: bytes
    sent_ms: int
    took_ms: int = 0
    receipt: Receipt | None = None

    @property
    def home(self) -> int:
        place = logical_partition(self.key)
        return next(
            partition_id for partition_id, (start, end) in RANGES.items() if start <= place < end
        )


def break_or_mend(network: ScriptedNetwork, what: str, partition_id: int) -> None:
    network.unreachable.discard(f"broker-{partition_id}")
    network.lost.discard(partition_id)
    network.mute.discard(partition_id)
    if what == "unreachable":
        network.unreachable.add(f"broker-{partition_id}")
    elif what != "mend":
        getattr(network, what).add(partition_id)


async def run(loop: SimLoop, plan, strategy: OrderStrategy, seed: int):
    """All messages sent, in order, each with its receipt; and the network."""
    network = ScriptedNetwork()
    network.route = route_over(RANGES, version=1, strategy=strategy)
    clock = Machine(loop, "p", rate=1.0, boot_s=10.0)
    sent: list[SentMessage] = []

    async def settle(sending: SentMessage, future) -> None:
        sending.receipt = await future
        sending.took_ms = clock.boot_ms() - sending.sent_ms

    async with Producer(
        "meta:1",
        _environment=Environment(network=network, clock=clock, rng=random.Random(seed)),
        settings=ProducerSettings(
            leave_after_ms=LEAVE_MS,
            batch_count=3,
            in_flight_max=2,
            backoff=Backoff(first_ms=20, max_ms=200),
        ),
    ) as producer:
        tasks = []
        for what, whom in plan:
            if what == "send":
                sending = SentMessage(whom, b"%d" % len(sent), clock.boot_ms())
                sent.append(sending)
                future = producer.send("s", sending.value, key=whom)
                tasks.append(asyncio.create_task(settle(sending, future)))
            elif what == "wait":
                await asyncio.sleep(whom / 1000)
            else:
                break_or_mend(network, what, whom)
        for partition_id in RANGES:
            break_or_mend(network, "mend", partition_id)
        await asyncio.gather(*tasks)
    return sent, network


def outcome(plan, strategy: OrderStrategy, seed: int):
    loop = SimLoop(random.Random(seed))
    try:
        sent_and_network = loop.run_until_complete(run(loop, plan, strategy, seed))
        assert not loop.faults
        return sent_and_network
    finally:
        loop.dispose()


@settings(max_examples=examples(200), deadline=None)
@given(plan=steps, seed=st.integers(0, 1_000))
def test_inversion_is_due_and_declared_under_best_tried(plan, seed):
    """
    Two messages of a key are stored in another order than they were sent only if one of them says
    so, and only after a message of their partition, not newer than both, has waited for
    `leave_after_ms`.
    """
    sent, network = outcome(plan, OrderStrategy.BEST_TRIED, seed)
    instant = {place: index for index, place in enumerate(network.history)}
    for sending in sent:
        assert sending.receipt is not None
        place = (sending.receipt.partition_id, sending.receipt.offset)
        assert network.stored[place[0]][place[1]] == sending.value
        copies = sum(values.count(sending.value) for values in network.stored.values())
        assert copies == 1 or sending.receipt.duplicate == "possible"
        assert sending.key or not sending.receipt.reordered
        assert not sending.key or sending.receipt.reordered or place[0] == sending.home
    for older, newer in combinations([sending for sending in sent if sending.key], 2):
        if older.key != newer.key:
            continue
        first, second = older.receipt, newer.receipt
        if instant[first.partition_id, first.offset] < instant[second.partition_id, second.offset]:
            continue
        assert first.reordered or second.reordered
        assert any(
            other.took_ms >= LEAVE_MS and other.sent_ms <= newer.sent_ms
            for other in sent
            if other.key and (other.home == newer.home or other.receipt.reordered)
        )


@pytest.mark.parametrize("strategy", OrderStrategy)
@settings(max_examples=examples(60), deadline=None)
@given(plan=steps, seed=st.integers(0, 1_000))
def test_best_tried_keeps_the_order_when_failures_are_short(strategy, plan, seed):
    """When each partition recovers before `leave_after_ms`, both strategies keep the messages of a
    key in its partition.
    """
    short = []
    for what, whom in plan:
        short.append((what, min(whom, 100) if what == "wait" else whom))
        if what in {"unreachable", "lost", "mute"}:
            short += [
                ("wait", 400),
                ("mend", whom),
                ("wait", 300),
            ]  # longer than a pause between tries
    sent, network = outcome(short, strategy, seed)
    for sending in sent:
        assert sending.receipt is not None
        assert not sending.receipt.reordered
        assert sending.receipt.duplicate != "possible"
        copies = sum(values.count(sending.value) for values in network.stored.values())
        assert copies == 1
    for key in KEYS[1:]:
        wanted = [sending.value for sending in sent if sending.key == key]
        order = [value for values in network.stored.values() for value in values if value in wanted]
        assert order == wanted


@settings(max_examples=examples(60), deadline=None)
@given(plan=steps, seed=st.integers(0, 1_000))
def test_strict_stores_each_message_once_and_in_order(plan, seed):
    """It does so for every failure of any length."""
    sent, network = outcome(plan, OrderStrategy.STRICT, seed)
    stored = [value for values in network.stored.values() for value in values]
    assert sorted(stored) == sorted(sending.value for sending in sent)
    for key in KEYS[1:]:
        wanted = [sending.value for sending in sent if sending.key == key]
        order = [value for value in stored if value in wanted]
        assert order == wanted
    for sending in sent:
        assert sending.receipt is not None
        assert not sending.receipt.reordered
        assert sending.receipt.duplicate != "possible"
