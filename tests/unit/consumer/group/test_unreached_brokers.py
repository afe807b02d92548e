"""Which brokers a consumer says that it does not reach, and until when."""

from __future__ import annotations

from keylane.consumer.group.reachability import PATIENCE_MS_MIN, UnreachedBrokers, patience_for
from keylane.protocol.limits import UNREACHED_MAX

PATIENCE_MS = 30_000


def failing() -> UnreachedBrokers:
    """g0 has failed since 1,000."""
    brokers = UnreachedBrokers(PATIENCE_MS)
    brokers.update_connections({"g0": 1_000}, {"g1"})
    return brokers


def test_patience_is_the_ttl_but_not_below_the_time_in_which_silence_is_noted() -> None:
    assert patience_for(30_000) == 30_000
    assert patience_for(1_000) == PATIENCE_MS_MIN


def test_broker_is_asked_about_when_the_patience_is_over() -> None:
    brokers = failing()
    assert brokers.find_due(1_000 + PATIENCE_MS - 1) == []
    assert brokers.find_due(1_000 + PATIENCE_MS) == ["g0"]
    assert brokers.reported == ()


def test_broker_is_told_until_it_is_reached() -> None:
    brokers = failing()
    brokers.report("g0", 31_000)
    assert brokers.reported == ("g0",)
    brokers.update_connections({}, set())  # others have its partitions
    assert brokers.find_due(60_999) == []
    assert brokers.find_due(61_000) == ["g0"]
    assert brokers.update_connections({}, {"g0"}) == ["g0"]
    assert brokers.reported == ()


def test_patience_begins_anew_when_the_broker_is_away_for_everybody() -> None:
    brokers = failing()
    assert not brokers.stop_reporting("g0", 31_000)
    brokers.update_connections({"g0": 1_000}, set())
    assert brokers.find_due(31_000 + PATIENCE_MS - 1) == []
    assert brokers.find_due(31_000 + PATIENCE_MS) == ["g0"]


def test_broker_counts_as_reached_when_one_of_its_partitions_is() -> None:
    brokers = UnreachedBrokers(PATIENCE_MS)
    assert not brokers.update_connections({"g0": 0}, {"g0"})
    assert brokers.find_due(10 * PATIENCE_MS) == []


def test_failure_that_ended_counts_from_its_own_beginning_when_the_next_one_comes() -> None:
    brokers = failing()
    brokers.update_connections({}, {"g0"})
    brokers.update_connections({"g0": 20_000}, set())
    assert brokers.find_due(31_000) == []
    assert brokers.find_due(50_000) == ["g0"]


def test_names_that_are_told_are_limited() -> None:
    brokers = UnreachedBrokers(PATIENCE_MS)
    for number in range(UNREACHED_MAX + 5):
        brokers.report(f"g{number:02}", 0)
    assert len(brokers.reported) == UNREACHED_MAX
