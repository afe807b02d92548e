"""Bugs of parked keys: set aside, redriven, taken over by children."""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import replace

from keylane.admin import Admin
from keylane.broker import parking as broker_parking
from keylane.broker.partition import park_checks
from keylane.broker.partition.partition import HostedPartition
from keylane.consumer.parked_reads import Ancestors, ParkedReads
from keylane.consumer.session import calls, windows
from keylane.consumer.session.events import WindowRead
from keylane.consumer.session.lanes import KeyLanes
from keylane.consumer.session.parking import PartitionParking
from keylane.metaserver.groups import lease_rows
from keylane.protocol.frames import ParkedRows
from keylane.protocol.parked import LOOSE, Free, ParkState, Unpark
from sim.mutants.mutant import Breaks, Patches
from sim.mutants.sessions import on_event


def later_messages_pass_a_parked_key(patches: Patches) -> None:
    """A consumer parks what failed, and hands later messages of the key out."""
    patches.set(PartitionParking, "divert", lambda _self, messages: messages)


def opened_messages_pass_a_parked_one(patches: Patches) -> None:
    """A message is parked without those of its key that wait in opened batches."""

    def remove_key(self: Any, key: bytes, matches: Any) -> Any:
        opened, self.opened = self.opened, deque()
        removed = real(self, key, matches)
        self.opened = opened
        return removed

    real = patches.set(KeyLanes, "remove_key", remove_key)


def parked_is_forgotten_at_restart(patches: Patches) -> None:
    """A restarted broker does not read what groups have parked."""

    def apply(self: Any, body: Any) -> None:
        real(self, body)
        self.groups[body.group].parked = None

    real = patches.set(HostedPartition, "apply_parked", apply)


def tail_of_a_dead_key_is_handed_out(patches: Patches) -> None:
    """A consumer that begins takes dead keys for dead letters of any key, and hands their later
    messages out.
    """

    def on_listed(session: Any, event: Any, now_ms: int) -> None:
        before = set(session.parking.keys)
        real(session, event, now_ms)
        dead = {row.key for row in event.rows if row.state is ParkState.DEAD}
        session.parking.keys.difference_update(dead - before)

    real = patches.set(calls, "on_listed", on_listed)


def redriven_messages_run_backwards(patches: Patches) -> None:
    """The messages of a window are handled newest first."""

    async def read(self: Any, key: Any, source: int, ranges: Any) -> Any:
        messages, upto, gone = await real(self, key, source, ranges)
        return messages[::-1], upto, gone

    real = patches.set(ParkedReads, "_read", read)


def redriven_messages_are_done_at_once(patches: Patches) -> None:
    """A redriven message is given up when it is handed to a handler."""

    def on_window_read(session: Any, event: Any, now_ms: int) -> None:
        window = session.redrives.windows.get(event.number)
        before(session, event, now_ms)
        for message in event.messages if window is not None else ():
            offset_range = message.offset, message.offset + 1
            session.parking.add(Unpark(window.key, message.partition_id, (offset_range,)))

    before = on_event(patches, WindowRead, on_window_read)


def redriven_key_is_free_at_once(patches: Patches) -> None:
    """New messages of a key are handed out as soon as its redrive begins."""

    def begin(session: Any, row: Any) -> None:
        real(session, row)
        session.parking.keys.discard(row.key)

    real = patches.set(windows, "_begin", begin)


def key_is_freed_with_parked_messages(patches: Patches) -> None:
    """A redriven key is freed after its first window, and the rest is forgotten."""

    async def read_rows(self: Any, key: Any, count: int, first: int) -> Any:
        if isinstance(key, int) or key in LOOSE:
            return await real(self, key, count, first)
        if key in seen:
            return ParkedRows((), 0)
        seen.add(key)
        return await real(self, key, 1, first)

    seen: set[Any] = set()
    real = patches.set(ParkedReads, "_read_rows", read_rows)

    def check(self: Any, change: Free) -> Any:
        return change if self._parked.get(change.key) is not None else None

    patches.set(park_checks._ChangeChecker, "_check_free", check)


def children_adopt_nothing(patches: Patches) -> None:
    """The owner of a child does not ask its parents for what they have parked."""

    async def adopt(_self: Any, _parent: Any, _ranges: Any = ()) -> int:
        return 0

    patches.set(Ancestors, "_adopt", adopt)


def children_adopt_what_is_not_theirs(patches: Patches) -> None:
    """A parent gives each child everything that it has parked."""

    def page(parked: Any, _wanted: Any, *, first_row: int = 0) -> Any:
        return real(parked, lambda _key: True, first_row=first_row)

    real = patches.set(broker_parking, "build_adoption_page", page)


def parked_parents_are_not_told(patches: Patches) -> None:
    """The metaserver forgets which drained partitions have parked messages."""
    patches.set(lease_rows, "read_adopted", lambda *_args: {})


def loose_messages_are_released_by_range(patches: Patches) -> None:
    """A broker drops loose messages once the descendant with its first logical partition needs
    none, whoever has them.
    """

    async def release(self: Any, request: Any, payload: Any) -> Any:
        first = self._store.state.partition(request.partition_id).facts.partition.range_start
        is_in_range = request.range_start <= first < request.range_end
        return await real(self, replace(request, includes_loose=is_in_range), payload)

    real = patches.set(broker_parking.Parking, "_handle_release", release)


def edit_by_key_takes_the_newest(patches: Patches) -> None:
    """A message that is named by its key is the newest one."""

    async def place(self: Any, subject: str, group: str, *named: Any, key: Any, dead: Any) -> Any:
        if key is None:
            return await real(self, subject, group, *named, key=key, dead=dead)
        places = [
            (each.partition_id, each.offset)
            async for each in self.parked_messages(subject, group, key, dead=dead)
        ]
        return max(places)

    real = patches.set(Admin, "_locate_message", place)


def messages_with_handlers_are_edited(patches: Patches) -> None:
    """A parked message gets another value while its owner has the old one handled."""
    patches.set(park_checks._ChangeChecker, "_is_being_handled", lambda _self, _key: False)


BREAKS: tuple[Breaks, ...] = (
    later_messages_pass_a_parked_key,
    opened_messages_pass_a_parked_one,
    parked_is_forgotten_at_restart,
    tail_of_a_dead_key_is_handed_out,
    redriven_messages_run_backwards,
    redriven_messages_are_done_at_once,
    redriven_key_is_free_at_once,
    key_is_freed_with_parked_messages,
    children_adopt_nothing,
    children_adopt_what_is_not_theirs,
    parked_parents_are_not_told,
    loose_messages_are_released_by_range,
    edit_by_key_takes_the_newest,
    messages_with_handlers_are_edited,
)
