"""What is set aside: parked with its key, alone, or given up; what waits for it, and what the group
owes of it.
"""

from keylane.checker.events import Ended, Looked, Sent, Served, SetAside, Settled, Started, Stored
from keylane.checker.judge import check_history

OWNER, NEXT = "a" * 16, "b" * 16


def handled(offset: int, token: int = 1, session: str = OWNER) -> list[object]:
    value = b"%d" % offset
    return [
        Started("g", session, 1, offset, value, token, 0, 100, False),
        Ended("g", 1, offset, token, session),
    ]


def set_aside(offset: int, token: int = 1, **how: bool) -> SetAside:
    return SetAside("g", 1, token, ((offset, offset + 1),), **how)


def anomalies(*events: object, drained: bool = True) -> set[str]:
    """Of a history in which a key has the messages 0, 1, and 2."""
    sent = [Sent(b"%d" % number, b"k", "p", number, True) for number in range(3)]
    acks = [Settled(b"%d" % number, "stored", 1, number) for number in range(3)]
    log = [Stored(1, number, b"k", b"%d" % number) for number in range(3)]
    findings = check_history([*sent, *acks, *events, *log], drained=drained)
    return {anomaly for anomaly, count in findings.counts.items() if count}


def test_later_messages_go_on_when_one_is_set_aside_alone():
    rest = [*handled(1), *handled(2)]
    assert not anomalies(set_aside(0, alone=True), *rest, *handled(0))
    assert "skip" in anomalies(set_aside(0), *rest, *handled(0))
    assert "skip" in anomalies(*handled(1), set_aside(0, alone=True), *handled(2), *handled(0))


def test_late_effect_counts_no_longer_when_an_operator_skips_its_message():
    """A parked message that is skipped was not acked by the fenced owner that handled it; one that
    is not skipped was.
    """
    begun = Started("g", OWNER, 1, 0, b"0", 1, 0, 100, False)
    again = Started("g", NEXT, 1, 0, b"0", 2, 0, 100, False)
    late = [begun, again, set_aside(0, 2), Ended("g", 1, 0, 1, OWNER)]
    rest = [*handled(1, 2, NEXT), *handled(2, 2, NEXT)]
    assert anomalies(*late, set_aside(0, 0, skipped=True), *rest) == set()
    assert anomalies(*late, *rest) == {"stale effect"}
    other = set_aside(1, 0, skipped=True)
    assert anomalies(*late, other, *handled(2, 2, NEXT)) == {"stale effect"}


def test_message_keeps_no_order_when_it_was_set_aside_alone():
    """It may come again behind later ones, and more than once; later ones are in order among
    themselves still.
    """
    aside = [set_aside(0, alone=True), *handled(1)]
    assert not anomalies(*aside, *handled(0), *handled(0), *handled(2))
    assert "nonmonotonic" in anomalies(*aside, *handled(2), *handled(1), *handled(0))


def test_message_that_is_set_aside_alone_is_owed_until_it_is_handled_or_given_up():
    rest = [set_aside(0, alone=True), *handled(1), *handled(2)]
    assert anomalies(*rest) == {"starvation"}
    assert not anomalies(*rest, drained=False)
    assert not anomalies(*rest, set_aside(0, 0, skipped=True))
    assert not anomalies(*rest, *handled(0, 2, NEXT))


def test_cursor_passes_only_what_its_owner_has_handled_or_set_aside():
    def looks(token: int) -> list[Looked]:
        return [Looked("g", 1, token, 0, 0), Looked("g", 1, token, 1, 0)]

    rest = [*handled(1), *handled(2), *handled(0)]
    assert not anomalies(set_aside(0, alone=True), *looks(1), *rest)
    assert "stale effect" in anomalies(set_aside(0, alone=True), *looks(2), *rest)
    ack = Served("ack", "g", 1, 1, 6, 1, ((0, 1),))
    assert not anomalies(set_aside(0, alone=True), ack, *rest)
    assert "skip" in anomalies(ack, *rest[-2:], *rest[:-2])
