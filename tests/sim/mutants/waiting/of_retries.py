"""Bugs of messages that wait for retry: set aside alone, tried again, counted, buried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from keylane.broker import parking as broker_parking
from keylane.broker.partition import park_checks
from keylane.broker.partition import parked as partition_parked
from keylane.broker.partition.failure_ranges import UNKNOWN
from keylane.broker.partition.parked import Parked
from keylane.broker.partition.parked_key import ParkedKey
from keylane.broker.partition.partition import HostedPartition
from keylane.consumer.parked_reads import ParkedReads
from keylane.consumer.session import outcomes, windows
from keylane.consumer.session.failure import Treatment
from keylane.consumer.session.parking import AsideMessages, PartitionParking
from keylane.consumer.session.windows import attempt_of
from keylane.consumer.settings import FailurePolicy
from keylane.protocol.parked import ParkChange, Shift, Unpark
from sim.mutants.mutant import Breaks, Patches


def waiting_messages_are_kept_in_memory(patches: Patches) -> None:
    """A message that failed is acked, and only its consumer knows that it waits."""

    def keep(session: Any, message: Any, treatment: Any, *given: Any, asked_ms: Any = None) -> Any:
        pause_ms = real(session, message, treatment, *given, asked_ms=asked_ms)
        if treatment is Treatment.ASIDE:
            session.parking._parks.pop()
            session.parking.messages -= 1
            _, now_ms = given
            here = message.offset, message.offset + 1
            session.acks.handled.add(*here)
            session.make_ack_due(now_ms)
            place = message.attempt, message.partition_id, here
            session.redrives.aside.put(now_ms + pause_ms, *place)
        return pause_ms

    real = patches.set(outcomes, "set_aside", keep)


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
    patches.set(AsideMessages, "take_due", lambda _self, _count, _now_ms: None)


def owners_learn_of_no_retries(patches: Patches) -> None:
    """An owner does not ask what waits for retry; only what it sets aside itself is tried again."""

    async def list_aside(_self: Any, _rows: Any) -> list[Any]:
        return []

    patches.set(ParkedReads, "_list_aside", list_aside)


def tries_are_counted_twice(patches: Patches) -> None:
    """A try that fails counts as two."""

    def twice(change: Shift) -> ParkChange:
        return msgspec.structs.replace(change, to=change.to + 1) if change.to else change

    _change_failed_retries(patches, twice)


def tries_are_not_counted(patches: Patches) -> None:
    """A message that fails again waits as it did before."""

    def before(change: Shift) -> ParkChange:
        return msgspec.structs.replace(change, to=attempt_of(change.key) - 1)

    _change_failed_retries(patches, before)


def failed_retries_count_as_handled(patches: Patches) -> None:
    """A message that fails again is taken out."""

    def handled(change: Shift) -> ParkChange:
        return Unpark(change.key, change.source, change.ranges)

    _change_failed_retries(patches, handled)


def handled_retries_stay(patches: Patches) -> None:
    """A retry that succeeds is not told to the broker."""

    def unpark(session: Any, message: Any) -> None:
        window = session.redrives.owners[message.partition_id, message.offset]
        real(session, message)
        if isinstance(window.key, int):
            windows.on_stored(session, session.parking._others.pop(), 0)

    real = patches.set(outcomes, "_unpark", unpark)


def retries_never_end(patches: Patches) -> None:
    """A message is tried on behind its last try."""

    def decide(settings: Any, *, attempt: int, **given: Any) -> Treatment:
        is_retried = settings.failure_policy is FailurePolicy.RETRY
        return cast(Treatment, real(settings, attempt=1 if is_retried else attempt, **given))

    real = patches.set(outcomes, "decide_treatment", decide)


def retries_end_early(patches: Patches) -> None:
    """A message is a dead letter behind its first retry."""

    def decide(settings: Any, *, attempt: int, **given: Any) -> Treatment:
        counted = attempt if attempt < 2 else settings.last_try
        return cast(Treatment, real(settings, attempt=counted, **given))

    real = patches.set(outcomes, "decide_treatment", decide)


def buried_messages_are_gone(patches: Patches) -> None:
    """A message that failed too often is no dead letter, but taken out."""

    def shift(self: Any, change: Any) -> Any:
        if change.to is None:
            return Unpark(change.key, change.source, change.ranges)
        return real(self, change)

    real = patches.set(park_checks._ChangeChecker, "_check_shift", shift)


def retries_are_due_at_once(patches: Patches) -> None:
    """A message that fails again is tried without a pause."""

    def pause_ms(settings: Any, rng: Any, *, attempt: int, asked_ms: int | None) -> Any:
        return 0 if attempt > 1 else real(settings, rng, attempt=attempt, asked_ms=asked_ms)

    real = patches.set(windows, "aside_ms", pause_ms)


def retries_hold_their_keys(patches: Patches) -> None:
    """A message that fails is parked with its key, as under another policy."""

    def decide(settings: Any, *, has_order: bool, **given: Any) -> Treatment:
        treatment = cast(Treatment, real(settings, has_order=has_order, **given))
        if treatment is not Treatment.ASIDE:
            return treatment
        return Treatment.PARKED if has_order else Treatment.DEAD

    real = patches.set(outcomes, "decide_treatment", decide)


def retries_are_learned_again(patches: Patches) -> None:
    """An owner that had nothing to learn asks again with its next list, and has what it set aside
    itself twice.
    """

    async def list_keys(self: Any) -> Any:
        event = await real(self)
        learned = vars(self).setdefault("_learned", bool(event.aside))
        if learned or not self._tenure.is_acquired:
            return event
        return msgspec.structs.replace(event, aside=await self._list_aside(event.rows))

    real = patches.set(ParkedReads, "list_keys", list_keys)


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


def _change_failed_retries(patches: Patches, change_of: Callable[[Shift], ParkChange]) -> None:
    """Send another change for a message that has failed again and waits for another try."""

    def add(self: Any, change: ParkChange, *, window: int = 0, try_at_ms: int = 0) -> None:
        if isinstance(change, Shift) and try_at_ms:
            change = change_of(change)
        real(self, change, window=window, try_at_ms=try_at_ms)

    real = patches.set(PartitionParking, "add", add)


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
