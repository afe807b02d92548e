"""Bugs of parked keys whose messages cannot be read or may be removed, and of messages that end
their processes.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from keylane.broker.partition.partition import Group
from keylane.broker.partition.suspects import Suspects
from keylane.consumer.parked_reads import ParkedReads
from keylane.consumer.session import taking
from keylane.consumer.session.events import SourceUnreadable
from keylane.consumer.session.parking import WindowPhase
from keylane.consumer.session.state import CRASHES_MAX, SuspectMessages
from keylane.protocol.errors import KeylaneError
from sim.mutants.mutant import Breaks, Patches
from sim.mutants.sessions import on_event


# ── parked keys ───────────────────────────────────────────────────────────────────────────────────
def keys_go_on_behind_damage(patches: Patches) -> None:
    """A key whose oldest parked message cannot be read goes on behind it, as dead letters do."""

    def on_source_unreadable(session: Any, event: Any, now_ms: int) -> None:
        window = session.redrives.windows.get(event.number)
        if window is None or window.is_retry or not session.tenure.is_live:
            before(session, event, now_ms)
            return
        window.unreadable.add(event.source, event.upto, event.first_row)
        window.phase = WindowPhase.DUE

    before = on_event(patches, SourceUnreadable, on_source_unreadable)


def unreadable_parked_messages_are_given_up(patches: Patches) -> None:
    """A parked message that cannot be read counts as gone, and its key goes on."""

    async def read(self: Any, key: Any, source: int, ranges: Any) -> Any:
        try:
            return await real(self, key, source, ranges)
        except KeylaneError as error:
            if getattr(error, "end_offset", None) is None:
                raise
            first = ranges[0][0]
            return [], first + 1, self._give_up(source, [(first, first + 1)])

    real = patches.set(ParkedReads, "_read", read)


def acked_messages_need_no_segment(patches: Patches) -> None:
    """Retention looks at cursors alone: what is parked is acked."""
    patches.set(Group, "first_needed_offset", property(lambda self: self.acked.cursor))


# ── messages that end their processes ─────────────────────────────────────────────────────────────
def no_message_is_suspected(patches: Patches) -> None:
    """A broker tells the next owner of no suspects, however many processes ended."""
    patches.set(Suspects, "upto", property(lambda _self: 0, lambda _self, _upto: None))


def a_restart_of_the_owner_clears_suspects(patches: Patches) -> None:
    """Each new owner counts as one behind a release."""

    def on_new_owner(self: Any, *, is_released: bool) -> bool:
        return bool(real(self, is_released=True))

    real = patches.set(Suspects, "on_new_owner", on_new_owner)


def suspects_are_handed_out_together(patches: Patches) -> None:
    """Suspects are handed out as any other message, and none is ever accused."""
    patches.set(taking, "take_suspect", lambda _session, _suspects, _now_ms: False)


def new_messages_overtake_suspects(patches: Patches) -> None:
    """What may have ended a process waits for its turn, and later messages are handed out at
    once.
    """

    def take_suspect(session: Any, suspects: Any, now_ms: int) -> bool:
        if not real(session, suspects, now_ms):
            return False
        lanes = session.lanes
        while taking.open_next(session, now_ms):
            """Look at everything that is pulled."""
        later = [each for each in lanes.opened if each.offset >= suspects._upto]
        lanes.opened = deque(each for each in lanes.opened if each.offset < suspects._upto)
        for message in later:
            if lanes.claim(message):
                taking._hand_out(session, message, now_ms)
        return True

    real = patches.set(taking, "take_suspect", take_suspect)


def accused_messages_are_tried_for_ever(patches: Patches) -> None:
    """However often it ended its process, a message is tried once more."""
    patches.set(taking, "sets_aside", lambda _settings: False)


def all_suspects_are_accused(patches: Patches) -> None:
    """Every message that was in hand at the ends is set aside, not the one alone that was begun."""

    class AllAccused(dict[int, int]):
        upto = 0

        def get(self, offset: int, _default: Any = None) -> int:
            return CRASHES_MAX if offset < self.upto else 0

    def init(self: Any, upto: int, begun: Any, now_ms: int) -> None:
        real(self, upto, begun, now_ms)
        self.crashes = AllAccused(self.crashes)
        self.crashes.upto = upto

    real = patches.set(SuspectMessages, "__init__", init)


BREAKS: tuple[Breaks, ...] = (
    keys_go_on_behind_damage,
    unreadable_parked_messages_are_given_up,
    acked_messages_need_no_segment,
    no_message_is_suspected,
    a_restart_of_the_owner_clears_suspects,
    suspects_are_handed_out_together,
    new_messages_overtake_suspects,
    accused_messages_are_tried_for_ever,
    all_suspects_are_accused,
)
