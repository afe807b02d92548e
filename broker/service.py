"""What a broker answers to each frame of the data plane.

Everything that decides on order happens before the first await: the server starts the frames of a connection in the
order in which they arrived.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ..protocol.clock import Clock
from ..protocol.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
    OverloadedError,
    TokenUnknownError,
)
from ..protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    Answer,
    Append,
    Appended,
    Batches,
    Pull,
    Read,
    Release,
    Released,
    Request,
)
from ..protocol.ids import check_offset
from ..protocol.limits import ACK_RANGES_MAX, PULL_BYTES_MAX, PULL_WAIT_MS_MAX
from .partition import Group, HostedPartition
from .progress import apply_ack, decide_ack
from .pull_lock import check_holder, decide_acquire, release, renew, take
from .store import Store
from .waiting import Waiting

Handled = tuple[Answer, bytes]


class BrokerService:
    """Answers requests out of a store."""

    def __init__(self, store: Store, *, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._waiting = Waiting()
        store.on_change(self._waiting.wake)
        self._handlers: dict[type[Any], Callable[[Any, memoryview], Awaitable[Handled]]] = {
            Append: self._append,
            Acquire: self._acquire,
            Pull: self._pull,
            Ack: self._ack,
            Release: self._release,
            Read: self._read,
        }

    async def handle(self, request: Request, payload: memoryview) -> Handled:
        """
        The answer to one request, and its payload.

        Raises:
            RefusedError and its kin: nothing was done.
            StorageError and its kin: see their fate.
        """
        kind = type(request)
        if payload and kind is not Append:
            raise InvalidRequestError(f"{kind.__name__} has no payload")
        return await self._handlers[kind](request, payload)

    async def _append(self, request: Append, payload: memoryview) -> Handled:
        durable, base_offset, duplicate = self._store.append(request.partition_id, payload)
        await durable
        return Appended(request.correlation_id, base_offset, self._store.level, duplicate), b""

    async def _acquire(self, request: Acquire, _payload: memoryview) -> Handled:
        token, session = request.token, request.session
        partition = self._store.state.partition(request.partition_id)
        partition.check_owners()
        group = partition.group_for_acquire(request.group)
        if decide_acquire(group.lock, token=token, session=session, ttl_ms=request.ttl_ms):
            durable = self._store.raise_fence(partition, group, token=token, session=session)
        else:
            durable = self._store.commit.flushed()
        group.skip_to(partition.first_offset)
        take(group.lock, ttl_ms=request.ttl_ms, now_ms=self._clock.boot_ms())
        answer = Acquired(
            request.correlation_id,
            group.acked.cursor,
            tuple(group.acked.ranges),
            partition.readable_offset,
            partition.ended,
        )
        saved = self._save(partition, group)
        await durable
        if saved is not None:
            await saved
        check_holder(group.lock, token=token, session=session)
        return answer, b""

    async def _pull(self, request: Pull, _payload: memoryview) -> Handled:
        partition, group = self._held(request)
        if not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
            raise InvalidRequestError(f"cannot wait {request.wait_ms} ms")
        bytes_max = _check_read(partition, request.offset, request.bytes_max)
        drained = partition.ended and request.offset == partition.next_offset
        if request.wait_ms and request.offset == partition.readable_offset and not drained:
            await self._waiting.wait(partition.partition_id, request.wait_ms)
            partition, group = self._held(request)
        answer = await self._batches(request, partition, bytes_max)
        check_holder(group.lock, token=request.token, session=request.session)
        return answer

    async def _read(self, request: Read, _payload: memoryview) -> Handled:
        partition = self._store.state.partition(request.partition_id)
        bytes_max = _check_read(partition, request.offset, request.bytes_max)
        return await self._batches(request, partition, bytes_max)

    async def _batches(
        self, request: Pull | Read, partition: HostedPartition, bytes_max: int
    ) -> Handled:
        data, upto = b"", request.offset
        if request.offset < partition.readable_offset:
            data, upto = await self._store.read(partition, request.offset, bytes_max=bytes_max)
        answer = Batches(
            request.correlation_id,
            partition.first_offset,
            partition.readable_offset,
            upto,
            partition.ended,
        )
        return answer, data

    async def _ack(self, request: Ack, _payload: memoryview) -> Handled:
        partition, group = self._held(request)
        ranges = request.ranges
        if len(ranges) > ACK_RANGES_MAX:
            raise OverloadedError(f"more than {ACK_RANGES_MAX} ranges in one ack")
        if ranges:
            decide_ack(group.acked, ranges, next_offset=partition.readable_offset)
            self._store.commit.check_room(0, though_held=True)
            if apply_ack(group.acked, ranges):
                group.version += 1
        cursor = group.acked.cursor
        saved = self._save(partition, group)
        if saved is not None:
            await saved
        return Acked(request.correlation_id, cursor), b""

    def _save(self, partition: HostedPartition, group: Group) -> Awaitable[None] | None:
        """
        What to wait for before a group's progress is told: an earlier ack may have met a full disk.

        Raises:
            BrokerReadOnlyError: it cannot be made durable now.
        """
        if group.version <= group.saved_version:
            return None
        self._store.commit.check_room(0, though_held=True)
        return self._store.save_progress(partition, group)

    async def _release(self, request: Release, _payload: memoryview) -> Handled:
        partition, group = self._held(request)
        release(group.lock)
        self._waiting.wake(partition.partition_id)
        return Released(request.correlation_id), b""

    def _held(self, request: Pull | Ack | Release) -> tuple[HostedPartition, Group]:
        """The partition and the group of the asker, who holds the lock, or takes it again, and renews it."""
        partition = self._store.state.partition(request.partition_id)
        partition.check_owners()
        group = partition.groups.get(request.group)
        if group is None:
            raise TokenUnknownError("the group never acquired this partition", token=request.token)
        check_holder(group.lock, token=request.token, session=request.session)
        renew(group.lock, now_ms=self._clock.boot_ms())
        return partition, group

    def close(self) -> None:
        """Answer the pulls that wait."""
        self._waiting.wake_all()


def _check_read(partition: HostedPartition, offset: int, bytes_max: int) -> int:
    check_offset(offset)
    if bytes_max < 1:
        raise InvalidRequestError(f"cannot read {bytes_max} bytes")
    if not partition.first_offset <= offset <= partition.readable_offset:
        raise OffsetOutOfRangeError(
            offset=offset,
            first_offset=partition.first_offset,
            next_offset=partition.readable_offset,
        )
    partition.readable_end(offset)
    return min(bytes_max, PULL_BYTES_MAX)
