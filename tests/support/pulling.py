"""A broker that does as it is told, and the owner of a pull client: what tests of pull clients run
against.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from keylane.consumer import ConsumerSettings
from keylane.consumer.delivery.suspect_lock import SuspectLock
from keylane.consumer.prefetch_budget import PrefetchBudget
from keylane.consumer.pulling.lifetime import PullState
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.backoff import Backoff
from keylane.protocol.batch import batch_starts
from keylane.protocol.control import Grant
from keylane.protocol.errors import KeylaneError
from keylane.protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    Batches,
    ChangeParked,
    ParkedChanged,
    Pull,
    Released,
    Request,
)
from keylane.protocol.message import Message
from keylane.protocol.offsets import Range
from keylane.protocol.record import HEADER_BYTES, stamp_record
from keylane.rpc.network import Call, Calling, OnAnswer, OnPart
from sim.machines.clock import ManualClock
from sim.machines.store import SESSION, batch, facts

TOKEN = 5
FAST = Backoff(first_ms=1, max_ms=1)
C = TypeVar("C", bound=PullClient)


def stored(offset: int) -> memoryview:
    """A batch of two messages as its broker stored it at `offset`."""
    data = bytearray(batch(sequence=offset))
    header = data[:HEADER_BYTES]
    stamp_record(header, base_offset=offset, position=0, appended_at_ms=0)
    data[:HEADER_BYTES] = header
    assert list(batch_starts(memoryview(data)))
    return memoryview(data)


class ScriptedBroker:
    """A partition of two messages a batch; `pulls` are the errors that pulls meet first."""

    address = "b:1"

    def __init__(self, *pulls: KeylaneError, batches: int = 1, cursor: int = 0) -> None:
        self.pulls = list(pulls)
        self.acks: list[KeylaneError] = []
        """Errors that acks meet first."""
        self.end = 2 * batches
        self.cursor = cursor
        self.attempts: tuple[tuple[int, int], ...] = ()
        """(offset, tries) of messages that failed under earlier grants."""
        self.first = 0
        self.sealed = False
        self.left_out: tuple[Range, ...] = ()
        """Is not sent; the first pull below says so."""
        self.requests: list[Request] = []
        self.parked_version = 0
        """As answers to acks have it."""
        self.is_connected = True
        """Its channel is open already."""
        self._channel = PartitionChannel(self)

    @property
    def live_channel(self) -> PartitionChannel | None:
        return self._channel if self.is_connected else None

    async def channel(self) -> PartitionChannel:
        return self._channel

    def asked(self, kind: type) -> list[Request]:
        return [request for request in self.requests if isinstance(request, kind)]

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
        self.requests.append(request)
        match request:
            case Acquire():
                return Acquired(self.cursor, (), self.end, self.sealed, self.attempts), b""
            case Pull(offset=offset):
                if self.pulls:
                    raise self.pulls.pop(0)
                if offset >= self.end:
                    await asyncio.Event().wait()
                if any(low <= offset < high for low, high in self.left_out):
                    upto = self.left_out[-1][1]
                    return Batches(self.first, self.end, upto, self.sealed, 0, self.left_out), b""
                return Batches(self.first, self.end, offset + 2, self.sealed), stored(offset)
            case ChangeParked():
                return ParkedChanged(1), b""
            case Ack(ranges=ranges):
                if self.acks:
                    raise self.acks.pop(0)
                self.cursor = max([self.cursor, *(end for _, end in ranges)])
                return Acked(self.cursor, self.parked_version), b""
            case ChangeParked():
                return ParkedChanged(1), b""
        return Released(), b""


class PartitionChannel:
    """The channel of a scripted broker: it calls back where an answer arrives, as a real one
    does.
    """

    closed = False

    def __init__(self, broker: Any) -> None:
        self._broker = broker

    def begin(
        self,
        request: Request,
        payload: bytes = b"",
        *,
        timeout_ms: int,
        on_answer: OnAnswer | None = None,
        on_part: OnPart | None = None,
    ) -> Calling:
        loop = asyncio.get_running_loop()
        call = Call(loop.create_future(), on_answer, type(request), timeout_ms, on_part)

        async def answer() -> None:
            try:
                wait_ms = getattr(request, "wait_ms", 0)
                call.complete(await self._broker.call(request, payload, wait_ms=wait_ms))
            except KeylaneError as error:
                call.fail(error)

        answering = loop.create_task(answer())
        call.future.add_done_callback(lambda done: done.cancelled() and answering.cancel())
        return call.future


class NotingOwner:
    """Keeps the messages, and counts what it is told."""

    keeps_batches = False
    dead_letters_when_full = False
    message_filter = None

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.codec = None
        self.alone = SuspectLock()
        self.budget = PrefetchBudget()
        self.ended = 0
        self.drained = 0
        self.refreshed = 0

    def hand_out(self, messages: list[Message]) -> None:
        self.messages += messages

    def hand_out_batch(self, batch: Any) -> None:
        self.messages += batch.messages()

    def start_hand_over(self, _client: PullClient) -> None:
        self.ended += 1

    def report_drained(self) -> None:
        self.drained += 1

    def refresh(self) -> None:
        self.refreshed += 1

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)


class ToBrokers:
    """Connections that have these brokers only, and are open."""

    loop_binding = SimpleNamespace(check=lambda: None)

    def __init__(self, *brokers: Any) -> None:
        self._brokers = {broker.address: broker for broker in brokers}

    def check(self) -> None:
        """They are open."""

    def broker_at(self, address: str) -> Any:
        return self._brokers[address]


@asynccontextmanager
async def opened(
    kind: type[C],
    broker: Any,
    owner: Any,
    settings: ConsumerSettings,
    *,
    others: tuple[Any, ...] = (),
    **more: Any,
) -> AsyncIterator[C]:
    """A client of this kind that pulls from the broker for the owner, and may be sent to others;
    closed at the end unless it was.
    """
    clock = ManualClock()
    told: dict[str, Any] = {"group": "g", "session": SESSION, "token": TOKEN} | more
    partition = facts(address=broker.address).partition
    client = kind(
        subject="s",
        grant=Grant(partition=partition, token=told.pop("token")),
        connections=ToBrokers(broker, *others),
        cluster_id="5ea",
        deadline_ms=clock.now_ms + 60_000,
        settings=settings,
        clock=clock,
        rng=random.Random(1),
        owner=owner,
        **told,
    )
    try:
        yield client
    finally:
        if client.lifetime.state is not PullState.CLOSED:
            client.stop()
            await client.hand_over(flush_ms=1_000)
