"""Judges wait for messages behind suspects and slow pulls, and for nothing else."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from keylane.testing.machines.loop import SimLoop
from sim.lateness import LONGEST_S, Late, Reasons, outlast_reasons
from sim.run import pool
from sim.service import PATIENCE_S
from sim.slow_disks import run_slow

GROUP = "group0"


def _client(
    partition_id: int = 1,
    *,
    next_offset: int = 10,
    is_careful: bool = False,
    retries_carefully: bool = False,
) -> Any:
    state = SimpleNamespace(
        offsets=SimpleNamespace(next_offset=next_offset),
        suspects=object() if is_careful else None,
        redrives=SimpleNamespace(has_waiting=True, careful_until_ms=2 if retries_carefully else 1),
    )
    clock = SimpleNamespace(boot_ms=lambda: 1)
    return SimpleNamespace(partition_id=partition_id, state=state, _clock=clock)


def _host(*clients: Any) -> Any:
    """A consumer as its host shows it."""
    consumer = SimpleNamespace(_assignments=SimpleNamespace(clients=clients))
    return SimpleNamespace(group=GROUP, running=True, consumer=consumer)


def _waited_s(
    host: Any, late: dict[tuple[str, int], set[int]], script: Callable[[SimLoop], object]
) -> float:
    """How long a judge waits; `script` plans what happens meanwhile."""
    loop = SimLoop(random.Random(1))

    async def wait() -> float:
        script(loop)
        began_s = loop.time()
        await outlast_reasons([host], lambda: late)
        return loop.time() - began_s

    try:
        return loop.run_until_complete(wait())
    finally:
        loop.dispose()


def _nothing(_loop: SimLoop) -> None:
    pass


def test_place_has_a_reason_while_its_owner_handles_suspects():
    host = _host(_client(1, is_careful=True), _client(2))
    late: Late = {(GROUP, 1): {5}, (GROUP, 2): {5}, ("group1", 1): {5}}
    assert Reasons([host]).look(late) == {(GROUP, 1)}
    host.running = False
    assert not Reasons([host]).look(late)
    host.running, host.consumer = True, None
    assert not Reasons([host]).look(late)


def test_place_has_a_reason_while_its_owner_retries_one_message_at_a_time():
    host = _host(_client(1, retries_carefully=True), _client(2))
    assert Reasons([host]).look({(GROUP, 1): {5}, (GROUP, 2): {5}}) == {(GROUP, 1)}


def test_place_has_a_reason_while_its_owner_pulls_what_is_before_late_messages():
    client = _client(next_offset=3)
    reasons, late = Reasons([_host(client)]), {(GROUP, 1): {5, 8}}
    assert reasons.look(late) == {(GROUP, 1)}
    assert not reasons.look(late)  # nothing came since
    client.state.offsets.next_offset = 5
    assert reasons.look(late) == {(GROUP, 1)}
    client.state.offsets.next_offset = 6  # one of them is with the consumer
    assert not reasons.look(late)


def test_judge_waits_for_nothing_when_nothing_is_late_or_there_is_no_reason():
    careful = _host(_client(is_careful=True))
    assert _waited_s(careful, {}, _nothing) == 0
    assert _waited_s(careful, {(GROUP, 2): {5}}, _nothing) == 0
    assert _waited_s(_host(_client()), {(GROUP, 1): {5}}, _nothing) == 0


def test_judge_waits_no_longer_when_one_of_two_places_has_no_reason():
    """What is late there is a fault already."""
    late = {(GROUP, 1): {5}, (GROUP, 2): {5}}
    assert _waited_s(_host(_client(is_careful=True), _client(2)), late, _nothing) == 0


def test_judge_waits_until_what_is_left_behind_suspects_had_its_time():
    client = _client(is_careful=True)
    late = {(GROUP, 1): {5}}
    waited_s = _waited_s(
        _host(client),
        late,
        lambda loop: loop.call_later(20.0, setattr, client.state, "suspects", None),
    )
    assert 20.0 + PATIENCE_S - 1 < waited_s < 20.0 + PATIENCE_S + 1


def test_judge_waits_no_longer_when_a_careful_part_never_ends():
    host, late = _host(_client(is_careful=True)), {(GROUP, 1): {5}}
    assert LONGEST_S <= _waited_s(host, late, _nothing) < LONGEST_S + 1


def test_judge_goes_on_when_all_is_handled():
    host, late = _host(_client(is_careful=True)), {(GROUP, 1): {5}}
    assert 3.0 <= _waited_s(host, late, lambda loop: loop.call_later(3.0, late.clear)) < 4.0


def test_messages_behind_suspects_are_no_fault_when_disks_are_slow():
    """A suspect takes a sync of the disk, so that the careful part takes longer than a silent owner
    takes to expire.
    """
    with pool(1) as executor:
        assert [problem for told in executor.map(run_slow, (1, 2, 3)) for problem in told] == []
