"""Random histories of a partition: every promise holds, whatever happens in whatever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane.consumer.session import step as step_module
from support.running.examples import examples
from support.session.history import POOL, History, play
from support.session.mutants import MUTANTS

FAULTLESS = 600
"""The number of seeds in a run."""
SEEDS_MAX = 4_000
"""A bug is found by one of so many seeds."""


@pytest.mark.parametrize("first", range(0, FAULTLESS, 100))
def test_random_histories_keep_every_promise(first):
    for seed in range(first, first + 100):
        play(seed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_bug_put_in_on_purpose_is_found(mutant):
    with mutant.applied():
        for seed in range(SEEDS_MAX):
            try:
                play(seed)
            except Exception:  # noqa: BLE001 - a bug may show itself as any error
                return
    pytest.fail(f"{mutant.name} was not found")


def test_session_is_decided_by_its_events_and_its_generator(monkeypatch):
    """The same events give the same answers, one by one."""

    def recorded(seed: int) -> list[str]:
        lines: list[str] = []
        real = step_module.step

        def step(session, event, now_ms):
            ready = real(session, event, now_ms)
            lines.append(f"{now_ms} {ready.requests} {ready.hand_out} {ready.wait_until_ms}")
            return ready

        with monkeypatch.context() as patch:
            patch.setattr(step_module, "step", step)
            play(seed)
        return lines

    for seed in range(20):
        assert recorded(seed) == recorded(seed)


class PartitionMachine(RuleBasedStateMachine):
    """The same histories, whose actions hypothesis chooses, and shortens if one fails."""

    history: History

    @initialize(seed=st.integers(0, 1 << 32), which=st.sampled_from(range(len(POOL))))
    def begin(self, seed: int, which: int) -> None:
        import random

        self.history = History(random.Random(seed), POOL[which])

    @rule()
    def answer(self) -> None:
        self._do(History.answer)

    @rule()
    def want(self) -> None:
        self._do(History.want)

    @precondition(lambda self: self.history.run)
    @rule()
    def progress_run(self) -> None:
        self._do(History.progress_run)

    @precondition(lambda self: self.history.hands)
    @rule()
    def handle(self) -> None:
        self._do(History.handle)

    @precondition(lambda self: self.history.hands)
    @rule()
    def fail(self) -> None:
        self._do(History.fail)

    @rule()
    def pass_time(self) -> None:
        self._do(History.pass_time)

    @rule()
    def send(self) -> None:
        self._do(History.send)

    @rule()
    def renew(self) -> None:
        self._do(History.renew)

    @rule()
    def operate(self) -> None:
        self._do(History.operate)

    @rule()
    def damage(self) -> None:
        self._do(History.damage)

    @precondition(lambda self: self.history.hands)
    @rule()
    def hang(self) -> None:
        self._do(History.hang)

    @rule()
    def free_workers(self) -> None:
        self._do(History.free_workers)

    @rule()
    def return_all(self) -> None:
        self._do(History.return_all)

    @rule()
    def pause(self) -> None:
        self._do(History.pause)

    @rule()
    def remove(self) -> None:
        self._do(History.remove)

    @rule()
    def stop(self) -> None:
        self._do(History.stop)

    @rule()
    def crash(self) -> None:
        self._do(History.crash)

    @rule()
    def fence(self) -> None:
        self._do(History.fence)

    def _do(self, action) -> None:
        action(self.history)
        self.history.replace_ended()

    @invariant()
    def count_is_right(self) -> None:
        if hasattr(self, "history"):
            self.history.check_count()

    def teardown(self) -> None:
        if hasattr(self, "history"):
            self.history.heal()


TestPartitionMachine = PartitionMachine.TestCase
TestPartitionMachine.settings = settings(max_examples=examples(200), stateful_step_count=50)
