"""When executors send: in the next turn, and not while many partitions of their broker are unanswered."""

from __future__ import annotations

import asyncio

from keylane.producer.flight import CROWD, WAIT_S, Flight, Turn
from keylane.protocol.routing import OrderStrategy, logical_partition
from support.scripted_network import ScriptedNetwork, producer_on, route_over


class Recorder:
    def __init__(self, flight: Flight | None = None, *, sends: bool = True) -> None:
        self.waited = False
        self.pushes = 0
        self._flight = flight
        self._sends = sends

    def push(self) -> None:
        self.pushes += 1
        if self._flight is not None and self._sends:
            self._flight.partitions += 1


async def test_turn_pushes_each_executor_once_when_the_turn_ends():
    ended: list[int] = []
    turn = Turn(asyncio.get_running_loop(), lambda: ended.append(1))
    first, second = Recorder(), Recorder()
    for _ in range(3):
        turn.begin()
        turn.add(first)
        turn.add(second)
    assert (first.pushes, second.pushes, ended) == (0, 0, [])
    await asyncio.sleep(0)
    assert (first.pushes, second.pushes, ended) == (1, 1, [1])
    turn.add(second)
    await asyncio.sleep(0)
    assert (first.pushes, second.pushes, len(ended)) == (1, 2, 2)


async def test_flight_pushes_the_one_that_waits_longest_when_another_is_answered():
    flight = Flight(asyncio.get_running_loop())
    flight.partitions = CROWD
    waiting = [Recorder(flight) for _ in range(3)]
    for executor in waiting:
        flight.wait(executor)
    flight.answered()
    assert [executor.pushes for executor in waiting] == [1, 0, 0]
    flight.forget(waiting[1])
    flight.answered()
    assert [executor.pushes for executor in waiting] == [1, 0, 1]


async def test_flight_pushes_the_next_when_the_first_has_nothing_to_send():
    flight = Flight(asyncio.get_running_loop())
    flight.partitions = CROWD
    idle, busy = Recorder(flight, sends=False), Recorder(flight)
    flight.wait(idle)
    flight.wait(busy)
    flight.answered()
    assert (idle.pushes, busy.pushes) == (1, 1)


async def test_flight_pushes_all_that_wait_when_nothing_is_answered():
    flight = Flight(asyncio.get_running_loop())
    flight.partitions = CROWD
    executor = Recorder(flight)
    flight.wait(executor)
    await asyncio.sleep(WAIT_S * 4)
    assert (executor.pushes, executor.waited) == (1, True)


async def test_message_is_stored_when_all_other_partitions_of_its_broker_are_silent():
    """More partitions than make a crowd do not answer; those that do are delayed, and not stopped."""
    network = ScriptedNetwork()
    step = 1024 // 32
    ranges = {number + 1: (number * step, number * step + step) for number in range(32)}
    network.route = route_over(ranges, version=1, strategy=OrderStrategy.STRICT, group="g")
    silent = asyncio.Event()
    async with producer_on(network) as producer:
        await producer.send("s", b"first", key=b"0")
        executors = producer._senders["s"].executors
        flight = executors[0]._flight
        for executor in executors:
            executor._flight = flight
        network.sealed.update(range(2, 33))
        network.late = silent
        for number in range(500):
            producer.send("s", b"v", key=b"%d" % number)
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            key = next(
                b"%d" % number
                for number in range(10_000)
                if executors[0] is producer._senders["s"].table[logical_partition(b"%d" % number)]
            )
            receipt = await producer.send("s", b"last", key=key)
        assert flight.partitions >= CROWD
        assert receipt.partition_id == 1
        silent.set()
        children = {partition_id + 100: span for partition_id, span in ranges.items()}
        network.route = route_over(children, version=2, strategy=OrderStrategy.STRICT, group="g")
    assert sum(map(len, network.stored.values())) == 502
