"""Answers appends, pulls and acks where they arrive, without a task, if nothing has to be waited for but a commit or news.

    append ─▶ decided ─▶ durable ─▶ answered          pull ─▶ cached ─▶ answered
    ack    ─▶ decided ─▶ durable ─▶ answered               └▶ waits ─▶ woken ─▶ cached ─▶ answered

What needs more (room in the commit queue, a read of the disk, tags) is left to `BrokerService.handle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from msgspec.structs import replace

from ..protocol.clock import Clock
from ..protocol.frames import Ack, Acked, Append, Appended, Batches, Pull, Request
from ..rpc.plane.prompt import PromptCall
from .partition.partition import Group, HostedPartition
from .store.store import DURABLE, Store
from .waiting import LongPolls

Beginning = Callable[[Any, memoryview, PromptCall], bool]


class Decisions(Protocol):
    """What a service decides, with a task or without."""

    def owned(self, request: Pull) -> tuple[HostedPartition, Group]:
        """The partition and the group of an owner's request."""
        ...

    def check_pull(self, request: Pull) -> tuple[HostedPartition, Group, int, bool]:
        """The partition, the group, the bytes that the answer may have, and whether it waits for messages."""
        ...

    def check_read(self, partition: HostedPartition, request: Pull) -> int:
        """The bytes that the answer may have."""
        ...

    def note_pulled(
        self, request: Pull, partition: HostedPartition, group: Group, upto: int, data: bytes
    ) -> None:
        """Note that the owner gets what is stored up to `upto`."""
        ...

    def batches(self, partition: HostedPartition, upto: int, parked_version: int) -> Batches:
        """The answer to a pull that got what is stored up to `upto`."""
        ...

    def decide_ack(self, request: Ack) -> tuple[int, Group, asyncio.Future[None] | None]:
        """The cursor, the group, and what to wait for before the cursor is told."""
        ...

    def acked(self, cursor: int, group: Group) -> Acked:
        """The answer to an ack that is durable."""
        ...


class PromptAnswers:
    """The part of a service that needs no task."""

    def __init__(self, service: Decisions, store: Store, waiting: LongPolls, clock: Clock) -> None:
        self._service = service
        self._store = store
        self._waiting = waiting
        self._boot_ns = clock.boot_ns
        self._beginnings: dict[type[Request], Beginning] = {
            Append: self._append, Pull: self._pull, Ack: self._ack,
        }  # fmt: skip

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        """See `DataService.begin`."""
        beginning = self._beginnings.get(type(request))
        return beginning is not None and beginning(request, payload, call)

    def _append(self, request: Append, payload: memoryview, call: PromptCall) -> bool:
        began_ns = self._boot_ns()
        if not self._store.commit.takes_now(len(payload)):
            return False
        durable, base_offset, duplicate = self._store.append(
            request.partition_id, payload, in_turn=True
        )

        def answer(done: asyncio.Future[None]) -> None:
            error = _error_of(done)
            if error is not None:
                call.refuse(error)
                return
            self._store.traffic.appends.observe(self._boot_ns() - began_ns)
            call.answer(Appended(base_offset, DURABLE, duplicate))

        durable.add_done_callback(answer)
        return True

    def _ack(self, request: Ack, _payload: memoryview, call: PromptCall) -> bool:
        cursor, group, saved = self._service.decide_ack(request)
        if saved is None:
            call.answer(self._service.acked(cursor, group))
            return True

        def answer(done: asyncio.Future[None]) -> None:
            error = _error_of(done)
            if error is not None:
                call.refuse(error)
            else:
                call.answer(self._service.acked(cursor, group))

        saved.add_done_callback(answer)
        return True

    def _pull(self, request: Pull, _payload: memoryview, call: PromptCall) -> bool:
        if request.tags:
            return False
        partition, group, bytes_max, waits = self._service.check_pull(request)
        if not waits:
            return self._answer_pull(request, partition, group, bytes_max, call)
        woken = self._waiting.begin(partition.partition_id, request.wait_ms)
        call.waits_for(woken)
        woken.add_done_callback(partial(self._woken, request, call))
        return True

    def _woken(self, request: Pull, call: PromptCall, woken: asyncio.Future[None]) -> None:
        if woken.cancelled():  # the client has left
            self._waiting.leave(request.partition_id, woken)
            return
        try:
            partition, group = self._service.owned(request)
            bytes_max = self._service.check_read(partition, request)
            answered = self._answer_pull(request, partition, group, bytes_max, call)
        except Exception as error:  # noqa: BLE001 - told to the client, or logged
            call.refuse(error)
            return
        if not answered:
            call.hand_on(replace(request, wait_ms=0))

    def _answer_pull(
        self,
        request: Pull,
        partition: HostedPartition,
        group: Group,
        bytes_max: int,
        call: PromptCall,
    ) -> bool:
        """Answer from memory; False: it has to be read from the disk, or has to wait for room."""
        data, upto = b"", request.offset
        if request.offset < partition.readable_offset:
            pieces, upto = self._store.cached(partition, request.offset, bytes_max=bytes_max)
            if not pieces or not call.take_room(bytes_max):
                return False
            data = b"".join(pieces)
        self._service.note_pulled(request, partition, group, upto, data)
        call.answer(self._service.batches(partition, upto, group.parked_version), data)
        return True


def _error_of(done: asyncio.Future[None]) -> BaseException | None:
    return asyncio.CancelledError() if done.cancelled() else done.exception()
