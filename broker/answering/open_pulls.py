"""Pulls of owners that are answered without a task: a pull waits for messages, and goes on after a small answer.

    pull ─▶ cached ─┬─ small, all that there is ─▶ part ─▶ waits ─▶ woken ─▶ cached ─┬─ …
                    ╰─ else ─▶ answer                        ╰─ its time is over ─▶ answer, empty

So an owner whose messages come one by one asks once for many of them, and its broker is not woken to be asked.  A larger
answer ends the pull: while an owner handles it, the next one gathers more.

Invariants
    A part has all that is readable from the end of the part before on, and its owner is checked as for a pull.
    A group has one open pull of a partition: the next one ends it.
    A pull has at most PULL_ANSWERS_MAX answers, and all but the last are of PART_BYTES_MAX bytes at most: so much comes to
    an owner that takes no more.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import replace

from ...protocol.clock import Clock
from ...protocol.frames import Batches, Pull
from ...protocol.limits import PART_BYTES_MAX
from ...rpc.plane.prompt import PromptCall
from ..partition.partition import Group, HostedPartition
from ..store.store import Store
from .waiting import LongPolls


class PullDecisions(Protocol):
    """What a service decides of a pull, with a task or without."""

    def owned(self, request: Pull) -> tuple[HostedPartition, Group]:
        """The partition and the group of an owner's request."""
        ...

    def check_pull(self, request: Pull) -> tuple[HostedPartition, Group, int, bool]:
        """The partition, the group, the bytes that the answer may have, and whether it waits for messages."""
        ...

    def hold(self, group: Group, request: Pull, wait_ms: int) -> None:
        """Renew the pull lock of an owner whose pull waits, if it is still the owner."""
        ...

    def check_read(self, partition: HostedPartition, request: Pull) -> int:
        """The bytes that the answer may have."""
        ...

    def note_pulled(
        self, request: Pull, partition: HostedPartition, group: Group, upto: int, data: bytes
    ) -> None:
        """Note that the owner gets what is stored up to `upto`."""
        ...

    def batches(
        self, partition: HostedPartition, upto: int, parked_version: int, *, more: bool = False
    ) -> Batches:
        """The answer to a pull that got what is stored up to `upto`."""
        ...


class OpenPulls:
    """The pulls of a service that are answered without a task, by partition and group."""

    def __init__(
        self, service: PullDecisions, store: Store, waiting: LongPolls, clock: Clock
    ) -> None:
        self.service = service
        self.store = store
        self.waiting = waiting
        self.boot_ms = clock.boot_ms
        self.open: dict[tuple[int, str], OpenPull] = {}

    def begin(self, request: Pull, call: PromptCall) -> bool:
        """See `DataService.begin`."""
        if request.tags:
            return False
        partition, group, bytes_max, waits = self.service.check_pull(request)
        older = self.open.get((request.partition_id, request.group))
        if older is not None:
            older.end()
        pull = OpenPull(self, request, group, call)
        if waits:
            pull.wait()
            return True
        return pull.answer(partition, bytes_max)


class OpenPull:
    """A pull until its last answer."""

    __slots__ = ("_call", "_group", "_pulls", "_request", "_until_ms", "_woken")

    def __init__(self, pulls: OpenPulls, request: Pull, group: Group, call: PromptCall) -> None:
        self._pulls = pulls
        self._request = request
        """What is left of it."""
        self._call = call
        self._group = group
        """Whose pull lock is held while it waits."""
        self._until_ms = pulls.boot_ms() + request.wait_ms
        self._woken: asyncio.Future[None] | None = None
        """While it waits."""

    def wait(self) -> None:
        """Wait until the partition is woken, or the time of the pull is over."""
        request, pulls = self._request, self._pulls
        left_ms = max(1, self._until_ms - pulls.boot_ms())
        pulls.service.hold(self._group, request, left_ms)
        woken = self._woken = pulls.waiting.begin(request.partition_id, left_ms)
        pulls.open[request.partition_id, request.group] = self
        self._call.waits_for(woken)
        woken.add_done_callback(self._go_on)

    def _go_on(self, woken: asyncio.Future[None]) -> None:
        if woken is not self._woken:  # ended since it was woken
            return
        self._leave()
        if woken.cancelled():  # the client has left
            self._pulls.waiting.leave(self._request.partition_id, woken)
            self._pulls.service.hold(self._group, self._request, 0)
            return
        service, request = self._pulls.service, self._request
        try:
            partition, self._group = service.owned(request)
            bytes_max = service.check_read(partition, request)
            answered = self.answer(partition, bytes_max)
        except Exception as error:  # noqa: BLE001 - told to the client, or logged
            self._call.refuse(error)
            return
        if not answered:
            self._call.hand_on(replace(request, wait_ms=0))

    def answer(self, partition: HostedPartition, bytes_max: int) -> bool:
        """Answer from memory; False: it has to be read from the disk, or has to wait for room."""
        pulls, request, group, call = self._pulls, self._request, self._group, self._call
        data, upto = b"", request.offset
        if upto < partition.readable_offset:
            pieces, upto = pulls.store.cached(partition, upto, bytes_max=bytes_max)
            if not pieces or not call.take_room(bytes_max):
                return False
            data = b"".join(pieces)
        pulls.service.note_pulled(request, partition, group, upto, data)
        more = self._goes_on(partition, upto, len(data))
        answer = pulls.service.batches(partition, upto, group.parked_version, more=more)
        if not more:
            call.answer(answer, data)
            return True
        call.part(answer, data)
        self._request = replace(
            request,
            offset=upto,
            bytes_max=request.bytes_max - len(data),
            answers_max=request.answers_max - 1,
        )
        self.wait()
        return True

    def _goes_on(self, partition: HostedPartition, upto: int, size: int) -> bool:
        """Whether a further answer follows one of `size` bytes."""
        request = self._request
        return (
            request.answers_max > 1
            and 0 < size <= PART_BYTES_MAX
            and size < request.bytes_max
            and upto == partition.readable_offset
            and not partition.ended
            and self._call.takes_parts
            and self._pulls.boot_ms() < self._until_ms
        )

    def end(self) -> None:
        """Answer without messages: the owner has a newer pull."""
        woken, request = self._woken, self._request
        self._leave()
        if woken is not None:
            self._pulls.waiting.leave(request.partition_id, woken)
            woken.cancel()
        self._call.answer(Batches(0, request.offset, request.offset, False))

    def _leave(self) -> None:
        self._woken = None
        open_pulls, key = self._pulls.open, (self._request.partition_id, self._request.group)
        if open_pulls.get(key) is self:
            del open_pulls[key]
