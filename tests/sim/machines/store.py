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
from keylane.broker.store.group_changes import register_groups_at
from keylane.broker.store.quick_sync import QuickSync
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


def open_store(
    files: Files,
    *,
    clock: ManualClock | None = None,
    quick: QuickSync | None = None,
    **changes: Any,
) -> Store:
    return Store.open(
        files,
        settings_of(**changes),
        clock=clock or ManualClock(),
        run_commit=in_place,
        run_read=in_place,
        quick=quick,
    )


def is_survived(work: Coroutine[Any, Any, None]) -> bool:
    """Run what a disk may crash, in an event loop of its own that is gone then; False if it
    crashed.
    """
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


class AskedCall:
    """A call whose future is of the answer, or of the request that `handle` has to answer."""

    accepts_parts = True

    def __init__(self) -> None:
        self.done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.wait: asyncio.Future[None] | None = None
        self.parts: list[tuple[Any, bytes]] = []

    def answer(self, answer: Answer, data: bytes = b"") -> None:
        if not self.done.done():
            self.done.set_result((answer, data))

    def send_part(self, answer: Answer, data: bytes = b"") -> None:
        self.parts.append((answer, data))

    def refuse(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def hand_to_task(self, request: Request) -> None:
        if not self.done.done():
            self.done.set_result(request)

    def cancel_on_disconnect(self, future: asyncio.Future[None]) -> None:
        self.wait = future

    def reserve_bytes(self, _bytes_max: int) -> bool:
        return True


class Desk:
    """Says requests to a service, in short words."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.service = BrokerService(store, clock=clock)
        self.prompt = True
        self.prompt_answers = 0

    async def say(self, request: Request, payload: bytes = b"") -> Answer:
        answer, _ = await self.ask(request, payload)
        return answer

    async def ask(self, request: Request, payload: bytes = b"") -> tuple[Answer, bytes]:
        """As the server asks: without a task, where the service needs none."""
        call = AskedCall()
        if self.prompt and self.service.begin(request, memoryview(payload), call):
            self.prompt_answers += 1
            try:
                answered = await call.done
            except asyncio.CancelledError:
                if call.wait is not None:
                    call.wait.cancel()
                raise
            if not isinstance(answered, Pull):
                return answered
            request = answered
        return await self.service.handle(request, memoryview(payload))

    async def host(self, partition_id: int = 1, **changes: Any) -> None:
        """As the metaserver has it hosted for a subject without consumer groups."""
        partition, _ = self.store.host(facts(partition_id, **changes))
        await register_groups_at(self.store, partition, (), complete=True)

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
        answer, payload = await self.ask(
            Pull(1, "audit", session, token, offset, bytes_max, wait_ms), memoryview(b"")
        )
        assert isinstance(answer, Batches)
        return answer, payload

    async def ack(self, token: int, *ranges: tuple[int, int], session: str = SESSION) -> Any:
        return await self.say(Ack(1, "audit", session, token, ranges))

    async def release(self, token: int, session: str = SESSION) -> Any:
        return await self.say(Release(1, "audit", session, token))

    async def read(
        self, offset: int, *, partition_id: int = 1, bytes_max: int = 1 << 20, wait_ms: int = 0
    ) -> tuple[Batches, bytes]:
        answer, payload = await self.ask(
            Read(partition_id, offset, bytes_max, wait_ms=wait_ms), memoryview(b"")
        )
        assert isinstance(answer, Batches)
        return answer, payload
