"""What a producer costs without a network: a channel in the same process answers each batch after
`--answer-ms`.

Prints JSON: nanoseconds of processor time for a message of a loop that awaits the oldest of 20,000
receipts, of an await of a receipt that is there, and of `send_all`; microseconds of a single
awaited send; messages of a batch in the loop. Another tree is measured with `PYTHONPATH` of the
folder that has it as `keylane`, and of `benchmarks`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from roles import KEYS, VALUE

from keylane.producer import Producer
from keylane.protocol.control import Health
from keylane.protocol.frames import Append, Appended, Request
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.routing import OrderStrategy, Partition, PartitionState, Route
from keylane.rpc.environment import Environment

IN_FLIGHT = 20_000
SINGLE_SENDS = 3_000


class AnsweringChannel:
    """Answers each append; it stores nothing."""

    closed = False

    def __init__(self, answer_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._answer_s = answer_s
        self.batches = 0

    def begin(
        self,
        request: Request,
        payload: bytes | bytearray = b"",
        *,
        timeout_ms: int,
        on_answer: Callable[[Any], object] | None = None,
    ) -> asyncio.Future[Any]:
        """See `network.Channel.begin`."""
        del payload, timeout_ms
        assert isinstance(request, Append)
        self.batches += 1
        call = self._loop.create_future()

        def answer() -> None:
            if not call.done():
                call.set_result((Appended(0, "fsync", False), memoryview(b"")))
                if on_answer is not None:
                    on_answer(call)

        self._loop.call_later(self._answer_s, answer)
        return call

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class AnsweringNetwork:
    """A fake metaserver with one subject, and its broker."""

    def __init__(self, partitions: int, answer_s: float) -> None:
        edges = [number * LOGICAL_PARTITIONS // partitions for number in range(partitions + 1)]
        self._route = Route(
            subject="s",
            version=1,
            order_strategy=OrderStrategy.STRICT,
            partitions=tuple(
                Partition(
                    partition_id=number + 1,
                    name=f"p{number}",
                    queue=number,
                    range_start=edges[number],
                    range_end=edges[number + 1],
                    broker_group="g",
                    state=PartitionState.OPEN,
                    address="broker:1",
                )
                for number in range(partitions)
            ),
        )
        self.channel = AnsweringChannel(answer_s)

    async def open_channel(self, address: str, *, timeout_ms: int) -> Any:
        """See `network.Network.open_channel`."""
        del address, timeout_ms
        return self.channel

    async def control(
        self,
        method: str,
        address: str,
        path: str,
        answer: type[Any],
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        timeout_ms: int,
        new_connection: bool = False,
    ) -> Any:
        """See `network.Network.control`."""
        del method, address, path, body, timeout_ms, new_connection
        if answer is Health:
            return Health(program="metaserver", ready=True)
        assert query is not None
        if int(query["known_version"]) == self._route.version:
            await asyncio.sleep(int(query["wait_ms"]) / 1000)
        return self._route

    async def close(self) -> None:
        """Do nothing: nothing is open."""


async def measure(partitions: int, answer_s: float, count: int) -> dict[str, float]:
    """Measure each figure once."""
    network = AnsweringNetwork(partitions, answer_s)
    cpu = time.process_time_ns
    keys = KEYS * (count // len(KEYS) + 1)
    async with Producer("meta:1", _environment=Environment(network=network)) as producer:
        send = producer.send
        await send("s", VALUE, key=KEYS[0])
        batches, receipts, began = network.channel.batches, deque[Any](), cpu()
        for number in range(count):
            receipts.append(send("s", VALUE, key=keys[number]))
            if len(receipts) >= IN_FLIGHT:
                await receipts.popleft()
        while receipts:
            await receipts.popleft()
        figures = {"loop_ns": (cpu() - began) / count}
        figures["batch_messages"] = count / (network.channel.batches - batches)
        futures = [send("s", VALUE, key=key) for key in KEYS]
        await producer.flush()
        began = cpu()
        for future in futures:
            await future
        figures["await_ns"] = (cpu() - began) / len(futures)
        began = cpu()
        await producer.send_all("s", ((key, VALUE) for key in keys[:count]))
        figures["send_all_ns"] = (cpu() - began) / count
        began = cpu()
        for key in KEYS[:SINGLE_SENDS]:
            await send("s", VALUE, key=key)
        figures["single_us"] = (cpu() - began) / SINGLE_SENDS / 1000
    return figures


def main() -> None:
    """Measure, and print the minimum of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--answer-ms", type=float, default=1)
    parser.add_argument("--count", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = [
        asyncio.run(measure(options.partitions, options.answer_ms / 1000, options.count))
        for _ in range(options.rounds)
    ]
    print(json.dumps({name: round(min(each[name] for each in rounds), 1) for name in rounds[0]}))


if __name__ == "__main__":
    main()
