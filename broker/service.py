"""Answers the frames of the data plane.

The server begins the frames of a connection in the order of arrival. Appends and acks are decided
before the first await, and therefore in that order. The exception is the start of a broker, when
frames wait until a metaserver has confirmed that this data folder belongs to the broker group. If
appends overtake each other at that time, they are refused because of their sequence numbers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ..protocol.clock import Clock
from ..protocol.errors import (
    BusyError,
    FencedError,
    InvalidRequestError,
    KeylaneError,
    OverloadedError,
)
from ..protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    AcquireShared,
    Append,
    Appended,
    ChangeParked,
    EditParked,
    Follow,
    Handed,
    Pull,
    PullShared,
    Read,
    Release,
    Released,
    Request,
    Schedule,
)
from ..protocol.limits import (
    ACK_RANGES_MAX,
)
from ..protocol.offsets import IntervalSet
from ..protocol.record import last_sent
from ..rpc.answer_budget import reserve_bytes
from ..rpc.plane.prompt import Handled, PromptCall
from .answering.awaited_call import AwaitedCall
from .answering.open_pulls import OpenPulls
from .answering.request_checks import (
    OwnersRequest,
    check_begun,
    check_failed,
    check_failing,
    check_held,
    check_owner,
    check_shared,
)
from .answering.stored_batches import check_read, read_batches
from .answering.unpack_checks import UnpackChecks
from .answering.waiting import LongPolls
from .background import BackgroundBudget
from .folder_ownership import FolderOwnership, check_folder_ownership, check_readable
from .partition.acks import apply_ack, decide_ack
from .partition.partition import Group, HostedPartition
from .partition.pull_lock import (
    SHARED,
    check_holder,
    check_session,
    decide_acquire,
    decide_promise,
    grant_lock,
    release_lock,
)
from .store.group_changes import check_registered
from .store.group_commit import DoneCallback
from .store.store import DURABLE, Store

FrameHandler = Callable[[Any, memoryview], Awaitable[Handled]]
PromptHandler = Callable[[Any, memoryview, PromptCall, int], bool]
"""A callable like `DataService.begin`. The last argument is the time at which the request arrived,
in nanoseconds since boot.
"""
_WITH_PAYLOAD = (Append, Schedule, ChangeParked, EditParked)
PROMISE_WAIT_MS = 2_000
"""How long a higher token waits at once for the end of a promise, in milliseconds. Its session then
tries again.
"""
_SERVED_ALWAYS = frozenset({Read, Follow})
"""The requests that a refused folder may answer: they change nothing."""
_TIMED_APART = frozenset({Append, Pull, PullShared, Ack, Read})
"""The requests whose handlers time them, because they may be answered without a task, or wait for
messages.
"""
_LIVE = frozenset({Append, Pull, PullShared, Ack})
"""The requests that show that live clients are using the broker."""


class BrokerService:
    """Answers requests of the data plane from a store."""

    def __init__(
        self, store: Store, *, clock: Clock, folder_ownership: FolderOwnership | None = None
    ) -> None:
        self._store = store
        self._folder_ownership = folder_ownership
        self._clock = clock
        self._boot_ns = clock.boot_ns
        self._long_polls = LongPolls()
        self._budget = BackgroundBudget()
        self._background_turns = asyncio.Lock()
        self._unpack_checks = UnpackChecks(store.run_read)
        self._pulls = OpenPulls(store, self._long_polls, clock)
        requests_of = store.traffic.requests_of
        self._append_latency, self._ack_latency = requests_of(Append), requests_of(Ack)
        store.on_change(self._long_polls.wake)
        self._handlers: dict[type[Any], FrameHandler] = {
            Append: self._append,
            Acquire: self._acquire,
            AcquireShared: self._acquire,
            Pull: self._pull,
            PullShared: self._pull_shared,
            Ack: self._ack,
            Release: self._release,
            Read: self._read,
        }
        self._prompt_handlers: dict[type[Request], PromptHandler] = {
            Append: self._begin_append,
            Pull: self._begin_pull,
            Ack: self._begin_ack,
        }

    def register_handler(self, kind: type[Request], handler: FrameHandler) -> None:
        """Register another object's handler for requests of this type."""
        self._handlers[kind] = handler

    async def handle(self, request: Request, payload: memoryview) -> Handled:
        """
        Handle a request, and return the answer with its payload.

        Raises:
            RefusedError and its subclasses: nothing was done.
            StorageError and its subclasses: the fate says whether the request was done.
        """
        kind = type(request)
        self._check_payload(kind, payload)
        if kind not in _SERVED_ALWAYS:
            await check_folder_ownership(self._folder_ownership)
        elif kind is Read:
            await check_readable(self._folder_ownership)
        if kind in _LIVE:
            self._budget.last_live_at_ms = self._clock.boot_ms()
        began_ns = self._boot_ns()
        handled = await self._handlers[kind](request, payload)
        if kind not in _TIMED_APART:
            self._store.traffic.requests_of(kind).observe(self._boot_ns() - began_ns)
        return handled

    def begin(self, request: Request, payload: memoryview, call: PromptCall) -> bool:
        """Implement `DataService.begin`."""
        folder_ownership = self._folder_ownership
        if folder_ownership is not None and (
            not folder_ownership.has_reported or folder_ownership.set_aside
        ):
            return False
        kind = type(request)
        if payload and kind not in _WITH_PAYLOAD:
            self._check_payload(kind, payload)
        begin = self._prompt_handlers.get(kind)
        if begin is None:
            return False
        now_ns = self._boot_ns()
        self._budget.last_live_at_ms = now_ns // 1_000_000
        return begin(request, payload, call, now_ns)

    @staticmethod
    def _check_payload(kind: type[Request], payload: memoryview) -> None:
        if payload and kind not in _WITH_PAYLOAD:
            raise InvalidRequestError(f"{kind.__name__} has no payload")

    def _begin_append(
        self, request: Append, payload: memoryview, call: PromptCall, began_ns: int
    ) -> bool:
        if not self._store.commit.has_room_now(len(payload)):
            return False
        if self._unpack_checks.must_wait(request.partition_id, payload):
            return False
        self._append_batch(request, payload, call, began_ns)
        return True

    async def _append(self, request: Append, payload: memoryview) -> Handled:
        call, began_ns = AwaitedCall(self.handle), self._boot_ns()
        unpacks = await self._unpack_checks.wait(request.partition_id, payload)
        async with self._store.commit.admission(len(payload)):
            self._append_batch(request, payload, call, began_ns, unpacks=unpacks)
        return await call.wait_answer()

    def _append_batch(
        self,
        request: Append,
        payload: memoryview,
        call: PromptCall,
        began_ns: int,
        *,
        unpacks: bool = False,
    ) -> None:
        """Append a batch that was admitted, and answer once it is durable. `unpacks` means that the
        batch is known to be unpackable.
        """
        store = self._store

        def on_durable(error: KeylaneError | None) -> None:
            if error is not None:
                call.refuse(error)
                return
            self._append_latency.observe(self._boot_ns() - began_ns)
            call.answer(Appended(base_offset, DURABLE, duplicate, store.commit.copy_wait.folders))

        base_offset, duplicate = store.append(
            request.partition_id, payload, on_durable, is_admitted=True, unpacks=unpacks
        )

    async def _acquire(self, request: Acquire | AcquireShared, _payload: memoryview) -> Handled:
        """Raise the fence of a group to the caller's token, durably, and grant the pull lock."""
        check_session(request.session)
        is_shared = isinstance(request, AcquireShared)
        token, session = request.token, SHARED if is_shared else request.session
        partition = self._store.state.partition(request.partition_id)
        partition.check_fences_known()
        self._store.first_offsets.raise_pending(request.partition_id)
        group = partition.group_for_acquire(request.group)
        if partition.forgotten:
            partition.check_not_forgotten(request.group, token)
        if 0 < token <= self._store.fence_floor:
            raise FencedError(token=token, current_token=self._store.fence_floor)
        if request.group not in partition.groups:
            check_registered(partition, request.group)
        raises_fence = decide_acquire(
            group.lock, token=token, session=session, ttl_ms=request.ttl_ms
        )
        if raises_fence and self._store.promise_left_ms(group):
            await self._wait_for_promise(partition, group, token)
            return await self._acquire(request, _payload)  # much may have changed meanwhile
        if raises_fence:
            # The messages that sessions of a shared group had in flight prove nothing once the
            # group is exclusive: none of those sessions was the only owner.
            became_exclusive = group.lock.is_shared and not is_shared
            was_released = became_exclusive or group.lock.released or group.lock.session == session
            durable = self._store.raise_fence(partition, group, token=token, session=session)
            group.clear_hanging()
            if group.suspects.on_new_owner(is_released=was_released):
                group.mark_changed()
        else:
            durable = self._store.commit.wait_flushed()
        group.ack_removed(partition.first_offset)
        grant_lock(group.lock, ttl_ms=request.ttl_ms, now_ms=self._clock.boot_ms())
        answer = Acquired(
            group.acked.cursor,
            tuple(group.acked.ranges),
            partition.readable_offset,
            partition.ended,
            tuple(pair for pair in group.attempts.items() if pair[0] not in group.acked),
            group.parked_version,
            () if group.parked is None else tuple(group.parked.adopted_parents),
            *(
                (0, ())
                if is_shared
                else (
                    group.suspects.upto,
                    tuple(group.suspects.unacked(group.acked)),
                )
            ),
            () if group.parked is None else tuple(group.parked.adoption_tokens.items()),
            not is_shared and group.suspects.unreleased,
        )
        save_future = self._save(partition, group)
        await durable
        if save_future is not None:
            await save_future
        check_holder(group.lock, token=token, session=session)
        if is_shared:
            now_ms = self._clock.boot_ms()
            group.current_in_flight().add_session(
                request.session, ttl_ms=request.ttl_ms, now_ms=now_ms
            )
        return answer, b""

    async def _wait_for_promise(self, partition: HostedPartition, group: Group, token: int) -> None:
        """End the promise to a group's owner, and wait until it has run out, or the owner has
        released the lock. Raises BusyError after PROMISE_WAIT_MS.
        """
        deadline_ms = self._clock.boot_ms() + PROMISE_WAIT_MS
        while True:
            try:
                return self._store.check_not_promised(partition.partition_id, group, token)
            except BusyError:
                wait_ms = min(
                    self._store.promise_left_ms(group), deadline_ms - self._clock.boot_ms()
                )
                if wait_ms <= 0:
                    raise
            await self._long_polls.wait(partition.partition_id, wait_ms)

    def _begin_pull(
        self, request: Pull, _payload: memoryview, call: PromptCall, now_ns: int
    ) -> bool:
        return self._pulls.begin(request, call, now_ns)

    async def _pull(self, request: Pull, _payload: memoryview) -> Handled:
        if request.wait_ms:
            call = AwaitedCall(self.handle)
            if self._pulls.begin(request, call, self._boot_ns()):
                return await call.wait_answer()
        return await self._pulls.read(request)

    async def _pull_shared(self, request: PullShared, _payload: memoryview) -> Handled:
        """Hand out free messages of a shared group, after waiting for some if necessary."""
        partition, group = self._check_owner(request)
        bytes_max = check_shared(request)
        session = request.session
        deadline_ms = self._clock.boot_ms() + request.wait_ms
        while True:
            now_ms = self._clock.boot_ms()
            group.ack_removed(partition.first_offset)
            in_flight = group.current_in_flight()
            in_flight.check_not_released(session)
            in_flight.free_expired(now_ms)
            if group.suspects.on_session_expired(in_flight.pop_unreleased(), group.acked):
                group.mark_changed()  # becomes durable with the next ack
            ranges = in_flight.hand_out(
                group.acked,
                session,
                count_max=request.count_max,
                readable_offset=partition.readable_offset,
                now_ms=now_ms,
                in_flight_ms=request.in_flight_ms,
                isolated_offsets=group.suspects.isolated,
            )
            is_drained = partition.ended and group.acked.cursor >= partition.next_offset
            if is_drained and (save_future := self._save(partition, group)) is not None:
                # The metaserver will store that the partition is drained, so this broker must not
                # forget it when it restarts.
                await save_future
                partition, group = self._check_owner(request)
            if ranges or is_drained or now_ms >= deadline_ms:
                break
            due_ms = max(now_ms + 1, min(deadline_ms, in_flight.next_deadline_ms))
            await self._long_polls.wait(partition.partition_id, due_ms - now_ms)
            partition, group = self._check_owner(request)
        data, began_ns = b"", self._boot_ns()
        if ranges:
            try:
                start = ranges[0][0]
                partition.readable_end(start)
                await reserve_bytes(bytes_max)
                data, end_offset = await self._store.read(partition, start, bytes_max=bytes_max)
                partition, group = self._check_owner(request)
                ranges = in_flight.free_from(session, ranges, end_offset=end_offset)
            except BaseException:
                in_flight.free_from(session, ranges, end_offset=0)
                self._long_polls.wake(partition.partition_id)
                raise
        suspects, tries, handed_out = group.suspects.begun, group.attempts, IntervalSet(ranges)
        answer = Handed(
            tuple(ranges),
            group.durable_cursor,
            partition.readable_offset,
            partition.ended,
            tuple(pair for pair in suspects.items() if pair[0] in handed_out) if suspects else (),
            tuple(pair for pair in tries.items() if pair[0] in handed_out) if tries else (),
        )
        if data:
            self._store.traffic.count_delivered(
                partition.facts.subject,
                messages=sum(end - start for start, end in ranges),
                size_bytes=len(data),
            )
            if group.timed is None:
                group.timed = last_sent(data)
            self._store.traffic.requests_of(PullShared).observe(self._boot_ns() - began_ns)
        return answer, data

    async def _read(self, request: Read, _payload: memoryview) -> Handled:
        partition = self._store.state.partition(request.partition_id)
        bytes_max = check_read(partition, request.offset, request.bytes_max)
        if request.wait_ms:
            partition = await self._long_polls.wait_to_read(request, self._store.state.partition)
            check_read(partition, request.offset, bytes_max)
        began_ns = self._boot_ns()
        if request.background:
            bytes_max = await self.wait_background_turn(bytes_max)
            check_read(partition, request.offset, bytes_max)
        answer, data = await read_batches(self._store, partition, request, bytes_max)
        self._store.traffic.count_delivered(
            partition.facts.subject, messages=answer.upto - request.offset, size_bytes=len(data)
        )
        self._store.traffic.requests_of(Read).observe(self._boot_ns() - began_ns)
        return answer, data

    async def wait_background_turn(self, wanted_bytes: int) -> int:
        """Wait until a job's read may begin, and return the maximum size of its answer in bytes."""
        async with self._background_turns:
            wait_ms = self._budget.wait_ms(self._clock.boot_ms())
            # Even a sleep of 0 lets live requests that have arrived begin first.
            await asyncio.sleep(wait_ms / 1000)
        return self._budget.reserve(wanted_bytes, self._clock.boot_ms())

    def _begin_ack(self, request: Ack, _payload: memoryview, call: PromptCall, now_ns: int) -> bool:
        cursor, partition, group = self._apply_ack(request, now_ns // 1_000_000)
        promise_ms, is_wanted = 0, False
        unsaved = 1  # records that must be durable before the answer; below 0: it was refused

        def on_saved(error: KeylaneError | None) -> None:
            nonlocal unsaved
            unsaved -= 1
            if error is not None and unsaved >= 0:
                unsaved = -1
                call.refuse(error)
            if unsaved:
                return
            timed = group.timed
            if timed is not None and timed[0] in group.acked:
                group.timed = None
                latency = self._store.traffic.group(partition.facts.subject, group.name).latency
                latency.observe(self._clock.wall_ns() - timed[1])
            self._ack_latency.observe(self._boot_ns() - now_ns)
            call.answer(Acked(cursor, group.parked_version, promise_ms, is_wanted))

        if request.promise_ms > 0:
            promise_ms = decide_promise(
                group.lock,
                token=request.token,
                wanted_ms=request.promise_ms,
                now_ms=now_ns // 1_000_000,
            )
            is_wanted = group.lock.waiting_token > request.token
        if promise_ms:
            unsaved = 2
            self._store.record_promise(partition, group, promise_ms, on_saved)
        if not self._save_then(partition, group, on_saved):
            on_saved(None)
        return True

    async def _ack(self, request: Ack, payload: memoryview) -> Handled:
        call = AwaitedCall(self.handle)
        self._begin_ack(request, payload, call, self._boot_ns())
        return await call.wait_answer()

    def _apply_ack(self, request: Ack, now_ms: int) -> tuple[int, HostedPartition, Group]:
        """
        Apply an ack at `now_ms`, in milliseconds since boot.

        Returns:
            The cursor, the partition and the group. The caller must save the progress of the group
            before it reports the cursor.
        """
        partition, group = check_owner(self._store.state, request, now_ms)
        ranges = request.ranges
        if request.held:
            check_held(request, partition)
        if len(ranges) > ACK_RANGES_MAX:
            raise OverloadedError(f"more than {ACK_RANGES_MAX} ranges in one ack")
        if ranges:
            decide_ack(group.acked, ranges, next_offset=partition.readable_offset)
            self._store.commit.check_room(0, is_control=True)
            if apply_ack(group.acked, ranges):
                group.mark_changed()
            if group.lock.session == SHARED:
                group.current_in_flight().remove(ranges)
                if group.suspects.begun:  # the next message may be one that is handled alone
                    self._long_polls.wake(partition.partition_id)
        if request.failed:
            check_failed(request, partition)
            self._store.commit.check_room(0, is_control=True)
            failed_tries = group.record_failures(request.failed)
            traffic = self._store.traffic
            traffic.group(partition.facts.subject, group.name).failed_tries += failed_tries
        if request.failing is not None:
            check_failing(request.failing, partition)
            group.set_failing(request.failing)
        if request.begun:
            check_begun(request, partition)
            self._store.commit.check_room(0, is_control=True)
            group.begin_suspects(request.begun)
        if request.held and group.lock.session == SHARED:
            group.current_in_flight().extend_deadlines(
                group.acked,
                request.session,
                request.held,
                now_ms=now_ms,
                in_flight_ms=request.in_flight_ms,
            )
        return group.acked.cursor, partition, group

    def _save_then(self, partition: HostedPartition, group: Group, on_saved: DoneCallback) -> bool:
        """
        Save a group's progress if it has changed since it was last durable, and then call
        `on_saved`.

        Returns:
            False if the progress is already durable; `on_saved` is then not called. If True, the
            progress must not be reported before `on_saved` is called.

        Raises:
            BrokerReadOnlyError: the progress cannot be made durable at present.
        """
        if not group.has_unsaved_progress:
            return False
        self._store.commit.check_room(0, is_control=True)
        self._store.save_progress_then(partition, group, on_saved)
        return True

    def _save(self, partition: HostedPartition, group: Group) -> asyncio.Future[None] | None:
        """Save the progress like `_save_then`, but return a future instead of taking a callback.
        Return None if the progress is already durable.
        """
        durable, saves = self._store.commit.call_with_future(
            partial(self._save_then, partition, group)
        )
        return durable if saves else None

    def _check_owner(self, request: OwnersRequest) -> tuple[HostedPartition, Group]:
        return check_owner(self._store.state, request, self._clock.boot_ms())

    async def _release(self, request: Release, _payload: memoryview) -> Handled:
        """Release the pull lock or, in a shared group, the messages in flight to the session."""
        partition, group = self._check_owner(request)
        if group.lock.is_shared:
            group.current_in_flight().release_session(request.session)
        else:
            release_lock(group.lock)
            group.clear_hanging()
            if group.parked is not None:
                group.parked.clear_owner_tokens()
        self._long_polls.wake(partition.partition_id)
        if not group.lock.is_shared and group.suspects.on_released():
            group.mark_changed()
            if (save_future := self._save(partition, group)) is not None:
                await save_future
        return Released(), b""

    @property
    def waiting(self) -> int:
        """The number of pulls that wait for messages."""
        return self._long_polls.count

    def close(self) -> None:
        """Answer all waiting pulls."""
        self._long_polls.wake_all()
