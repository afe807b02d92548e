"""Bugs of a consumer: deadlines, hand-over, lanes, acks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from keylane.consumer import session_shell
from keylane.consumer.client import Consumer
from keylane.consumer.dispatch import jobs
from keylane.consumer.dispatch.jobs import MessageJobs
from keylane.consumer.dispatch.loop import LoopDispatch
from keylane.consumer.group.assignments import Assignments
from keylane.consumer.group.hand_overs import HandOvers
from keylane.consumer.group.membership import Membership
from keylane.consumer.prefetch_budget import PrefetchBudget
from keylane.consumer.reading.lineage_order import LineageOrder
from keylane.consumer.session import step
from keylane.consumer.session.lanes import ClosedBatch, KeyLanes
from keylane.consumer.session.offsets import NEVER, HandledOffsets, PullOffsets
from keylane.consumer.session.state import PartitionSession, SessionPhase, Tenure
from keylane.consumer.session_shell import SessionShell
from sim.mutants.mutant import Breaks, Patches
from sim.mutants.sessions import ForgivingKeys, NeverBusy


def deadline_not_checked(patches: Patches) -> None:
    """A partition is handed over at the end of its lease, and nothing else looks at that."""

    def renew(self: Any, _until_ms: int, _now_ms: int) -> None:
        self.until_ms = NEVER

    patches.set(Tenure, "renew", renew)


def deadline_from_the_answer(patches: Patches) -> None:
    """The ttl counts from the arrival of the answer, not from the sending of the heartbeat."""

    def apply_grants(self: Any, grants: Any, _deadline_ms: int) -> None:
        real(self, grants, self._held._clock.boot_ms() + grants.ttl_ms - _margin_ms(self))

    real = patches.set(Assignments, "apply_grants", apply_grants)


def _margin_ms(assignments: Any) -> int:
    return int(assignments._effective.settings.margin_ms)


def margin_on_the_wrong_side(patches: Patches) -> None:
    """The margin is added to the lease's end, not subtracted from it."""

    def apply_grants(self: Any, grants: Any, deadline_ms: int) -> None:
        real(self, grants, deadline_ms + 2 * _margin_ms(self))

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
    async def hand_over_now(self: Any, client: Any, *, is_lost: bool) -> None:
        await client.hand_over(flush_ms=self._settings.call_timeout_ms)
        if (releases := self._membership.releases) is not None:
            lease = client.state.tenure.lease
            await releases.report(lease.session, client.partition_id, lease.token)

    def proceed(session: Any, now_ms: int) -> None:
        lanes = session.lanes
        in_hand, run = lanes.in_hand, lanes.run
        if session.tenure.phase is SessionPhase.STOPPING:
            lanes.in_hand, lanes.run = {}, []
        real(session, now_ms)
        lanes.in_hand, lanes.run = in_hand, run

    patches.set(HandOvers, "hand_over", hand_over_now)
    real = patches.set(step, "proceed", proceed)


def body_not_waited_for(patches: Patches) -> None:
    """A partition is handed over when `handover_ms` is up, in the middle of an iteration's body."""

    def cancel(self: Any, shell: Any) -> None:
        self._loop.call_soon(self._give_up, shell)

    patches.set(LoopDispatch, "cancel", cancel)


def drained_said_early(patches: Patches) -> None:
    """A sealed partition is called drained before its messages are acked."""
    early = property(lambda self: self.offsets.end_offset is not None)
    patches.set(PartitionSession, "is_drained", early)


def state_kept_over_grants(patches: Patches) -> None:
    """A token that was ended is used again, and messages that it had handled are handled again."""

    def start_hand_over(self: Any, client: Any) -> None:
        real(self, client)
        self._held._retired_tokens.clear()

    real = patches.set(Assignments, "start_hand_over", start_hand_over)


def moved_broker_not_followed(patches: Patches) -> None:
    def renew(self: Any, deadline_ms: int, address: str | None) -> None:
        real(self, deadline_ms, None)

    real = patches.set(SessionShell, "renew", renew)


def lanes_ignore_keys(patches: Patches) -> None:
    def init(self: Any, **kwargs: Any) -> None:
        real_init(self, **kwargs)
        self.busy = NeverBusy()

    def clear(self: Any) -> None:
        real_clear(self)
        self.busy = NeverBusy()

    real_init = patches.set(KeyLanes, "__init__", init)
    real_clear = patches.set(KeyLanes, "clear", clear)


def lanes_run_backwards(patches: Patches) -> None:
    def pass_on(self: Any, key: bytes) -> None:
        self.busy[key].rotate(1)
        real(self, key)

    real = patches.set(KeyLanes, "pass_on", pass_on)


def failed_acks_dropped(patches: Patches) -> None:
    def retract(self: Any, *, is_refused: bool = False) -> bool:
        if not is_refused:
            self.in_flight = ()
        return bool(real(self, is_refused=is_refused))

    real = patches.set(HandledOffsets, "retract", retract)


def acks_join_over_a_gap(patches: Patches) -> None:
    def take(self: Any) -> Any:
        ranges = real(self)
        if ranges:
            self.in_flight = ((ranges[0][0], ranges[-1][1]),)
        return self.in_flight

    real = patches.set(HandledOffsets, "take", take)


def acked_when_handed_out(patches: Patches) -> None:
    def careless(session: Any, event: Any, now_ms: int) -> Any:
        ready = real(session, event, now_ms)
        for message in ready.hand_out:
            session.acks.handled.add(message.offset, message.offset + 1)
            session.make_ack_due(now_ms)
        return ready

    real = patches.set(session_shell, "step", careless)


def failed_messages_acked(patches: Patches) -> None:
    def init(self: Any, handler: Any, pool: Any) -> None:
        async def careless(message: Any) -> None:
            try:
                result = handler(message)
                if result is not None:
                    await result
            except RuntimeError:
                return

        real(self, careless, pool)

    real = patches.set(MessageJobs, "__init__", init)


def first_of_a_batch_dropped(patches: Patches) -> None:
    def open_batch(self: Any) -> Any:
        messages = real(self)
        return messages[1:] if len(messages) > 2 else messages

    real = patches.set(ClosedBatch, "open", open_batch)


def cursor_read_once_for_all_tokens(patches: Patches) -> None:
    """A new owner begins at the partition's end as it was when it came, not at the cursor."""

    def begin(self: Any, cursor: int, ranges: Any) -> None:
        real(self, cursor, ranges)
        if cursor > 0:
            self.next_offset += 1

    real = patches.set(PullOffsets, "begin", begin)


def lost_session_goes_on(patches: Patches) -> None:
    """A consumer keeps its partitions when the metaserver does not know its session any more."""
    patches.set(Assignments, "on_session_lost", lambda self: None)
    patches.set(SessionShell, "lapsed", property(lambda self: self.state.tenure.fence is not None))
    deadline_not_checked(patches)


def heartbeats_do_not_wait(patches: Patches) -> None:
    """Heartbeats do not say which version the consumer knows: the metaserver answers at once, and
    is asked again.
    """

    async def beat_once(self: Any, holder: Any) -> None:
        self._long_poll.version = -1
        await real(self, holder)

    real = patches.set(Membership, "_send_heartbeat", beat_once)


def pulls_do_not_wait(patches: Patches) -> None:
    """A broker that has nothing new says so at once, and is asked again."""

    def init(self: Any, **kwargs: Any) -> None:
        kwargs["settings"] = replace(kwargs["settings"], pull_wait_ms=0)
        real(self, **kwargs)

    real = patches.set(SessionShell, "__init__", init)


def retries_hold_their_workers(patches: Patches) -> None:
    """A failed message waits in its worker, which takes no other message meanwhile."""

    def init(self: Any, handler: Any, pool: Any) -> None:
        async def holding(message: Any) -> None:
            try:
                result = handler(message)
                if result is not None:
                    await result
            except RuntimeError:
                state = message.delivery.shell.state
                pause_ms = state.settings.try_backoff.wait_ms(message.attempt, state.rng)
                await asyncio.sleep(pause_ms / 1000)
                raise

        real(self, holding, pool)

    real = patches.set(MessageJobs, "__init__", init)


def retries_hold_no_lane(patches: Patches) -> None:
    """While a message waits for its next try, the next one of its key runs."""

    def init(self: Any, **kwargs: Any) -> None:
        real_init(self, **kwargs)
        self.busy = ForgivingKeys()

    def wait(self: Any, message: Any, due_ms: int, last: Any = None) -> None:
        real_wait(self, message, due_ms, last)
        self.opened.extendleft(reversed(self.busy.pop(message.key, None) or ()))

    def clear(self: Any) -> None:
        real_clear(self)
        self.busy = ForgivingKeys(self.busy)

    real_init = patches.set(KeyLanes, "__init__", init)
    real_wait = patches.set(KeyLanes, "wait", wait)
    real_clear = patches.set(KeyLanes, "clear", clear)


def awaitables_are_not_awaited(patches: Patches) -> None:
    """The awaitable that a handler returns is not awaited, and its message is acked."""

    left: list[Any] = []

    async def await_result(result: Any) -> None:
        left.append(asyncio.ensure_future(result))

    patches.set(jobs, "await_result", await_result)


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
