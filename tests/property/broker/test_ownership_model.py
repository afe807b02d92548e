"""Owners against a model: only the newest token acts, the fence outlives crashes, the cursor
follows its acks alone.
"""

from __future__ import annotations

import asyncio
import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keylane.protocol.errors import FencedError, TokenUnknownError
from keylane.protocol.offsets import AckedOffsets
from keylane.testing.machines.disk import SimDisk
from sim.machines.clock import ManualClock
from sim.machines.store import Desk, batch, open_store
from support.running.examples import examples

STORED = 30
tokens = st.integers(1, 8)
sessions = st.sampled_from(["a" * 16, "b" * 16, "c" * 16])
offsets = st.integers(0, STORED)


class OwnershipAgainstAModel(RuleBasedStateMachine):
    """The model: the highest token, its session, whether it released, and the set of acked
    offsets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = SimDisk()
        self.clock = ManualClock()
        self.fence = 0
        self.session = ""
        self.released = False
        self.acked: set[int] = set()
        self.start()
        self.run(self.desk.host())
        self.run(self.desk.append(batch(count=STORED)))

    def start(self) -> None:
        self.desk = Desk(open_store(self.disk, clock=self.clock), self.clock)

    def run(self, call):
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        self.loop.close()

    def expected(self, token: int, session: str) -> type[Exception] | None:
        if token > self.fence:
            return TokenUnknownError
        if token < self.fence or session != self.session or self.released:
            return FencedError
        return None

    def outcome(self, call, error: type[Exception] | None):
        try:
            answer = self.run(call)
        except (FencedError, TokenUnknownError) as refused:
            kind = type(refused)
            assert kind is error
            return None
        assert error is None
        return answer

    @rule(token=tokens, session=sessions)
    def acquire(self, token: int, session: str) -> None:
        refused = token < self.fence or (token == self.fence and session != self.session)
        answer = self.outcome(self.desk.acquire(token, session), FencedError if refused else None)
        if answer is not None:
            self.fence, self.session, self.released = token, session, False
            told = AckedOffsets(answer.cursor, list(answer.ranges))
            assert {offset for offset in range(STORED) if offset in told} == self.acked

    @rule(token=tokens, session=sessions, start=offsets, count=st.integers(1, 5))
    def ack(self, token: int, session: str, start: int, count: int) -> None:
        start = min(start, STORED - 1)
        end = min(start + count, STORED)
        call = self.desk.ack(token, (start, end), session=session)
        if self.outcome(call, self.expected(token, session)) is not None:
            self.acked |= set(range(start, end))

    @rule(token=tokens, session=sessions, offset=offsets)
    def pull(self, token: int, session: str, offset: int) -> None:
        call = self.desk.pull(token, offset, session)
        answer = self.outcome(call, self.expected(token, session))
        if answer is not None:
            assert answer[0].upto == STORED

    @rule(token=tokens, session=sessions)
    def release(self, token: int, session: str) -> None:
        call = self.desk.release(token, session)
        if self.outcome(call, self.expected(token, session)) is not None:
            self.released = True

    @rule(ms=st.integers(1, 10_000))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule(seed=st.integers(0, 1000))
    def crash(self, seed: int) -> None:
        """A release is forgotten after a crash; everything else is as it was."""
        self.disk = self.disk.disk_after_crash(random.Random(seed))
        self.released = False
        self.start()

    @invariant()
    def same_progress(self) -> None:
        group = self.desk.store.state.partition(1).groups.get("audit")
        if group is None:
            assert not self.fence
            return
        assert group.lock.fence == group.durable_fence == self.fence
        assert {offset for offset in range(STORED) if offset in group.acked} == self.acked


TestOwnership = OwnershipAgainstAModel.TestCase
TestOwnership.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)
