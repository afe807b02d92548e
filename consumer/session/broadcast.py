"""A broadcast consumer's session: it reads without a group, and its acks stay in the process. Pure.

    Read ─▶ handed out ─▶ handled ─▶ due ─▶ acked here: `PullOffsets.acked`, which outlives the
        session

Invariant
    No broker learns of the consumer: there is no fence, no lock and no cursor, and nothing holds
    up retention.
"""

from __future__ import annotations

from ...protocol.backoff import Backoff
from ...protocol.frames import Read
from ...protocol.limits import READ_WAIT_MS
from ...protocol.message import Message
from .ready import FindBroker
from .state import PartitionSession
from .tenure import NEVER

IDLE = Backoff(first_ms=10, max_ms=200)
"""The pauses between reads that bring nothing, from a broker that does not wait for messages."""


def next_read(session: PartitionSession) -> Read:
    """Return the request for the next messages."""
    settings = session.settings
    offset, wait_ms = session.offsets.next_offset, min(settings.pull_wait_ms, READ_WAIT_MS)
    return Read(session.partition_id, offset, settings.pull_bytes, wait_ms=wait_ms)


def end_read(session: PartitionSession, now_ms: int, *, is_empty: bool) -> None:
    """End a read, and pause after one that brought nothing and was answered at once."""
    slot = session.calls.pull
    wait_ms = min(session.settings.pull_wait_ms, READ_WAIT_MS)
    if is_empty and now_ms - slot.begun_ms < max(wait_ms // 2, IDLE.first_ms):
        slot.fail(IDLE, session.rng, now_ms)
    else:
        slot.end()


def fail_read(session: PartitionSession, now_ms: int) -> None:
    """Read again after a pause, from where the broker is then."""
    session.calls.pull.fail(session.settings.backoff, session.rng, now_ms)
    session.output.requests.append(FindBroker())


def ack_here(session: PartitionSession) -> None:
    """Ack what is handled."""
    acks = session.acks
    acks.due_ms = NEVER
    acks.handled.retract()  # what could not be acked before
    while acks.handled:
        for start, end in acks.handled.take():
            session.offsets.ack(start, end)
        acks.handled.confirm()


def leave_out_superfluous(
    session: PartitionSession, messages: list[Message], now_ms: int
) -> list[Message]:
    """Ack rows whose original messages were handled here, and return the other messages."""
    is_superfluous = session.intake.is_superfluous
    if is_superfluous is None:
        return messages
    kept = [message for message in messages if not is_superfluous(message)]
    if len(kept) < len(messages):
        wanted = {message.offset for message in kept}
        for message in messages:
            if message.offset not in wanted:
                session.acks.handled.add(message.offset, message.offset + 1)
        session.intake.held -= len(messages) - len(kept)
        session.let_acks_linger(now_ms)
    return kept
