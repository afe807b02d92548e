"""Bugs of what members of a group live through: resets under them, instances started again, edits
of parked messages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import sqlalchemy as sa

from keylane.broker import parking as broker_parking
from keylane.broker.partition.parked_key import ParkedKey
from keylane.broker.store import group_changes as set_cursor
from keylane.consumer.parked_reads import ParkedReads
from keylane.metaserver.groups import sessions as group_sessions
from keylane.metaserver.resets import live
from keylane.metaserver.resets import rows as resets_rows
from keylane.metaserver.resets import service as resets_service
from keylane.metaserver.sql.schema import leases, live_resets, sessions
from keylane.protocol.errors import BusyError, FencedError, Reason
from keylane.protocol.progress import ResetGroup
from sim.mutants.mutant import Breaks, Patches


# ── resets under live members ─────────────────────────────────────────────────────────────────────
def live_reset_waits_for_no_member(patches: Patches) -> None:
    """Cursors are set while members have leases."""

    def read(connection: Any, reset_id: int) -> Any:
        reset = real(connection, reset_id)
        return None if reset is None else dataclasses.replace(reset, owners=())

    real = patches.set(live, "read_live_reset", read)
    patches.set(resets_rows, "_check_reset_allowed", lambda *_args: None)


def group_is_granted_while_cursors_are_set(patches: Patches) -> None:
    """Members get their leases back when the reset has its tokens."""

    def begin(connection: Any, scope: Any, **kwargs: Any) -> Any:
        tokens = real(connection, scope, **kwargs)
        connection.execute(sa.update(live_resets).values(answer=""))
        return tokens

    real = patches.set(resets_service, "begin_reset", begin)


def live_reset_ends_with_its_metaserver(patches: Patches) -> None:
    """No metaserver goes on with a reset whose driver has died, or whose caller waits no more."""

    async def resume(_self: Any) -> None:
        return

    patches.set(live.LiveResets, "resume", resume)


def begun_live_reset_is_canceled(patches: Patches) -> None:
    """A reset is canceled though some of its cursors are set."""

    def cancel(connection: Any, subject: str, group: str) -> Any:
        connection.execute(sa.update(live_resets).values(begun=False))
        return real(connection, subject, group)

    real = patches.set(live, "cancel_live_reset", cancel)


def canceled_live_reset_goes_on(patches: Patches) -> None:
    """An operator is told that a reset is canceled, and it is done nevertheless."""

    def cancel(connection: Any, _subject: str, _group: str) -> Any:
        row = connection.execute(sa.select(live_resets)).first()
        if row is None:
            return real(connection, _subject, _group)
        return row.group_id, msgspec.json.decode(row.ask, type=ResetGroup)

    real = patches.set(live, "cancel_live_reset", cancel)


def parked_messages_outlive_a_reset(patches: Patches) -> None:
    """A reset sets the cursor, and what is parked stays parked."""

    def keep(store: Any, _partition: Any, _group: Any, _changes: Any, **_kwargs: Any) -> Any:
        return store.commit.wait_flushed()

    patches.set(set_cursor, "change_parked", keep)


def reset_of_a_child_forgets_its_parents(patches: Patches) -> None:
    """What a partition took over of its parents is forgotten with its own when it is reset
    alone.
    """
    patches.set(ParkedKey, "copy_sources", lambda self, _sources: ParkedKey(self.since_ms))


# ── instances ─────────────────────────────────────────────────────────────────────────────────────
def instance_waits_for_its_predecessor(patches: Patches) -> None:
    """A process that is started again waits until the ttl of its predecessor has passed."""
    patches.set(group_sessions, "_replace_instance", lambda *_args: ((), ""))


def late_joins_begin_again(patches: Patches) -> None:
    """A late call of a process that was replaced takes the place of its successor."""

    def replace(connection: Any, group_id: int, ask: Any) -> Any:
        ended, _ = real(connection, group_id, ask)
        return ended, ""

    real = patches.set(group_sessions, "_replace_instance", replace)


def unheard_sessions_hold_the_place(patches: Patches) -> None:
    """A late join of a process that is gone ends the one that is at work."""

    def replace(connection: Any, group_id: int, ask: Any) -> Any:
        try:
            return real(connection, group_id, ask)
        except BusyError:
            raise FencedError(Reason.INSTANCE_TAKEN) from None

    real = patches.set(group_sessions, "_replace_instance", replace)


def instance_inherits_the_tokens(patches: Patches) -> None:
    """The new process gets the leases of its predecessor as they are, so that no broker tells the
    two apart.
    """

    def replace(connection: Any, group_id: int, ask: Any) -> Any:
        same = sa.select(sessions.c.session).where(sessions.c.instance == ask.instance)
        if not ask.again:
            theirs = sa.update(leases).where(leases.c.session.in_(same))
            connection.execute(theirs.values(session=ask.session))
        return real(connection, group_id, ask)

    real = patches.set(group_sessions, "_replace_instance", replace)


# ── edits ─────────────────────────────────────────────────────────────────────────────────────────
def edited_messages_come_as_they_were(patches: Patches) -> None:
    """A consumer does not ask for edited values."""

    async def put(_self: Any, _key: Any, _edited: Any, _messages: Any) -> None:
        return

    patches.set(ParkedReads, "_apply_edits", put)


def edits_are_put_in_the_next_place(patches: Patches) -> None:
    """The value of an edited message is handled in the place of the one behind it."""

    async def put(self: Any, key: Any, edited: Any, messages: Any) -> None:
        before = [message.value for message in messages]
        await real(self, key, edited, messages)
        for at, message in enumerate(messages[:-1]):
            if message.value != before[at]:
                messages[at + 1].value, message.value = message.value, before[at]

    real = patches.set(ParkedReads, "_apply_edits", put)


def children_adopt_no_edits(patches: Patches) -> None:
    """A child takes a parent's parked messages over with their first values."""

    def page(parked: Any, wanted: Any, *, first_row: int = 0) -> Any:
        keys, following = real(parked, wanted, first_row=first_row)
        return [msgspec.structs.replace(key, edits=()) for key in keys], following

    real = patches.set(broker_parking, "build_adoption_page", page)


BREAKS: tuple[Breaks, ...] = (
    live_reset_waits_for_no_member,
    group_is_granted_while_cursors_are_set,
    live_reset_ends_with_its_metaserver,
    begun_live_reset_is_canceled,
    canceled_live_reset_goes_on,
    parked_messages_outlive_a_reset,
    reset_of_a_child_forgets_its_parents,
    instance_waits_for_its_predecessor,
    late_joins_begin_again,
    unheard_sessions_hold_the_place,
    instance_inherits_the_tokens,
    edited_messages_come_as_they_were,
    edits_are_put_in_the_next_place,
    children_adopt_no_edits,
)
