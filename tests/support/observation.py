"""The actions of programs as events, in the same words for simulated processes and for real
ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keylane.checker.events import (
    Dropped,
    Ended,
    Event,
    LeaseReleased,
    LeasesReported,
    Served,
    SetAside,
    Started,
)
from keylane.consumer.session_shell import SessionShell
from keylane.protocol.frames import (
    Ack,
    Acked,
    Acquire,
    Acquired,
    Answer,
    ChangeParked,
    Pull,
    Release,
    Request,
)
from keylane.protocol.message import Message
from keylane.protocol.parked import Park, ParkOrDeadLetter, decode_changes


def started(
    message: Message,
    *,
    group: str,
    clock_ns: int,
    ours: bool,
    left_ms: Callable[[str], int | None] = lambda session: None,
    with_earlier: bool = False,
) -> Started:
    """A handler of `message` begins now; `left_ms` knows what the database still gives a
    session.
    """
    tenure = _shell(message).state.tenure
    session = tenure.lease.session
    return Started(
        group,
        session,
        message.partition_id,
        message.offset,
        message.value,
        message.fencing_token,
        clock_ns,
        tenure.until_ms * 1_000_000,
        ours,
        left_ms(session),
        with_earlier,
        clock_ns >= tenure.granted_until_ms * 1_000_000,
    )


def ended(message: Message, *, group: str) -> Ended:
    """Its handler returned."""
    place = (message.partition_id, message.offset, message.fencing_token)
    return Ended(group, *place, _shell(message).state.tenure.lease.session)


def dropped(message: Message) -> Dropped:
    """Its handler raised, or was cancelled."""
    session = _shell(message).state.tenure.lease.session
    return Dropped(session, message.partition_id, message.offset)


def _shell(message: Message) -> SessionShell:
    assert message.delivery is not None
    shell = message.delivery.shell
    assert isinstance(shell, SessionShell)
    return shell


def served(request: Request, answer: Answer, began: int) -> Served | None:
    """A broker accepted `request`; None for what needs no fence."""
    cursor, ranges = -1, ()
    if isinstance(request, Acquire):
        assert isinstance(answer, Acquired)
        kind, cursor, ranges = "acquire", answer.cursor, answer.ranges
    elif isinstance(request, Ack):
        assert isinstance(answer, Acked)
        kind, cursor, ranges = "ack", answer.cursor, request.ranges
    elif isinstance(request, ChangeParked):
        kind = "park"
    elif isinstance(request, Pull | Release):
        kind = type(request).__name__.lower()
    else:
        return None
    return Served(kind, request.group, request.partition_id, request.token, began, cursor, ranges)


def set_aside(request: Request, payload: memoryview) -> list[SetAside]:
    """What a broker is asked to park, before it answers."""
    if not isinstance(request, ChangeParked):
        return []
    return [
        SetAside(
            *(request.group, request.partition_id, request.token, change.ranges),
            alone=not isinstance(change.key, bytes),
        )
        for change in decode_changes(payload)
        if isinstance(change, Park | ParkOrDeadLetter) and change.ranges
    ]


class Telling:
    """Notes what a consumer tells the metaserver of its leases; ask before each call."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[tuple[int, int], ...]] = {}

    def events(self, path: str, body: Any) -> list[Event]:
        """The events that this call tells."""
        events: list[Event] = []
        if path == "/v1/consumers/release":
            events.append(LeaseReleased(body.session, body.partition_id, body.token))
        elif path == "/v1/consumers/leave":
            events.append(LeaseReleased(body.session, 0, 0))
        holding = getattr(body, "holding", None)
        if holding is not None and self._held.get(body.session) != holding:
            self._held[body.session] = holding
            events.append(LeasesReported(body.session, holding))
        return events
