"""Bugs of messages that wait for retry, and of dead letters, whose sources lack some of them."""

from __future__ import annotations

from collections import deque
from typing import Any

from keylane.consumer.parked_reads import ParkedReads
from keylane.consumer.session import windows
from keylane.consumer.session.events import SourceUnreadable
from keylane.consumer.session.parking import AsideMessages, UnreadableRows
from keylane.metaserver.groups import parked_ancestors
from keylane.protocol.errors import KeylaneError, OffsetOutOfRangeError
from sim.mutants.mutant import Breaks, Patches
from sim.mutants.sessions import on_event


def only_the_first_asks(patches: Patches) -> None:
    """While the reads of a source fail, the same message asks each time."""

    def put_back(self: Any, due: Any, now_ms: int, pause_ms: Any, *, upto: Any = None) -> None:
        failing, others = self.failing.get(due.source), ()
        if failing is not None and due.is_probe:
            others, failing.held = failing.held, deque()
        real(self, due, now_ms, pause_ms, upto=upto)
        self.failing[due.source].held.extend(others)

    real = patches.set(AsideMessages, "put_back", put_back)


def held_tries_are_forgotten(patches: Patches) -> None:
    """What was held while its source failed is not due when that answers."""
    patches.set(AsideMessages, "note_read", lambda self, source: self.failing.pop(source, None))


def failed_reads_are_forgotten(patches: Patches) -> None:
    """What could not be read is not tried again."""

    def put_back(_self: Any, _due: Any, _now_ms: int, _pause_ms: Any, *, upto: Any = None) -> None:
        """Forget it."""

    patches.set(AsideMessages, "put_back", put_back)


def asking_never_ends(patches: Patches) -> None:
    """A source whose second read fails too is never asked again."""

    def put_back(self: Any, due: Any, now_ms: int, pause_ms: Any, *, upto: Any = None) -> None:
        real(self, due, now_ms, pause_ms, upto=upto)
        if due.is_probe:
            self.failing[due.source].is_probed = True

    real = patches.set(AsideMessages, "put_back", put_back)


def loose_messages_wait_for_each_other(patches: Patches) -> None:
    """A dead letter that cannot be read holds up all others that were chosen."""

    def on_source_unreadable(session: Any, event: Any, now_ms: int) -> None:
        windows.on_window_failed(session, event.number, now_ms, upto=event.upto)

    on_event(patches, SourceUnreadable, on_source_unreadable)


def damage_hides_the_rest_of_its_source(patches: Patches) -> None:
    """Behind a damaged batch nothing more of its source is read."""

    def add(self: Any, source: int, _upto: int | None, first_row: int) -> None:
        real(self, source, None, first_row)

    real = patches.set(UnreadableRows, "add", add)


def passed_over_is_never_asked_again(patches: Patches) -> None:
    """Dead letters that could not be read are left where they are."""
    patches.set(UnreadableRows, "clear", lambda _self: None)


def removed_messages_are_waited_for(patches: Patches) -> None:
    """What retention has removed is asked for, again and again."""

    def give_up(_self: Any, source: int, ranges: Any) -> Any:
        raise OffsetOutOfRangeError(partition_id=source, offset=ranges[0][0])

    patches.set(ParkedReads, "_give_up", give_up)


def all_of_a_source_is_given_up(patches: Patches) -> None:
    """Where retention has removed one message, later ones of the source are given up too."""

    def give_up(self: Any, source: int, ranges: Any) -> Any:
        return real(self, source, [(low, high + 20) for low, high in ranges])

    real = patches.set(ParkedReads, "_give_up", give_up)


def damaged_messages_are_given_up(patches: Patches) -> None:
    """What cannot be read counts as gone."""

    async def read(self: Any, key: Any, source: int, ranges: Any) -> Any:
        try:
            return await real(self, key, source, ranges)
        except KeylaneError as error:
            damaged_end = getattr(error, "end_offset", None)
            if damaged_end is None:
                raise
            start, end = ranges[0]
            upto = min(end, damaged_end)
            return [], upto, self._give_up(source, [(start, upto)])

    real = patches.set(ParkedReads, "_read", read)


def lost_partitions_carry_on(patches: Patches) -> None:
    """What was left behind a lost partition counts as taken over by it."""
    patches.set(parked_ancestors, "_ancestors_query", _with_all_tokens())
    patches.set(parked_ancestors, "_parked_query", _left_with_all_tokens())


def lost_parents_are_waited_for(patches: Patches) -> None:
    """A child asks for what a lost parent has parked, whatever later grants say."""
    patches.set(ParkedReads, "update_grant", lambda _self, _grant: None)


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
