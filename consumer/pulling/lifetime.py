"""The state machine of a partition under a grant. Pure.

                 ╭── failed ──╮
                 ▼            │
    grant ─▶ ACQUIRING ─acquired─▶ PULLING ─exhausted─▶ EXHAUSTED
                 │                   │                      │
                 ├───────────────────┴──── stopped ─────────┤
                 │                                          ▼
                 │                                      STOPPING ─closed─▶ CLOSED
                 ╰─ fenced, from every state but CLOSED ─▶ FENCED

    state       handlers start   pulls   acks are sent   the user may ack   then
    ACQUIRING   yes              no      yes             yes
    PULLING     yes              yes     yes             yes
    EXHAUSTED   yes              no      yes             yes
    STOPPING    no               no      yes             yes
    CLOSED      no               no      the last ones   no                 release the pull lock
    FENCED      no               no      no              no                 report the fence

Invariants
    After the lease ends, no handler starts, the user's acks are refused, and renewals are ignored,
    because another consumer may have the messages. While STOPPING the lease can still be renewed,
    but no handler starts. FENCED is final, and keeps the first fence.
"""

from __future__ import annotations

import enum


class PullState(enum.Enum):
    """The state of a pull client."""

    ACQUIRING = enum.auto()
    """The fence must be raised at the broker, either for the first time or after a failure."""
    PULLING = enum.auto()
    EXHAUSTED = enum.auto()
    """The partition is sealed and fully pulled; ack requests keep the pull lock."""
    STOPPING = enum.auto()
    """The partition is being handed over, and running handlers are ending."""
    CLOSED = enum.auto()
    """The tasks have ended; the last acks are sent, and the pull lock is released."""
    FENCED = enum.auto()
    """The broker has seen a higher token, and refuses this one."""


class PullEvent(enum.Enum):
    """An event in the life of a pull client."""

    ACQUIRED = enum.auto()
    FAILED = enum.auto()
    """A retryable request failed. The broker may have restarted, so the fence is raised again."""
    EXHAUSTED = enum.auto()
    STOPPED = enum.auto()
    CLOSED = enum.auto()
    FENCED = enum.auto()


_S, _E = PullState, PullEvent
TRANSITIONS: dict[tuple[PullState, PullEvent], PullState] = {
    (_S.ACQUIRING, _E.ACQUIRED): _S.PULLING,
    (_S.ACQUIRING, _E.FAILED): _S.ACQUIRING,
    (_S.ACQUIRING, _E.STOPPED): _S.STOPPING,
    (_S.ACQUIRING, _E.FENCED): _S.FENCED,
    (_S.PULLING, _E.FAILED): _S.ACQUIRING,
    (_S.PULLING, _E.EXHAUSTED): _S.EXHAUSTED,
    (_S.PULLING, _E.STOPPED): _S.STOPPING,
    (_S.PULLING, _E.FENCED): _S.FENCED,
    (_S.EXHAUSTED, _E.STOPPED): _S.STOPPING,
    (_S.EXHAUSTED, _E.FENCED): _S.FENCED,
    (_S.STOPPING, _E.STOPPED): _S.STOPPING,
    (_S.STOPPING, _E.CLOSED): _S.CLOSED,
    (_S.STOPPING, _E.FENCED): _S.FENCED,
    (_S.FENCED, _E.STOPPED): _S.FENCED,
    (_S.FENCED, _E.CLOSED): _S.FENCED,
    (_S.FENCED, _E.FENCED): _S.FENCED,
}
"""The next state for each state and event; any other pair is a bug."""
STARTING = frozenset({_S.ACQUIRING, _S.PULLING, _S.EXHAUSTED})
"""The states in which handlers start."""
ANSWERED = frozenset({_S.PULLING, _S.EXHAUSTED})
"""The states in which the broker has replied."""
ENDED = frozenset({_S.CLOSED, _S.FENCED})
"""The states in which the user's acks are refused."""


class Lifetime:
    """The state and lease of a pull client. All times are on this machine's boot clock."""

    __slots__ = ("fence", "lease_until_ms", "state")

    def __init__(self, lease_until_ms: int) -> None:
        self.state = PullState.ACQUIRING
        self.lease_until_ms = lease_until_ms
        self.fence = 0
        """In the FENCED state, the higher token that the broker has seen; 0 if it is unknown."""

    @property
    def fenced(self) -> bool:
        """True once the broker has seen a higher token."""
        return self.state is PullState.FENCED

    @property
    def deadline_ns(self) -> int:
        """The time after which no handler starts: the end of the lease, or 0 if none may start in
        the current state.
        """
        return self.lease_until_ms * 1_000_000 if self.state in STARTING else 0

    def handle_event(self, event: PullEvent) -> None:
        """
        Move to the next state.

        Raises:
            AssertionError: `event` must not occur in the current state.
        """
        next_state = TRANSITIONS.get((self.state, event))
        if next_state is None:
            raise AssertionError(
                f"a pull client that is {self.state.name} must not be {event.name}"
            )
        self.state = next_state

    def on_fence(self, token: int) -> bool:
        """Record that the broker has seen a higher token, which is 0 if unknown. Return True the
        first time.
        """
        is_first = not self.fenced
        self.handle_event(PullEvent.FENCED)
        if is_first:
            self.fence = token
        return is_first

    def renew(self, lease_until_ms: int, now_ms: int) -> bool:
        """Extend the lease to `lease_until_ms`. If it has already lapsed, return False and do
        nothing.
        """
        if self.lapsed(now_ms):
            return False
        self.lease_until_ms = lease_until_ms
        return True

    def lapsed(self, now_ms: int) -> bool:
        """Return True once the partition is fenced, or its lease has ended."""
        return self.fenced or now_ms >= self.lease_until_ms

    def left_ms(self, now_ms: int) -> int:
        """Return the milliseconds until the lease ends."""
        return 0 if self.fenced else max(0, self.lease_until_ms - now_ms)

    @property
    def ack_deadline_ns(self) -> int:
        """The time until which the user may ack: the end of the lease, or 0 if acks are refused in
        the current state.
        """
        return 0 if self.state in ENDED else self.lease_until_ms * 1_000_000
