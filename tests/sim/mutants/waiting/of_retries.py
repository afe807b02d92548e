"""Bugs of messages that wait for retry: set aside alone, tried again, counted, buried."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from keylane.broker import parking as broker_parking
from keylane.broker.partition import park_checks
from keylane.broker.partition import parked as partition_parked
from keylane.broker.partition.failure_ranges import UNKNOWN
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.parked_key import ParkedKey
from keylane.broker.partition.partition import HostedPartition
from keylane.consumer.handling.failing import FailureRules
from keylane.consumer.parking.park_sender import ParkSender
from keylane.consumer.parking.retry_runner import RetryDelivery, RetryRunner
from keylane.consumer.pulling.pull_client import PullClient
from keylane.protocol.parked import Shift, Unpark
from sim.mutants.mutant import Breaks, Patches


def waiting_messages_are_kept_in_memory(patches: Patches) -> None:
    """A message that failed is acked, and only its consumer knows that it waits."""

    def put(self: Any, offset: int, failure: Any, pause_ms: int) -> None:
        self._client.mark_handled(offset)
        due_ns = self._client.boot_ns() + pause_ms * 1_000_000
        place = self._context.partition_id, (offset, offset + 1)
        self._add(failure.attempts, *place, due_ns)

    patches.set(RetryRunner, "put", put)


def tries_are_forgotten_at_restart(patches: Patches) -> None:
    """A restarted broker does not read how often messages were tried since they were set aside."""

    def apply(self: Any, body: Any) -> None:
        kept = tuple(
            change
            for change in body.changes
            if not (isinstance(change, Shift) and change.to is not None)
        )
        real(self, msgspec.structs.replace(body, changes=kept))

    real = patches.set(HostedPartition, "apply_parked", apply)


def children_adopt_no_retries(patches: Patches) -> None:
    """What waits for retry stays with the parent."""

    def page(parked: Any, wanted: Any, *, first_row: int = 0) -> Any:
        keys, following = real(parked, wanted, first_row=first_row)
        return [key for key in keys if not isinstance(key.key, int)], following

    real = patches.set(broker_parking, "build_adoption_page", page)


def children_count_from_the_start(patches: Patches) -> None:
    """A child adopts what waits for retry as tried once."""

    def adopt(self: Any, change: Any, token: int) -> Any:
        keys = tuple(
            msgspec.structs.replace(key, key=1) if isinstance(key.key, int) else key
            for key in change.keys
        )
        return real(self, msgspec.structs.replace(change, keys=keys), token)

    real = patches.set(Parked, "_apply_adoption", adopt)


def retries_are_never_due(patches: Patches) -> None:
    """No message that was set aside is tried again."""
    patches.set(RetryRunner, "_run", _nothing_for_ever)


def owners_learn_of_no_retries(patches: Patches) -> None:
    """An owner does not ask what waits for retry; only what it sets aside itself is tried again."""
    patches.set(RetryRunner, "begin", _nothing_for_ever)


def tries_are_counted_twice(patches: Patches) -> None:
    """A try that fails counts as two."""

    def reschedule(self: Any, key: int, to: int | None, *rest: Any) -> None:
        real(self, key, None if to is None else to + 1, *rest)

    real = patches.set(RetryRunner, "reschedule", reschedule)


def tries_are_not_counted(patches: Patches) -> None:
    """A message that fails again waits as it did before."""

    def reschedule(self: Any, key: int, to: int | None, *rest: Any) -> None:
        real(self, key, None if to is None else key, *rest)

    real = patches.set(RetryRunner, "reschedule", reschedule)


def failed_retries_count_as_handled(patches: Patches) -> None:
    """A message that fails again is taken out."""

    def retry(self: Any, message: Any, _failure: Any, _pause_ms: int) -> None:
        self.mark_handled(message.offset)

    patches.set(RetryDelivery, "retry", retry)


def handled_retries_stay(patches: Patches) -> None:
    """A retry that succeeds is not told to the broker."""

    def unpark(self: Any, key: Any, *rest: Any) -> None:
        if isinstance(key, int):
            rest[-1]()
        else:
            real(self, key, *rest)

    real = patches.set(ParkSender, "unpark", unpark)


def retries_never_end(patches: Patches) -> None:
    """A message is tried on behind its last try."""

    def pause_ms(self: Any, message: Any, asked_ms: int | None) -> int | None:
        return real(dataclasses.replace(self, retry_tries_max=1_000_000), message, asked_ms)

    real = patches.set(FailureRules, "pause_ms", pause_ms)


def retries_end_early(patches: Patches) -> None:
    """A message is a dead letter behind its first retry."""

    def pause_ms(self: Any, message: Any, asked_ms: int | None) -> int | None:
        return None if message.attempt >= 2 else real(self, message, asked_ms)

    real = patches.set(FailureRules, "pause_ms", pause_ms)


def buried_messages_are_gone(patches: Patches) -> None:
    """A message that failed too often is no dead letter, but taken out."""

    def shift(self: Any, change: Any) -> Any:
        if change.to is None:
            return Unpark(change.key, change.source, change.ranges)
        return real(self, change)

    real = patches.set(park_checks._ChangeChecker, "_check_shift", shift)


def retries_are_due_at_once(patches: Patches) -> None:
    """A message that fails again is tried without a pause."""

    def reschedule(self: Any, *given: Any) -> None:
        real(self, *given[:-1], 0)

    real = patches.set(RetryRunner, "reschedule", reschedule)


def retries_hold_their_keys(patches: Patches) -> None:
    """A message that fails is parked with its key, as under another policy."""

    def retry(self: Any, message: Any, failure: Any, _pause_ms: int) -> None:
        self.park(message, failure, [])

    patches.set(PullClient, "retry", retry)


def retries_are_learned_again(patches: Patches) -> None:
    """An owner that had nothing to learn asks again at its next acquire, and has what it set aside
    itself twice.
    """

    async def begin(self: Any, rows: Any, **given: Any) -> None:
        if rows:
            await real(self, rows, **given)

    real = patches.set(RetryRunner, "begin", begin)


def dead_letters_have_one_failure(patches: Patches) -> None:
    """What is said of a message that failed is said of all that are set aside with it."""

    def mark(self: Any, marks: Any) -> None:
        for source, start, end, known in marks:
            runs = self.offsets_by_source.get(source) or ((start, end),)
            real(self, [(source, low, high, known) for low, high in runs])

    real = patches.set(ParkedKey, "set_failure_marks", mark)


def children_adopt_no_failures(patches: Patches) -> None:
    """A child does not learn how the messages failed that it takes over."""

    def decode_mark(said: Any, *args: Any, **given: Any) -> Any:
        return (*real(said, *args, **given)[:3], UNKNOWN)

    real = patches.set(partition_parked, "decode_mark", decode_mark)


def next_tries_are_kept_in_memory(patches: Patches) -> None:
    """A restarted broker does not read when messages are tried again."""

    def apply(self: Any, body: Any) -> None:
        real(self, msgspec.structs.replace(body, next_tries=()))

    real = patches.set(HostedPartition, "apply_parked", apply)


def next_tries_outlive_their_owner(patches: Patches) -> None:
    """What an owner said of next tries is told under the next one, who tries at once what waits."""
    patches.set(Parked, "clear_retry_times", lambda _self: lambda: None)


async def _nothing_for_ever(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


BREAKS: tuple[Breaks, ...] = (
    waiting_messages_are_kept_in_memory,
    tries_are_forgotten_at_restart,
    children_adopt_no_retries,
    children_count_from_the_start,
    retries_are_never_due,
    owners_learn_of_no_retries,
    tries_are_counted_twice,
    tries_are_not_counted,
    failed_retries_count_as_handled,
    handled_retries_stay,
    retries_never_end,
    retries_end_early,
    buried_messages_are_gone,
    retries_are_due_at_once,
    retries_hold_their_keys,
    retries_are_learned_again,
    dead_letters_have_one_failure,
    children_adopt_no_failures,
    next_tries_are_kept_in_memory,
    next_tries_outlive_their_owner,
)
