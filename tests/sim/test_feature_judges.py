"""The judges of features tell what they are for, on histories made by hand."""

from keylane.checker.events import Granted, Sent, Settled, Started
from keylane.checker.findings import Findings
from sim.features.deletions import Life, check_groups, mixed_up, owners_of

LIVES = [Life(frozenset({1}), ended=3), Life(frozenset({2}))]


def _sent(number: int) -> Sent:
    return Sent(b"d0.1:%d" % number, b"k", "d0.1", number, strict=True)


def _started(session: str, partition_id: int, number: int) -> Started:
    return Started("readers", session, partition_id, 0, b"d0.1:%d" % number, 1, 0, 1)


def test_message_is_told_when_it_is_handled_in_the_next_life_of_its_subject():
    """Its sender had an ack of the life in which it was sent, so it belongs to no other."""
    history = [_sent(0), Settled(b"d0.1:0", "stored", 1, 0), _sent(1), _started("s", 2, 1)]
    owners = owners_of(history, LIVES)
    assert owners == {b"d0.1:0": 0, b"d0.1:1": 0}
    (problem,) = mixed_up(history, LIVES, owners)
    assert "d0.1:1" in problem
    assert "partition 2 of life 1" in problem


def test_message_belongs_to_no_life_when_it_is_sent_after_the_deletion_or_after_an_error():
    history = [_sent(0), Settled(b"d0.1:0", "withdrawn"), _sent(1), _sent(2)]
    assert owners_of(history, LIVES) == {}
    history = [_sent(0), Settled(b"d0.1:0", "stored", 1, 0), None, _sent(1)]
    assert owners_of(history, LIVES) == {b"d0.1:0": 0}


def test_session_is_told_when_it_consumes_two_lives():
    history = [
        _sent(0),
        Settled(b"d0.1:0", "stored", 1, 0),
        _started("s", 1, 0),
        _sent(1),
        Settled(b"d0.1:1", "stored", 2, 0),
        _started("s", 2, 1),
    ]
    owners = owners_of(history, LIVES)
    assert mixed_up(history, LIVES, owners) == ["session s consumes two lives"]


def test_token_is_told_when_two_groups_of_one_name_have_it():
    findings = Findings()
    grants = [Granted(group_id, 1, 5, f"s{group_id}", "", 0) for group_id in (1, 2)]
    check_groups(grants, findings)
    assert findings.counts["duplicate token"]
