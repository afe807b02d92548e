"""Bugs of a producer: sequences, order, what it tells the sender."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from keylane.producer import executor as executor_module
from keylane.producer import sending as sending_module
from keylane.producer.executor import Executor
from keylane.producer.failure import Step, WaitStage
from keylane.producer.given_up import GivenUpOutcome
from keylane.producer.outgoing_batch import REORDERED, OutgoingBatch
from keylane.producer.sender import SubjectSender
from keylane.protocol import endpoints
from keylane.protocol.errors import Fate, SequenceGapError, StorageError, UnreachableError
from keylane.protocol.frames import Appended
from keylane.protocol.message import Receipt
from sim.mutants.mutant import Breaks, Patches


def repeats_under_a_new_sequence(patches: Patches) -> None:
    def after(self: Any, error: Any, **known: Any) -> bool:
        if isinstance(error, UnreachableError):
            self._begin_epoch()
        return real(self, error, **known)

    real = patches.set(Executor, "_react_to_failure", after)


def repeats_in_another_order(patches: Patches) -> None:
    def after(self: Any, error: Any, **known: Any) -> bool:
        if len(self._in_flight) > 1 and isinstance(error, UnreachableError | SequenceGapError):
            self._begin_epoch()
            self._in_flight.rotate(1)
        return real(self, error, **known)

    real = patches.set(Executor, "_react_to_failure", after)


def strict_gives_up(patches: Patches) -> None:
    def next_step(self: Any, error: Any, **known: Any) -> Step:
        step = real(self, error, **known)
        return Step.GIVE_UP if step is Step.RETRY and self._in_flight[0].tries > 2 else step

    real = patches.set(Executor, "_decide_step", next_step)


def strict_gives_up_at_a_broken_disk(patches: Patches) -> None:
    def decide(error: Any, stage: Any, **kwargs: Any) -> Step:
        step = real(error, stage, **kwargs)
        return Step.GIVE_UP if isinstance(error, StorageError) else step

    real = patches.set(executor_module, "decide_after_failure", decide)


def given_up_told_as_not_done(patches: Patches) -> None:
    """A message with a try that was not answered is told as not stored."""
    patches.set(
        GivenUpOutcome, "copy_error", lambda self, *, unknown: self.cause.copy(Fate.NOT_DONE)
    )


class _TellsStored:
    """A channel that tells a missing answer as one that all is stored."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def begin(self, request: Any, payload: bytes, **more: Any) -> asyncio.Future[Any]:
        on_answer = more.pop("on_answer")
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def end(call: asyncio.Future[Any]) -> None:
            if told.done():
                return
            error = call.exception()
            if error is None:
                told.set_result(call.result())
            elif isinstance(error, UnreachableError):
                told.set_result((Appended(-1, "fsync", True), memoryview(b"")))
            else:
                told.set_exception(error)
                told.exception()
            on_answer(told)

        self._channel.begin(request, payload, on_answer=end, **more)
        return told


def acked_when_sent(patches: Patches) -> None:
    def call(self: Any, channel: Any, batch: Any) -> asyncio.Future[Any]:
        return real(self, _TellsStored(channel), batch)

    real = patches.set(Executor, "_send_batch", call)


def receipt_of_another_message(patches: Patches) -> None:
    def receipt(self: Any, index: int) -> Receipt:
        return real(self, 0)

    real = patches.set(OutgoingBatch, "receipt", receipt)


def key_hashed_anew(patches: Patches) -> None:
    numbers = itertools.count()
    patches.set(sending_module, "_hash", lambda key: next(numbers) * 341)


def detour_not_declared(patches: Patches) -> None:
    """BEST_TRIED sends elsewhere and does not declare it."""
    patches.set(OutgoingBatch, "mark_reordered", lambda self: None)


def detour_told_by_batch(patches: Patches) -> None:
    """If a message of a batch is reordered, all of them are told as reordered."""

    def settle(self: Any, outcome: Any) -> int:
        if any(self.mark_of(index) & REORDERED for index in range(len(self))):
            for index in range(len(self)):
                self.mark(index, REORDERED)
        return real(self, outcome)

    real = patches.set(OutgoingBatch, "settle", settle)


def later_detour_not_declared(patches: Patches) -> None:
    """Later messages follow those that were sent elsewhere, and it is not declared."""

    def check(self: Any, executor: Any, key: bytes, place: int) -> bool:
        real(self, executor, key, place)
        return False

    real = patches.set(SubjectSender, "is_reordered", check)


def second_copy_not_declared(patches: Patches) -> None:
    """Messages that a silent broker may have stored are sent elsewhere, and the receipt does not
    say so.
    """

    def reset(self: Any, *, refused: bool) -> None:
        real(self, refused=True)

    real = patches.set(OutgoingBatch, "reset", reset)


def home_is_left_early(patches: Patches) -> None:
    """BEST_TRIED goes elsewhere at the first failure."""

    def stage(settings: Any, **known: Any) -> WaitStage:
        return real(settings, **known | {"failing_ms": 1 << 40})

    real = patches.set(executor_module, "decide_wait_stage", stage)


def newer_do_not_wait(patches: Patches) -> None:
    """Newer messages go elsewhere at once when their partition does not answer; older ones still
    wait there.
    """

    def fill(self: Any) -> None:
        real(self)
        spare = self._fallback_candidates()
        if self._route is not None and self._route.may_reroute_keys and spare:
            self.table = [
                executor if executor is None or executor.state.available else spare[0]
                for executor in self.table
            ]
            self.careful = True

    real = patches.set(SubjectSender, "_update_tables", fill)


def newer_go_before_older(patches: Patches) -> None:
    """Messages that had to leave a sealed partition are sent behind newer ones."""

    def drain(self: Any) -> None:
        self.held_messages.batches.reverse()
        real(self)

    real = patches.set(SubjectSender, "_release_held", drain)


def older_route_accepted(patches: Patches) -> None:
    """A late answer with an older route is followed, although a newer route is known."""

    def apply(self: Any, route: Any) -> bool:
        before = self._route
        followed = real(self, route)
        newer = before is not None and before.version < route.version
        if newer and before is not getattr(self, "_came_late", None):
            self._came_late = before
            self._route = None
            real(self, before)
        return followed

    real = patches.set(SubjectSender, "_apply_route", apply)


def lost_is_not_asked(patches: Patches) -> None:
    """The metaserver is asked for addresses of brokers, and not for lost partitions."""

    async def ask(self: Any) -> None:
        history = await self._meta.call(endpoints.HISTORY, subject=self.subject)
        self._follow_brokers(past.partition for past in history.partitions)

    patches.set(SubjectSender, "fetch_history", ask)


def refused_batch_stays_out(patches: Patches) -> None:
    """A batch refused for a gap is told as stored."""

    def answered(self: Any, batch: Any, call: Any) -> None:
        if isinstance(call.exception(), SequenceGapError) and (batch, call) in self._calls:
            self._calls.remove((batch, call))
            self._settle(batch, Appended(-1, "fsync", True))
        else:
            real(self, batch, call)

    real = patches.set(Executor, "_on_answer", answered)


BREAKS: tuple[Breaks, ...] = (
    repeats_under_a_new_sequence,
    repeats_in_another_order,
    strict_gives_up,
    strict_gives_up_at_a_broken_disk,
    given_up_told_as_not_done,
    acked_when_sent,
    receipt_of_another_message,
    key_hashed_anew,
    detour_not_declared,
    detour_told_by_batch,
    later_detour_not_declared,
    second_copy_not_declared,
    home_is_left_early,
    newer_do_not_wait,
    newer_go_before_older,
    older_route_accepted,
    lost_is_not_asked,
    refused_batch_stays_out,
)
