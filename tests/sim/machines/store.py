"""A broker's store and service over any `Files`, its blocking code run in place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from keylane.broker.service import BrokerService
from keylane.broker.settings import BrokerSettings
from keylane.broker.storage.files import Files
from keylane.broker.store.known_groups import know_groups
from keylane.broker.store.store import Store
from keylane.protocol.batch import encode_batch
from keylane.protocol.control import HostPartition
from keylane.protocol.frames import (
    Ack,
    Acquire,
    Answer,
    Append,
    Batches,
    Pull,
    Read,
    Release,
    Request,
)
from keylane.protocol.routing import Partition, PartitionState
from keylane.testing.machines.disk import Crashed
from sim.machines.clock import ManualClock

SESSION = "a" * 16


async def in_place(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run blocking code where it is called."""
    return function(*args)


def settings_of(**changes: Any) -> BrokerSettings:
    values = {"group": "g1", "data": Path("data"), "meta": ("127.0.0.1:7000",)}
    return BrokerSettings(**(values | changes))


def open_store(files: Files, *, clock: ManualClock | None = None, **changes: Any) -> Store:
    return Store.open(
        files,
        settings_of(**changes),
        clock=clock or ManualClock(),
        run_commit=in_place,
        run_read=in_place,
    )


def is_survived(work: Coroutine[Any, Any, None]) -> bool:
    """Run what a disk may crash, in an event loop of its own that is gone then; False if it crashed."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    try:
        loop.run_until_complete(work)
    except Crashed:
        return False
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        with contextlib.suppress(Crashed, asyncio.CancelledError):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
    return True


def facts(
    partition_id: int = 1, *, broker_group: str = "g1", subject: str = "flights", **changes: Any
) -> HostPartition:
    values: dict[str, Any] = {
        "partition_id": partition_id,
        "name": f"p{partition_id}",
        "queue": 0,
        "range_start": 0,
        "range_end": 1024,
        "broker_group": broker_group,
        "state": PartitionState.OPEN,
    }
    return HostPartition(subject=subject, partition=Partition(**(values | changes)))


def batch(
    *,
    partition_id: int = 1,
    sequence: int = 0,
    count: int = 2,
    producer_id: int = 7,
    epoch: int = 0,
    value: bytes = b"value",
    properties: Sequence[bytes] = (),
) -> bytes:
    return encode_batch(
        partition_id=partition_id,
        sent_at_ns=[10**18 + number for number in range(count)],
        keys=[b"k%d" % (sequence + number) for number in range(count)],
        values=[b"%s %d" % (value, sequence + number) for number in range(count)],
        properties=properties,
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=sequence,
    )


class Desk:
    """Says requests to a service, in short words."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.service = BrokerService(store, clock=clock)

    async def say(self, request: Request, payload: bytes = b"") -> Answer:
        answer, _ = await self.service.handle(request, memoryview(payload))
        return answer

    async def host(self, partition_id: int = 1) -> None:
        """As the metaserver has it hosted for a subject without consumer groups."""
        partition, _ = self.store.host(facts(partition_id))
        await know_groups(self.store, partition, (), complete=True)

    async def append(self, data: bytes, partition_id: int = 1) -> Any:
        return await self.say(Append(partition_id), data)

    async def acquire(
        self, token: int, session: str = SESSION, *, group: str = "audit", ttl_ms: int = 2000
    ) -> Any:
        return await self.say(Acquire(1, group, session, token, ttl_ms))

    async def pull(
        self,
        token: int,
        offset: int,
        session: str = SESSION,
        *,
        bytes_max: int = 1 << 20,
        wait_ms: int = 0,
    ) -> tuple[Batches, bytes]:
        answer, payload = await self.service.handle(
            Pull(1, "audit", session, token, offset, bytes_max, wait_ms), memoryview(b"")
        )
        assert isinstance(answer, Batches)
        return answer, payload

    async def ack(self, token: int, *ranges: tuple[int, int], session: str = SESSION) -> Any:
        return await self.say(Ack(1, "audit", session, token, ranges))

    async def release(self, token: int, session: str = SESSION) -> Any:
        return await self.say(Release(1, "audit", session, token))

    async def read(
        self, offset: int, *, partition_id: int = 1, bytes_max: int = 1 << 20
    ) -> tuple[Batches, bytes]:
        answer, payload = await self.service.handle(
            Read(partition_id, offset, bytes_max), memoryview(b"")
        )
        assert isinstance(answer, Batches)
        return answer, payload
