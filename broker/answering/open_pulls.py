"""Pulls of owners that are answered without a task: a pull waits for messages, and goes on after a
small answer.

    pull ─▶ cached ─┬─ small, all that there is ─▶ part ─▶ waits ─▶ woken ─▶ cached ─┬─ …
                    ╰─ else ─▶ answer                        ╰─ its time is over ─▶ answer, empty

So an owner whose messages come one by one asks once for many of them, and its broker is not woken
to be asked.  A larger answer ends the pull: while an owner handles it, the next one gathers more.

Invariants
    A part has all that is readable from the end of the part before on, and its owner is checked as
    for a pull. A group has one open pull of a partition: the next one ends it. A pull has at most
    PULL_ANSWERS_MAX answers, and all but the last are of PART_BYTES_MAX bytes at most: so much
    comes to an owner that takes no more.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import replace

from ...protocol.clock import Clock, at_a_tick
from ...protocol.frames import Batches, Pull
from ...protocol.limits import PART_BYTES_MAX
from ...rpc.plane.prompt import PromptCall
from ...rpc.threads.turn import at_end
from ..partition.partition import Group, HostedPartition
from ..store.store import Store
from .waiting import LongPolls


class PullDecisions(Protocol):
    """What a service decides of a pull, with a task or without."""

    def owned(self, request: Pull, now_ms: int) -> tuple[HostedPartition, Group]:
        """The partition and the group of an owner's request."""
        ...

    def check_pull(self, request: Pull, now_ms: int) -> tuple[HostedPartition, Group, int, bool]:
        """The partition, the group, the bytes that the answer may have, and whether it waits for
        messages.
        """
        ...

    def hold(self, group: Group, request: Pull, until_ms: int) -> None:
        """Renew the pull lock of an owner whose pull waits until then, if it is still the owner."""
        ...

    def check_read(self, partition: HostedPartition, offset: int, bytes_max: int) -> int:
        """The bytes that the answer may have."""
        ...

    def note_pulled(
        self, request: Pull, partition: HostedPartition, group: Group, upto: int, size_bytes: int
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
        self.boot_ns = clock.boot_ns
        self.open: dict[tuple[int, str], OpenPull] = {}

    def begin(self, request: Pull, call: PromptCall, now_ms: int) -> bool:
        """See `DataService.begin`."""
        if request.tags:
            return False
        partition, group, bytes_max, waits = self.service.check_pull(request, now_ms)
        older = self.open.get((request.partition_id, request.group))
        if older is not None:
            older.end()
        pull = OpenPull(self, request, group, call, until_ms=now_ms + request.wait_ms)
        if waits:
            pull.wait(now_ms)
            return True
        return pull.answer(partition, bytes_max, now_ms)


class OpenPull:
    """A pull until its last answer."""

    __slots__ = (
        "_call",
        "_client",
        "_end",
        "_group",
        "_loop",
        "_pulls",
        "_request",
        "_until_ms",
    )

    def __init__(
        self, pulls: OpenPulls, request: Pull, group: Group, call: PromptCall, *, until_ms: int
    ) -> None:
        self._pulls = pulls
        self._request = request
        """What is left of it."""
        self._call = call
        self._group = group
        """Whose pull lock is held while it waits."""
        self._until_ms = until_ms
        self._loop = asyncio.get_running_loop()
        self._client: asyncio.Future[None] | None = None
        """Cancelled when the client leaves; None before the pull has waited, and behind its last
        answer.
        """
        self._end: asyncio.TimerHandle | None = None

    def wait(self, now_ms: int) -> None:
        """Wait until the partition is woken, or the time of the pull is over."""
        request, pulls = self._request, self._pulls
        until_ms = self._until_ms if self._until_ms > now_ms else now_ms + 1
        # By a reading that is a little old the lock ends a little early, and its owner takes it
        # again.
        pulls.service.hold(self._group, request, until_ms)
        if self._client is None:
            self._open(until_ms - now_ms)
        pulls.waiting.listen(request.partition_id, self, self._woken)

    def _open(self, wait_ms: int) -> None:
        """Be the open pull of the group until `_close`; one timer and one future serve all
        waits.
        """
        request, loop = self._request, self._loop
        self._pulls.open[request.partition_id, request.group] = self
        self._end = loop.call_at(at_a_tick(wait_ms / 1000, loop.time()), self._time_is_over)
        self._client = loop.create_future()
        self._client.add_done_callback(self._client_left)
        self._call.waits_for(self._client)

    def _close(self) -> None:
        if self._client is not None and self._end is not None:
            self._client.remove_done_callback(self._client_left)
            self._client.cancel()  # for who keeps it until it is done
            self._end.cancel()
        self._client = self._end = None
        open_pulls, key = self._pulls.open, (self._request.partition_id, self._request.group)
        if open_pulls.get(key) is self:
            del open_pulls[key]

    def _woken(self) -> None:
        # All batches of the commit that has woken it are there then.  Each by itself: a fault of
        # one concerns no other.
        at_end(self._go_on, self._loop)

    def _time_is_over(self) -> None:
        self._until_ms = 0  # also where a tick comes before it
        self._pulls.waiting.leave(self._request.partition_id, self)
        self._go_on()

    def _client_left(self, _client: asyncio.Future[None]) -> None:
        if self._client is not None:
            self._close()
            self._pulls.waiting.leave(self._request.partition_id, self)
            self._pulls.service.hold(self._group, self._request, self._pulls.boot_ns() // 1_000_000)

    def _go_on(self) -> None:
        """Answer; the pull was woken, or its time is over."""
        if self._client is None:  # ended since it was woken
            return
        pulls, request = self._pulls, self._request
        service, now_ms = pulls.service, pulls.boot_ns() // 1_000_000
        try:
            partition, self._group = service.owned(request, now_ms)
            bytes_max = service.check_read(partition, request.offset, request.bytes_max)
            answered = self.answer(partition, bytes_max, now_ms)
        except Exception as error:  # noqa: BLE001 - told to the client, or logged
            self._close()
            self._call.refuse(error)
            return
        if not answered:
            self._close()
            self._call.hand_on(replace(request, wait_ms=0))

    def answer(self, partition: HostedPartition, bytes_max: int, now_ms: int) -> bool:
        """Answer from memory; False: it has to be read from the disk, or has to wait for room."""
        pulls, request, group, call = self._pulls, self._request, self._group, self._call
        data, upto = b"", request.offset
        if upto < partition.readable_offset:
            pieces, upto = pulls.store.cached(partition, upto, bytes_max=bytes_max)
            if not pieces or not call.take_room(bytes_max):
                return False
            data = b"".join(pieces)
        size = len(data)
        pulls.service.note_pulled(request, partition, group, upto, size)
        more = self._goes_on(partition, upto, size, now_ms)
        answer = pulls.service.batches(partition, upto, group.parked_version, more=more)
        if not more:
            self._close()
            call.answer(answer, data)
            return True
        call.part(answer, data)
        self._request = replace(
            request,
            offset=upto,
            bytes_max=request.bytes_max - size,
            answers_max=request.answers_max - 1,
        )
        self.wait(now_ms)
        return True

    def _goes_on(self, partition: HostedPartition, upto: int, size: int, now_ms: int) -> bool:
        """Whether a further answer follows one of `size` bytes."""
        request = self._request
        return (
            request.answers_max > 1
            and 0 < size <= PART_BYTES_MAX
            and size < request.bytes_max
            and upto == partition.readable_offset
            and not partition.ended
            and now_ms < self._until_ms
            and self._call.takes_parts
        )

    def end(self) -> None:
        """Answer without messages: the owner has a newer pull."""
        request = self._request
        self._close()
        self._pulls.waiting.leave(request.partition_id, self)
        self._call.answer(Batches(0, request.offset, request.offset, False))
