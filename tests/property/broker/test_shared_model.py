"""A shared group's messages in flight against a model that knows each message by itself."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from keylane.broker.partition.in_flight import InFlight
from keylane.protocol.offsets import AckedOffsets
from support.running.examples import examples

SESSIONS = ["a", "b", "c"]
sessions = st.sampled_from(SESSIONS)


class SharedMachine(RuleBasedStateMachine):
    """Random sends, pulls, acks by any session, silence, deaths, give-backs, restarts of the
    broker, time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 0
        self.readable = 0
        self.acked = AckedOffsets()
        self.in_flight = InFlight(1)
        self.handled: set[int] = set()
        self.with_whom: dict[int, tuple[str, int]] = {}  # offset → (session, until)
        self.silent_at: dict[str, tuple[int, int]] = {}  # session → (ttl, silent from)
        self.left: set[str] = set()

    def lapse(self) -> None:
        """Messages past their deadline are free, and sessions past their ttl are forgotten."""
        silent = {key for key, silence in self.silent_at.items() if silence[1] <= self.now_ms}
        self.with_whom = {
            key: holder
            for key, holder in self.with_whom.items()
            if holder[1] > self.now_ms and holder[0] not in silent
        }

    @rule(session=sessions, ttl_ms=st.integers(1, 100))
    def enter(self, session: str, ttl_ms: int) -> None:
        self.lapse()
        self.in_flight.free_expired(self.now_ms)
        self.in_flight.add_session(session, ttl_ms=ttl_ms, now_ms=self.now_ms)
        self.silent_at[session] = (ttl_ms, self.now_ms + ttl_ms)
        self.left.discard(session)

    @rule(session=sessions)
    def ack_nothing(self, session: str) -> None:
        self.hear(session)

    def hear(self, session: str) -> None:
        self.lapse()
        self.in_flight.free_expired(self.now_ms)
        self.in_flight.renew_session(session, ttl_ms=50, now_ms=self.now_ms)
        ttl_ms, silent_at = self.silent_at.get(session, (50, 0))
        if session in self.in_flight._sessions and silent_at <= self.now_ms:
            ttl_ms = self.in_flight._sessions[session].ttl_ms  # forgotten, or not yet
        self.silent_at[session] = (ttl_ms, self.now_ms + ttl_ms)

    def free(self) -> list[int]:
        self.lapse()
        return [
            offset
            for offset in range(self.readable)
            if offset not in self.handled
            and (offset not in self.with_whom or self.with_whom[offset][1] <= self.now_ms)
        ]

    @rule(count=st.integers(1, 30))
    def send(self, count: int) -> None:
        self.readable += count

    @rule(passed_ms=st.integers(1, 60))
    def wait(self, passed_ms: int) -> None:
        self.now_ms += passed_ms

    @rule(
        session=sessions,
        count_max=st.integers(1, 20),
        in_flight_ms=st.integers(1, 100),
        read_share=st.floats(0, 1),
    )
    def pull(self, session: str, count_max: int, in_flight_ms: int, read_share: float) -> None:
        self.hear(session)
        free = self.free()
        ranges = self.in_flight.hand_out(
            self.acked,
            session,
            count_max=count_max,
            readable_offset=self.readable,
            now_ms=self.now_ms,
            in_flight_ms=in_flight_ms,
        )
        offsets = [offset for start, end in ranges for offset in range(start, end)]
        assert set(offsets) <= set(free), "handed out although acked or in flight"
        assert offsets == free[: len(offsets)], "not the lowest free ones"
        assert len(offsets) <= count_max
        assert bool(offsets) == bool(free)
        upto = offsets[0] + 1 + int(read_share * count_max * 2) if offsets else 0
        kept = self.in_flight.free_from(session, ranges, end_offset=upto)
        assert [offset for start, end in kept for offset in range(start, end)] == [
            offset for offset in offsets if offset < upto
        ]
        for offset in offsets:
            self.with_whom.pop(offset, None)
            if offset < upto:
                self.with_whom[offset] = (session, self.now_ms + in_flight_ms)

    @rule(
        session=sessions,
        start=st.integers(0, 200),
        count=st.integers(1, 20),
        in_flight_ms=st.integers(1, 100),
    )
    def extend_deadlines(self, session: str, start: int, count: int, in_flight_ms: int) -> None:
        self.hear(session)
        held = [
            offset
            for offset in range(start, min(start + count, self.readable))
            if offset not in self.handled and self.with_whom.get(offset, (session, 0))[0] == session
        ]
        self.in_flight.extend_deadlines(
            self.acked,
            session,
            [(start, start + count)] if start + count <= self.readable else [],
            now_ms=self.now_ms,
            in_flight_ms=in_flight_ms,
        )
        if session in self.left:
            held = []
        for offset in held if start + count <= self.readable else []:
            self.with_whom[offset] = (session, self.now_ms + in_flight_ms)

    @rule(start=st.integers(0, 200), count=st.integers(1, 20))
    def ack(self, start: int, count: int) -> None:
        end = min(start + count, self.readable)
        if start >= end:
            return
        self.acked.add(start, end)
        self.in_flight.remove([(start, end)])
        for offset in range(start, end):
            self.handled.add(offset)
            self.with_whom.pop(offset, None)

    @rule(session=sessions)
    def leave(self, session: str) -> None:
        self.in_flight.release_session(session)
        self.silent_at.pop(session, None)
        self.left.add(session)
        self.with_whom = {
            key: value for key, value in self.with_whom.items() if value[0] != session
        }

    @rule()
    def restart(self) -> None:
        self.in_flight = InFlight(1)
        self.with_whom = {}
        self.silent_at = {}
        self.left = set()

    @invariant()
    def what_is_in_flight_is_what_the_model_has(self) -> None:
        self.in_flight.free_expired(self.now_ms)
        handed_of = {
            offset: (handed.session, handed.until_ms)
            for handed in self.in_flight.ranges
            for offset in range(handed.start, handed.end)
        }
        self.lapse()
        alive = self.with_whom
        assert handed_of == alive
        for session in SESSIONS:
            mine = sum(holder[0] == session for holder in alive.values())
            assert self.in_flight.count(session) == mine

    def teardown(self) -> None:
        """Everything is handled in the end, whichever sessions are silent."""
        rounds = 0
        while self.acked.cursor < self.readable:
            self.now_ms += 100
            for start, end in self.in_flight.hand_out(
                self.acked,
                "last",
                count_max=50,
                readable_offset=self.readable,
                now_ms=self.now_ms,
                in_flight_ms=10,
            ):
                self.acked.add(start, end)
                self.in_flight.remove([(start, end)])
            rounds += 1
            assert rounds < 1_000, "something is never handed out"


def test_in_flight_against_the_model() -> None:
    """No message is with two sessions, none acked comes again, the lowest free go first, and all
    are handled.
    """
    run_state_machine_as_test(
        SharedMachine,
        settings=settings(max_examples=examples(150), stateful_step_count=40, deadline=None),
    )
