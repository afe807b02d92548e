"""A broker that does as it is told, and the owner of a partition: what tests of shells run
against.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from threading import get_ident
from types import SimpleNamespace
from typing import Any

from keylane.consumer import ConsumerSettings
from keylane.consumer.prefetch_budget import PrefetchBudget
from keylane.consumer.session.events import MessagesHandled, WorkWanted
from keylane.consumer.session_shell import SessionShell, SuspectLock
from keylane.protocol.backoff import Backoff
from keylane.protocol.batch import batch_starts
from keylane.protocol.clock import Clock, SystemClock
from keylane.protocol.control import Grant
from keylane.protocol.errors import KeylaneError, Reason, UsageError
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
from keylane.rpc.operating.client_counts import ConsumerCounts
from sim.machines.store import SESSION, batch, facts

TOKEN = 5
FAST = Backoff(first_ms=1, max_ms=1)


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


class SuspectingBroker(ScriptedBroker):
    """Two owners ended with the first messages in hand."""

    def __init__(self, *begun: tuple[int, int]) -> None:
        super().__init__()
        self._begun = begun

    async def call(self, request: Request, payload: bytes = b"", *, wait_ms: int = 0):
        if isinstance(request, Acquire):
            return Acquired(0, (), self.end, False, suspects_upto=2, begun=self._begun), b""
        return await super().call(request, payload, wait_ms=wait_ms)

    @property
    def begun(self) -> list[int]:
        """The offsets of the suspects that began."""
        return [offset for ack in self.asked(Ack) for offset, _ in ack.begun]


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
    """Counts what it is told; also the dispatch, which takes nothing until it is asked to."""

    message_filter = None
    by_hand = in_batches = by_column = False
    allows_redrives = True

    def __init__(self) -> None:
        self.messages: list[Message] = []
        """What was taken."""
        self.codec = None
        self.alone = SuspectLock()
        self.budget = PrefetchBudget()
        self.counts = ConsumerCounts()
        self.ended = 0
        self.drained = 0

    def hand_out(self, _shell: Any, messages: list[Message]) -> None:
        self.messages += messages

    def offer(self, shell: Any) -> None:
        """Take nothing by itself."""

    def cancel(self, _shell: Any) -> None:
        """No handler runs."""

    def forget(self, _shell: Any) -> None:
        """Nothing is kept of a partition."""

    def take(self, shell: Any) -> None:
        """Take and handle the messages of the next batch of a partition."""
        lanes = shell.state.lanes
        is_first = True
        while is_first or lanes.opened or lanes.again:
            is_first = False
            messages = shell.ask(WorkWanted(2))
            self.messages += messages
            shell.feed(MessagesHandled(messages))

    def start_hand_over(self, _shell: Any) -> None:
        self.ended += 1

    def nudge(self) -> None:
        self.drained += 1

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)

    async def history(self) -> Any:
        raise AssertionError("a partition without parents has no history")


def refuse_thread() -> None:
    """Refuse a call that comes from another thread than the one in which the tests run."""
    if get_ident() != ToBrokers.loop_binding.thread:
        raise UsageError(Reason.OTHER_LOOP, "it is open in another thread")


class ToBrokers:
    """Connections that have these brokers only, and are open."""

    loop_binding = SimpleNamespace(
        check=lambda: None, check_thread=refuse_thread, thread=get_ident()
    )

    def __init__(self, *brokers: Any) -> None:
        self._brokers = {broker.address: broker for broker in brokers}

    def check(self) -> None:
        """They are open."""

    def broker_at(self, address: str) -> Any:
        return self._brokers[address]


@asynccontextmanager
async def opened(
    broker: Any,
    owner: Any,
    settings: ConsumerSettings,
    *,
    others: tuple[Any, ...] = (),
    dispatch: Any = None,
    group: str = "g",
    clock: Clock | None = None,
) -> AsyncIterator[SessionShell]:
    """A partition that is pulled from the broker for the owner, and may ask others; handed over at
    the end unless it was.

    Args:
        dispatch: takes its messages; None: the owner does.
    """
    clock = clock or SystemClock()
    shell = SessionShell(
        subject="s",
        group=group,
        session=SESSION,
        cluster_id="5ea",
        grant=Grant(partition=facts(address=broker.address).partition, token=TOKEN),
        connections=ToBrokers(broker, *others),  # type: ignore[arg-type]
        deadline_ms=clock.boot_ms() + 60_000,
        settings=settings,
        clock=clock,
        rng=random.Random(1),
        owner=owner,
        dispatch=dispatch or owner,
    )
    try:
        yield shell
    finally:
        if not shell.ended.is_set():
            shell.stop()
            await shell.hand_over(flush_ms=1_000)
