"""Bugs of parked keys whose messages cannot be read or may be removed, and of messages that end
their processes.
"""

from __future__ import annotations

from typing import Any

from keylane.broker.partition.partition import Group
from keylane.broker.partition.suspects import Suspects
from keylane.consumer.parking.redrive import Redrives
from keylane.consumer.pulling import suspects as pulling_suspects
from keylane.consumer.pulling.suspects import SuspectQueue, SuspectStep
from keylane.protocol.errors import FencedError, KeylaneError
from sim.mutants.mutant import Breaks, Patches


# ── parked keys ───────────────────────────────────────────────────────────────────────────────────
def keys_go_on_behind_damage(patches: Patches) -> None:
    """A key whose oldest parked message cannot be read goes on behind it, as dead letters do."""

    async def read_first(self: Any, key: Any, rows: Any, passed: Any) -> Any:
        try:
            return await real(self, key, rows, passed)
        except FencedError:
            raise
        except KeylaneError as error:
            passed.add(rows[0][0], error)
            return None

    real = patches.set(Redrives, "_read_first", read_first)


def unreadable_parked_messages_are_given_up(patches: Patches) -> None:
    """A parked message that cannot be read counts as gone, and its key goes on."""

    async def read(self: Any, key: Any, source: int, ranges: Any, *kind: Any) -> Any:
        try:
            return await real(self, key, source, ranges, *kind)
        except KeylaneError as error:
            if getattr(error, "end_offset", None) is None:
                raise
            await self._give_up(key, source, ranges[0][0], ranges[0][0] + 1)
            return [], ranges[0][0] + 1

    real = patches.set(Redrives, "read", read)


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

    def next_step(self: Any) -> Any:
        step = real(self)
        return step and (step[0], SuspectStep.PLAIN if step[1] is SuspectStep.CAREFUL else step[1])

    real = patches.set(SuspectQueue, "next", next_step)


def accused_messages_are_tried_for_ever(patches: Patches) -> None:
    """However often it ended its process, a message is tried once more."""
    patches.set(pulling_suspects, "CRASHES_MAX", 1 << 30)
    patches.set(SuspectQueue, "put", lambda self, messages: self._waiting.extend(messages))


def all_suspects_are_accused(patches: Patches) -> None:
    """Every message that was in hand at the ends is set aside, not the one alone that was begun."""

    def next_step(self: Any) -> Any:
        if self._waiting and self._waiting[0].offset < self._upto:
            return self._waiting.popleft(), SuspectStep.SET_ASIDE
        return real(self)

    real = patches.set(SuspectQueue, "next", next_step)


BREAKS: tuple[Breaks, ...] = (
    keys_go_on_behind_damage,
    unreadable_parked_messages_are_given_up,
    acked_messages_need_no_segment,
    no_message_is_suspected,
    a_restart_of_the_owner_clears_suspects,
    suspects_are_handed_out_together,
    accused_messages_are_tried_for_ever,
    all_suspects_are_accused,
)
