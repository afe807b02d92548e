"""Bugs of messages that wait for retry, and of dead letters, whose sources lack some of them."""

from __future__ import annotations

from typing import Any

from keylane.consumer.parking import redrive
from keylane.consumer.parking.ancestors import Ancestors
from keylane.consumer.parking.passed_over import SkippedMessages
from keylane.consumer.parking.redrive import Redrives
from keylane.consumer.parking.retry_schedule import RetrySchedule
from keylane.metaserver.groups import parked_ancestors
from keylane.protocol.errors import OffsetOutOfRangeError
from sim.mutants.mutant import Breaks, Patches


def only_the_first_asks(patches: Patches) -> None:
    """While the reads of a source fail, the same message asks each time."""

    def failed(self: Any, taken: Any, now_ns: int, pause_ns: Any, *, upto: Any = None) -> None:
        real(self, taken, now_ns, pause_ns, upto=upto)
        failing = self._failing[taken.source]
        if not failing.probing and failing.queued:
            failing.queued.appendleft(failing.queued.pop())

    real = patches.set(RetrySchedule, "requeue_failed", failed)


def held_tries_are_forgotten(patches: Patches) -> None:
    """What was held while its source failed is not due when that answers."""
    patches.set(
        RetrySchedule,
        "on_success",
        lambda self, source: self._failing.pop(source, None) and None,
    )


def failed_reads_are_forgotten(patches: Patches) -> None:
    """What could not be read is not tried again."""

    def failed(_self: Any, _taken: Any, _now_ns: int, _pause_ns: Any, *, upto: Any = None) -> None:
        """Forget it."""

    patches.set(RetrySchedule, "requeue_failed", failed)


def asking_never_ends(patches: Patches) -> None:
    """A source whose second read fails too is never asked again."""

    def failed(self: Any, taken: Any, now_ns: int, pause_ns: Any, *, upto: Any = None) -> None:
        real(self, taken, now_ns, pause_ns, upto=upto)
        if taken.is_probe:
            self._failing[taken.source].probing = True

    real = patches.set(RetrySchedule, "requeue_failed", failed)


def loose_messages_wait_for_each_other(patches: Patches) -> None:
    """A dead letter that cannot be read holds up all others that were chosen."""

    def add(self: Any, _source: int, error: Any) -> None:
        self.error = error
        raise error

    patches.set(SkippedMessages, "add", add)


def damage_hides_the_rest_of_its_source(patches: Patches) -> None:
    """Behind a damaged batch nothing more of its source is read."""

    def add(self: Any, source: int, error: Any) -> None:
        real(self, source, error)
        self._skip_below[source] = redrive.MAX_I64

    real = patches.set(SkippedMessages, "add", add)


def passed_over_is_never_asked_again(patches: Patches) -> None:
    """Dead letters that could not be read are left where they are."""
    patches.set(SkippedMessages, "clear", lambda _self: None)


def removed_messages_are_waited_for(patches: Patches) -> None:
    """What retention has removed is asked for, again and again."""

    async def give_up(_self: Any, _key: Any, source: int, start: int, _end: int) -> None:
        raise OffsetOutOfRangeError(partition_id=source, offset=start)

    patches.set(Redrives, "_give_up", give_up)


def all_of_a_source_is_given_up(patches: Patches) -> None:
    """Where retention has removed one message, later ones of the source are given up too."""

    async def give_up(self: Any, key: Any, source: int, start: int, end: int) -> None:
        await real(self, key, source, start, end + 20)

    real = patches.set(Redrives, "_give_up", give_up)


def damaged_messages_are_given_up(patches: Patches) -> None:
    """What cannot be read counts as gone."""

    async def read(self: Any, key: Any, source: int, ranges: Any, *kind: Any) -> Any:
        try:
            return await real(self, key, source, ranges, *kind)
        except redrive.KeylaneError as error:
            if getattr(error, "end_offset", None) is None:
                raise
            start, end = ranges[0]
            await self._give_up(key, source, start, min(end, error.end_offset))
            return [], end

    real = patches.set(Redrives, "read", read)


def lost_partitions_carry_on(patches: Patches) -> None:
    """What was left behind a lost partition counts as taken over by it."""
    patches.set(parked_ancestors, "_ancestors_query", _with_all_tokens())
    patches.set(parked_ancestors, "_parked_query", _left_with_all_tokens())


def lost_parents_are_waited_for(patches: Patches) -> None:
    """A child asks for what a lost parent has parked until someone answers."""

    async def address_of(self: Any, partition_id: int) -> Any:
        address = await real(self, partition_id)
        if address is None:
            raise redrive.UnreachableError(f"partition {partition_id} is away")
        return address

    real = patches.set(Ancestors, "_address_of", address_of)


def _with_all_tokens() -> Any:
    of = parked_ancestors
    columns = [c for c in of._ancestors_query.selected_columns if c.key != "token"]
    return of._ancestors_query.with_only_columns(
        *columns, of._lease_token.label("token"), maintain_column_froms=True
    )


def _left_with_all_tokens() -> Any:
    of = parked_ancestors
    columns = [c for c in of._parked_query.selected_columns if c.key != "surviving_token"]
    kept = of._lease_token.label("surviving_token")
    return of._parked_query.with_only_columns(*columns, kept, maintain_column_froms=True)


BREAKS: tuple[Breaks, ...] = (
    only_the_first_asks,
    held_tries_are_forgotten,
    failed_reads_are_forgotten,
    asking_never_ends,
    loose_messages_wait_for_each_other,
    damage_hides_the_rest_of_its_source,
    passed_over_is_never_asked_again,
    removed_messages_are_waited_for,
    all_of_a_source_is_given_up,
    damaged_messages_are_given_up,
    lost_partitions_carry_on,
    lost_parents_are_waited_for,
)
