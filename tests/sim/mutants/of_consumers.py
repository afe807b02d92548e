"""Bugs of a consumer: deadlines, hand-over, lanes, acks."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Any

from keylane.consumer.assignments import Assignments
from keylane.consumer.client import Consumer
from keylane.consumer.handling import workers as workers_module
from keylane.consumer.handling.lanes import Lanes
from keylane.consumer.handling.stream import Stream
from keylane.consumer.handling.workers import Workers
from keylane.consumer.membership import Membership
from keylane.consumer.prefetch_budget import PrefetchBudget
from keylane.consumer.pulling import acks as acks_module
from keylane.consumer.pulling.acks import AckQueue
from keylane.consumer.pulling.fetch_offsets import FetchOffsets
from keylane.consumer.pulling.lifetime import Lifetime
from keylane.consumer.pulling.pull_client import PullClient
from keylane.consumer.reading.lineage_order import LineageOrder
from sim.mutants.mutant import Breaks, Patches


def deadline_not_checked(patches: Patches) -> None:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self._boot_ns = lambda: -1

    real = patches.set(Workers, "__init__", init)


def deadline_from_the_answer(patches: Patches) -> None:
    """The ttl counts from the arrival of the answer, not from the sending of the heartbeat."""

    def apply_grants(self: Any, grants: Any, _deadline_ms: int) -> None:
        real(self, grants, self._clock.boot_ms() + grants.ttl_ms - self._settings.margin_ms)

    real = patches.set(Assignments, "apply_grants", apply_grants)


def margin_on_the_wrong_side(patches: Patches) -> None:
    """The margin is added to the lease's end, not subtracted from it."""

    def apply_grants(self: Any, grants: Any, deadline_ms: int) -> None:
        real(self, grants, deadline_ms + 2 * self._settings.margin_ms)

    real = patches.set(Assignments, "apply_grants", apply_grants)


class _Calendar:
    def __init__(self, clock: Any) -> None:
        self.boot_ms = clock.wall_ms
        self.boot_ns = clock.wall_ns
        self.wall_ms = clock.wall_ms
        self.wall_ns = clock.wall_ns


def deadline_by_the_calendar(patches: Patches) -> None:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs["_environment"]
        kwargs["_environment"] = replace(given, clock=_Calendar(given.clock))
        real(self, *args, **kwargs)

    real = patches.set(Consumer, "__init__", init)


def released_before_handlers_end(patches: Patches) -> None:
    async def hand_over(self: Any, client: Any) -> None:
        await client.hand_over(flush_ms=self._settings.call_timeout_ms)
        await self._membership.report_release(client.session, client.partition_id, client.token)

    patches.set(Assignments, "_hand_over", hand_over)


def body_not_waited_for(patches: Patches) -> None:
    """A partition is handed over when `handover_ms` is up, in the middle of an iteration's body."""

    async def quiesce(self: Any, client: Any) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._handover_ms / 1000):
                await real(self, client)

    real = patches.set(Stream, "quiesce", quiesce)


def drained_said_early(patches: Patches) -> None:
    """A sealed partition is called drained before its messages are acked."""
    patches.set(FetchOffsets, "drained", property(lambda self: self.end_offset is not None))


def state_kept_over_grants(patches: Patches) -> None:
    """A token that was ended is used again, and messages that it had handled are handled again."""

    def start_hand_over(self: Any, client: Any) -> None:
        real(self, client)
        self._retired_tokens.clear()

    real = patches.set(Assignments, "start_hand_over", start_hand_over)


def moved_broker_not_followed(patches: Patches) -> None:
    def renew(self: Any, deadline_ms: int, address: str | None) -> None:
        real(self, deadline_ms, None)

    real = patches.set(PullClient, "renew", renew)


def lanes_ignore_keys(patches: Patches) -> None:
    def take(self: Any) -> Any:
        self.register_running()
        while not self.arrivals and self._stored:
            self._open()
        queue = self.due_retries or self.arrivals
        return queue.popleft() if queue else None

    patches.set(Lanes, "take", take)
    patches.set(Lanes, "finish", lambda self, key: None)


def lanes_run_backwards(patches: Patches) -> None:
    def finish(self: Any, key: bytes) -> Any:
        self.register_running()
        lane = self.busy_lanes.get(key)
        if lane and len(lane) > 1:
            lane.rotate(1)
        return real(self, key)

    real = patches.set(Lanes, "finish", finish)


def failed_acks_dropped(patches: Patches) -> None:
    def take(self: Any) -> Any:
        ranges = real(self)
        self.in_flight = []
        return ranges

    real = patches.set(AckQueue, "take", take)


def acks_join_over_a_gap(patches: Patches) -> None:
    def joined(ranges: Any) -> Any:
        parts = list(real(ranges))
        return [(parts[0][0], parts[-1][1])] if parts else parts

    real = patches.set(acks_module, "IntervalSet", joined)


def acked_when_handed_out(patches: Patches) -> None:
    def hand_out(self: Any, messages: Any) -> None:
        real(self, messages)
        for message in messages:
            client = message.delivery.client
            client._handled.mark_handled(message.offset)
            client._acks.send_soon()

    real = patches.set(Assignments, "hand_out", hand_out)


def failed_messages_acked(patches: Patches) -> None:
    def init(self: Any, handler: Any, **kwargs: Any) -> None:
        async def careless(message: Any) -> None:
            try:
                result = handler(message)
                if result is not None:
                    await result
            except RuntimeError:
                return

        real(self, careless, **kwargs)

    real = patches.set(Workers, "__init__", init)


def first_of_a_batch_dropped(patches: Patches) -> None:
    def hand_out(self: Any, messages: Any) -> None:
        real(self, messages[1:] if len(messages) > 2 else messages)

    real = patches.set(Assignments, "hand_out", hand_out)


def cursor_read_once_for_all_tokens(patches: Patches) -> None:
    """A new owner begins at the partition's end as it was when it came, not at the cursor."""

    async def acquire(self: Any) -> None:
        await real(self)
        offsets = self._offsets
        if offsets._acked.cursor == offsets.next_offset > 0:
            offsets.next_offset += 1

    real = patches.set(PullClient, "_acquire", acquire)


def lost_session_goes_on(patches: Patches) -> None:
    """A consumer keeps its partitions when the metaserver does not know its session any more."""
    patches.set(Assignments, "on_session_lost", lambda self: None)
    patches.set(Lifetime, "lapsed", lambda self, _now_ms: self.fenced)
    deadline_not_checked(patches)


def heartbeats_do_not_wait(patches: Patches) -> None:
    """Heartbeats do not say which version the consumer knows: the metaserver answers at once, and
    is asked again.
    """

    async def beat_once(self: Any, holder: Any) -> None:
        self._version = -1
        await real(self, holder)

    real = patches.set(Membership, "_send_heartbeat", beat_once)


def pulls_do_not_wait(patches: Patches) -> None:
    """A broker that has nothing new says so at once, and is asked again."""

    def init(self: Any, **kwargs: Any) -> None:
        kwargs["settings"] = replace(kwargs["settings"], pull_wait_ms=0)
        real(self, **kwargs)

    real = patches.set(PullClient, "__init__", init)


def retries_hold_their_workers(patches: Patches) -> None:
    """A failed message waits in its worker, which takes no other message meanwhile."""

    def init(self: Any, handler: Any, **kwargs: Any) -> None:
        async def holding(message: Any) -> None:
            try:
                result = handler(message)
                if result is not None:
                    await result
            except RuntimeError:
                await asyncio.sleep(
                    kwargs["backoff"].wait_ms(message.attempt, kwargs["rng"]) / 1000
                )
                raise

        real(self, holding, **kwargs)

    real = patches.set(Workers, "__init__", init)


def retries_hold_no_lane(patches: Patches) -> None:
    """While a message waits for its next try, the next one of its key runs."""

    def failed(self: Any, worker: Any, message: Any, error: BaseException) -> bool:
        waits = real(self, worker, message, error)
        if waits:
            self._lanes.release(message)
        return waits

    def finish(self: Any, key: bytes) -> None:
        self.register_running()
        self.busy_lanes.pop(key, None)

    real = patches.set(Workers, "_failed", failed)
    patches.set(Lanes, "finish", finish)


def awaitables_are_not_awaited(patches: Patches) -> None:
    """The awaitable that a handler returns is not awaited, and its message is acked."""

    left: list[Any] = []

    async def await_result(result: Any) -> None:
        left.append(asyncio.ensure_future(result))

    patches.set(workers_module, "await_result", await_result)


def room_of_pulls_is_never_free(patches: Patches) -> None:
    """What was pulled counts on once it is opened; the room is small, or no run would fill it."""

    def init(self: Any, *_args: Any, **_kwargs: Any) -> None:
        real(self, 10_000)

    real = patches.set(PrefetchBudget, "__init__", init)
    patches.set(PrefetchBudget, "release", lambda self, count: None)


def readers_pass_empty_partitions(patches: Patches) -> None:
    """A partition is read once its parents are, whatever they continue: an empty one is from the
    start.
    """

    def readable(self: Any) -> list[Any]:
        return [
            self._unread[number]
            for number in sorted(self._unread)
            if not any(parent in self._unread for parent in self._parents[number])
        ]

    patches.set(LineageOrder, "readable", readable)


BREAKS: tuple[Breaks, ...] = (
    deadline_not_checked,
    deadline_from_the_answer,
    margin_on_the_wrong_side,
    deadline_by_the_calendar,
    released_before_handlers_end,
    body_not_waited_for,
    drained_said_early,
    state_kept_over_grants,
    moved_broker_not_followed,
    lanes_ignore_keys,
    lanes_run_backwards,
    failed_acks_dropped,
    acks_join_over_a_gap,
    acked_when_handed_out,
    failed_messages_acked,
    first_of_a_batch_dropped,
    cursor_read_once_for_all_tokens,
    lost_session_goes_on,
    heartbeats_do_not_wait,
    pulls_do_not_wait,
    retries_hold_their_workers,
    retries_hold_no_lane,
    awaitables_are_not_awaited,
    room_of_pulls_is_never_free,
    readers_pass_empty_partitions,
)
