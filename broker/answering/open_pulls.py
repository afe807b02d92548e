"""Answers owners' pulls: a pull needs no task to wait for messages, and stays open after a small
reply.

    pull ─▶ cached ─┬─ all readable, and small ─▶ part ─▶ waits ─▶ woken ─▶ cached ─┬─ …
                    ├─ otherwise ─▶ answer                   ╰─ timeout ─▶ answer, empty
                    ╰─ not cached, with tags, or no room ─▶ `read`, in a task

So an owner whose messages arrive one by one sends one request for many of them, and the broker does
not have to wake up for each. A larger reply ends the pull: while the owner handles it, more
messages accumulate for the next one.

Invariants
    A part contains everything readable since the previous part, and is sent only after the owner
    has been checked as for a new pull. A group has at most one open pull of a partition; a newer
    pull replaces it. A pull has at most PULL_ANSWERS_MAX replies. All but the last have at most
    PART_BYTES_MAX bytes, which bounds how much is sent to an owner that no longer wants messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from ...protocol.clock import Clock, round_to_tick
from ...protocol.errors import InvalidRequestError
from ...protocol.frames import Batches, Pull
from ...protocol.limits import PART_BYTES_MAX, PULL_ANSWERS_MAX, PULL_WAIT_MS_MAX
from ...protocol.offsets import IntervalSet, Range
from ...protocol.record import last_sent
from ...rpc.plane.prompt import Handled, PromptCall
from ...rpc.threads.turn import at_end
from ..partition.partition import Group, HostedPartition
from ..partition.pull_lock import check_holder
from ..store.store import Store
from .request_checks import check_owner, extend_lock, wanted_tags
from .stored_batches import batches_up_to, check_read, read_batches
from .tags import remove_unwanted_batches
from .waiting import LongPolls

LEFT_OUT_BYTES_MAX = 8 << 20
"""The maximum number of bytes that one pull reads and filters out before it is answered without
messages.
"""


class OpenPulls:
    """Answers owners' pulls. `open` maps partition and group to the waiting pull."""

    def __init__(self, store: Store, waiting: LongPolls, clock: Clock) -> None:
        self.store = store
        self.waiting = waiting
        self.boot_ms = clock.boot_ms
        self.boot_ns = clock.boot_ns
        self.latency = store.traffic.requests_of(Pull)
        self.open: dict[tuple[int, str], OpenPull] = {}

    def begin(self, request: Pull, call: PromptCall, now_ns: int) -> bool:
        """See `DataService.begin`."""
        now_ms = now_ns // 1_000_000
        if request.tags:
            wanted_tags(request)
        partition, group, bytes_max = self._check(request, now_ms)
        previous_pull = self.open.get((request.partition_id, request.group))
        if previous_pull is not None:
            previous_pull.end()
        pull = OpenPull(self, request, group, call, deadline_ms=now_ms + request.wait_ms)
        if request.wait_ms and request.offset == partition.readable_offset:
            is_drained = partition.ended and request.offset == partition.next_offset
            if not is_drained:
                pull.wait(now_ms)
                return True
        return pull.answer(partition, bytes_max, now_ns)

    def _check(self, request: Pull, now_ms: int) -> tuple[HostedPartition, Group, int]:
        """Check a pull and its owner. Return the partition, the group, and the maximum size of the
        reply in bytes.
        """
        partition, group = check_owner(self.store.state, request, now_ms)
        if not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(f"cannot wait {request.wait_ms} ms")
        if not 1 <= request.answers_max <= PULL_ANSWERS_MAX:
            raise InvalidRequestError(
                f"answers_max is from 1 to {PULL_ANSWERS_MAX}, not {request.answers_max}"
            )
        bytes_max = check_read(partition, request.offset, request.bytes_max)
        # The offset also covers messages that were pulled before a restart of this broker.
        group.suspects.record_pull(request.offset)
        return partition, group, bytes_max

    async def read(self, request: Pull) -> Handled:
        """Answer a pull from within a task, without waiting for messages. May wait for room and for
        the disk.
        """
        tags, began_ns = wanted_tags(request), self.boot_ns()
        partition, group, bytes_max = self._check(request, began_ns // 1_000_000)
        answer, data = await read_batches(
            self.store, partition, request, bytes_max, group.parked_version
        )
        if tags and data:
            answer, data = await self._filter_tags(request, partition, tags, answer, data)
        check_holder(group.lock, token=request.token, session=request.session)
        self.record_pull(request, partition, group, answer.upto, data, began_ns)
        return answer, data

    async def _filter_tags(
        self,
        request: Pull,
        partition: HostedPartition,
        tags: Sequence[bytes],
        answer: Batches,
        data: bytes,
    ) -> tuple[Batches, bytes]:
        """
        Remove batches without a wanted tag from a reply. If none remains, read more, up to
        LEFT_OUT_BYTES_MAX.

        Args:
            tags: the tags as UTF-8.
        """
        ranges: list[Range] = []
        offset, size = request.offset, 0
        while True:
            size += len(data)
            data, removed_ranges = remove_unwanted_batches(data, offset, tags)
            ranges += removed_ranges
            offset = answer.upto
            if data or offset >= partition.readable_offset or size >= LEFT_OUT_BYTES_MAX:
                return replace(answer, left_out=tuple(IntervalSet(ranges))), data
            bytes_max = check_read(partition, offset, request.bytes_max)
            next_request = replace(request, offset=offset)
            answer, data = await read_batches(
                self.store, partition, next_request, bytes_max, answer.parked_version
            )

    def record_pull(
        self,
        request: Pull,
        partition: HostedPartition,
        group: Group,
        end: int,
        data: bytes,
        began_ns: int,
    ) -> None:
        """Record that the owner has received `data`, the messages before offset `end`."""
        group.suspects.record_pull(end)
        if not data:
            return
        self.store.traffic.count_delivered(
            partition.facts.subject, messages=end - request.offset, size_bytes=len(data)
        )
        if group.timed is None:
            group.timed = last_sent(data)
        self.latency.observe(self.boot_ns() - began_ns)


class OpenPull:
    """A pull that has not received its last reply."""

    __slots__ = (
        "_call",
        "_deadline_ms",
        "_disconnect",
        "_group",
        "_loop",
        "_pulls",
        "_request",
        "_timer",
    )

    def __init__(
        self, pulls: OpenPulls, request: Pull, group: Group, call: PromptCall, *, deadline_ms: int
    ) -> None:
        self._pulls = pulls
        self._request = request
        """The part of the request that has not been answered yet."""
        self._call = call
        self._group = group
        """The group whose pull lock is held while this pull waits."""
        self._deadline_ms = deadline_ms
        self._loop = asyncio.get_running_loop()
        self._disconnect: asyncio.Future[None] | None = None
        """A future that is cancelled when the client disconnects. None before the pull first waits,
        and after its last reply.
        """
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, now_ms: int) -> None:
        """Wait until the partition is woken, or until the pull times out."""
        request, pulls = self._request, self._pulls
        deadline_ms = self._deadline_ms if self._deadline_ms > now_ms else now_ms + 1
        # `now_ms` may be slightly stale. Then the lock ends slightly early, and its owner acquires
        # it again.
        extend_lock(self._group, request, deadline_ms)
        if self._disconnect is None:
            self._open(deadline_ms - now_ms)
        pulls.waiting.add_listener(request.partition_id, self, self._on_wake)

    def _open(self, wait_ms: int) -> None:
        """Make this the group's open pull until `_close` is called. All its waits share a timer and
        a future.
        """
        request, loop = self._request, self._loop
        self._pulls.open[request.partition_id, request.group] = self
        self._timer = loop.call_at(round_to_tick(wait_ms / 1000, loop.time()), self._on_timeout)
        self._disconnect = loop.create_future()
        self._disconnect.add_done_callback(self._on_disconnect)
        self._call.cancel_on_disconnect(self._disconnect)

    def _close(self) -> None:
        """Stop the timer, stop watching the client, and remove this as the group's open pull."""
        if self._disconnect is not None and self._timer is not None:
            self._disconnect.remove_done_callback(self._on_disconnect)
            self._disconnect.cancel()  # the call also holds a reference to it
            self._timer.cancel()
        self._disconnect = self._timer = None
        open_pulls, key = self._pulls.open, (self._request.partition_id, self._request.group)
        if open_pulls.get(key) is self:
            del open_pulls[key]

    def _on_wake(self) -> None:
        # Resume at the end of this iteration of the event loop, when all batches of the commit are
        # readable. Each pull resumes separately, so that an exception in one does not affect the
        # others.
        at_end(self._resume, self._loop)

    def _on_timeout(self) -> None:
        self._deadline_ms = 0  # even if the timer fired slightly early
        self._pulls.waiting.remove_listener(self._request.partition_id, self)
        self._resume()

    def _on_disconnect(self, _disconnect: asyncio.Future[None]) -> None:
        if self._disconnect is not None:
            self._close()
            self._pulls.waiting.remove_listener(self._request.partition_id, self)
            extend_lock(self._group, self._request, self._pulls.boot_ms())

    def _resume(self) -> None:
        """Answer the pull after a wake-up or a timeout."""
        if self._disconnect is None:  # it has ended in the meantime
            return
        pulls, request = self._pulls, self._request
        now_ns = pulls.boot_ns()
        try:
            partition, self._group = check_owner(pulls.store.state, request, now_ns // 1_000_000)
            bytes_max = check_read(partition, request.offset, request.bytes_max)
            is_answered = self.answer(partition, bytes_max, now_ns)
        except Exception as error:  # noqa: BLE001 - reported to the client, or logged
            self._close()
            self._call.refuse(error)
            return
        if not is_answered:
            self._close()
            self._call.hand_to_task(replace(request, wait_ms=0))

    def answer(self, partition: HostedPartition, bytes_max: int, now_ns: int) -> bool:
        """Answer from memory. Return False if `OpenPulls.read` must answer instead. `now_ns` is
        when the pull arrived, or was woken.
        """
        now_ms = now_ns // 1_000_000
        pulls, request, group, call = self._pulls, self._request, self._group, self._call
        data, end = b"", request.offset
        if end < partition.readable_offset:
            if request.tags:
                return False
            pieces, end = pulls.store.read_cached(partition, end, bytes_max=bytes_max)
            if not pieces or not call.reserve_bytes(bytes_max):
                return False
            data = b"".join(pieces)
        size = len(data)
        pulls.record_pull(request, partition, group, end, data, now_ns)
        has_more = self._stays_open(partition, end, size, now_ms)
        answer = batches_up_to(partition, end, group.parked_version, more=has_more)
        if not has_more:
            self._close()
            call.answer(answer, data)
            return True
        call.send_part(answer, data)
        self._request = replace(
            request,
            offset=end,
            bytes_max=request.bytes_max - size,
            answers_max=request.answers_max - 1,
        )
        self.wait(now_ms)
        return True

    def _stays_open(self, partition: HostedPartition, end: int, size: int, now_ms: int) -> bool:
        """Return True if the pull stays open after a reply of `size` bytes."""
        request = self._request
        return (
            request.answers_max > 1
            and 0 < size <= PART_BYTES_MAX
            and size < request.bytes_max
            and end == partition.readable_offset
            and not partition.ended
            and now_ms < self._deadline_ms
            and self._call.accepts_parts
        )

    def end(self) -> None:
        """Answer without messages, because the group has sent a newer pull."""
        request = self._request
        self._close()
        self._pulls.waiting.remove_listener(request.partition_id, self)
        self._call.answer(Batches(0, request.offset, request.offset, False))
