"""The life of a partition under a grant: its states, and the events between them. Pure.

                 ╭── failed ──╮
                 ▼            │
    grant ─▶ ACQUIRING ─acquired─▶ PULLING ─exhausted─▶ EXHAUSTED
                 │                   │                      │
                 ├───────────────────┴──── stopped ─────────┤
                 │                                          ▼
                 │                                      STOPPING ─closed─▶ CLOSED
                 ╰─ fenced, from every state but CLOSED ─▶ FENCED

    state       handlers start   pulls   acks are sent   the user may ack   at the end
    ACQUIRING   yes              no      yes             yes
    PULLING     yes              yes     yes             yes
    EXHAUSTED   yes              no      yes             yes
    STOPPING    no               no      yes             yes
    CLOSED      no               no      the last ones   no                 pull lock released
    FENCED      no               no      no              no                 fence reported

Invariants
    After the lease's end no handler starts, no ack of the user is taken, and no renewal counts:
    messages may be with another consumer by then. While STOPPING the lease can still be renewed,
    and no handler starts. FENCED is final, and keeps the first fence.
"""

from __future__ import annotations

import enum


class PullState(enum.Enum):
    """The state of a pull client."""

    ACQUIRING = enum.auto()
    """The fence at the broker is not raised, or must be raised again after a failure."""
    PULLING = enum.auto()
    EXHAUSTED = enum.auto()
    """The partition is sealed and no more messages will arrive; acks keep the pull lock."""
    STOPPING = enum.auto()
    """The partition is handed over: running handlers end."""
    CLOSED = enum.auto()
    """Its tasks have ended; handled messages are acked once more, and the pull lock is released."""
    FENCED = enum.auto()
    """The broker has seen a higher token, and takes nothing more under this one."""


class PullEvent(enum.Enum):
    """An event in the life of a pull client."""

    ACQUIRED = enum.auto()
    FAILED = enum.auto()
    """A request that may be repeated failed. The broker may have restarted, so the fence is raised
    again.
    """
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
"""The next state by state and event; a pair that is not listed must not happen."""
STARTING = frozenset({_S.ACQUIRING, _S.PULLING, _S.EXHAUSTED})
"""The states in which handlers start."""
ANSWERED = frozenset({_S.PULLING, _S.EXHAUSTED})
"""The states in which the broker has answered."""
ENDED = frozenset({_S.CLOSED, _S.FENCED})
"""The states in which the user's acks are refused."""


class Lifetime:
    """The state and the lease of a pull client; all times are of this machine's boot clock."""

    __slots__ = ("fence", "lease_until_ms", "state")

    def __init__(self, lease_until_ms: int) -> None:
        self.state = PullState.ACQUIRING
        self.lease_until_ms = lease_until_ms
        self.fence = 0
        """The higher token that the broker has seen, if the state is FENCED and the broker named
        it.
        """

    @property
    def fenced(self) -> bool:
        """Return True once the broker has seen a higher token."""
        return self.state is PullState.FENCED

    @property
    def deadline_ns(self) -> int:
        """Return the time after which no handler starts: the end of the lease, or 0 in a state in
        which no handler starts.
        """
        return self.lease_until_ms * 1_000_000 if self.state in STARTING else 0

    def on(self, event: PullEvent) -> None:
        """
        Go to the next state.

        Raises:
            AssertionError: `event` must not happen in the present state.
        """
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            raise AssertionError(
                f"a pull client that is {self.state.name} must not be {event.name}"
            )
        self.state = after

    def on_fence(self, token: int) -> bool:
        """Note that the broker has seen the higher `token` (0: not named), and return True for the
        first fence.
        """
        first = not self.fenced
        self.on(PullEvent.FENCED)
        if first:
            self.fence = token
        return first

    def renew(self, lease_until_ms: int, now_ms: int) -> bool:
        """Let the lease end at `lease_until_ms`, and return False if it has lapsed: a lapsed lease
        is not renewed.
        """
        if self.lapsed(now_ms):
            return False
        self.lease_until_ms = lease_until_ms
        return True

    def lapsed(self, now_ms: int) -> bool:
        """Return True once the right to the partition is lost for good: fenced, or past the end of
        the lease.
        """
        return self.fenced or now_ms >= self.lease_until_ms

    def left_ms(self, now_ms: int) -> int:
        """Return the milliseconds until the lease ends."""
        return 0 if self.fenced else max(0, self.lease_until_ms - now_ms)

    @property
    def acks_until_ns(self) -> int:
        """Return the time until which the user may ack: acks are sent while the lease holds; 0 in a
        state in which none is sent.
        """
        return 0 if self.state in ENDED else self.lease_until_ms * 1_000_000
