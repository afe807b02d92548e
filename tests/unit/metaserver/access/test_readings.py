"""Of readings that overlap the newest counts, and of others the last."""

from __future__ import annotations

from keylane.metaserver.access.readings import ReadOrder


def test_reading_counts_when_it_has_the_higher_version_of_two_that_overlap() -> None:
    for first, second in ((1, 2), (2, 1)):
        for order in (((1, first), (2, second)), ((2, second), (1, first))):
            readings = ReadOrder()
            assert (readings.begin(), readings.begin()) == (1, 2)
            taken = [version for number, version in order if readings.is_newest(number, version)]
            assert taken[-1] == 2


def test_later_reading_counts_when_versions_are_equal() -> None:
    readings = ReadOrder()
    readings.begin(), readings.begin()
    assert readings.is_newest(2, 5)
    assert not readings.is_newest(1, 5)


def test_reading_counts_when_it_began_after_the_newest_ended() -> None:
    """A database that was restored from a backup has a lower version."""
    readings = ReadOrder()
    assert readings.is_newest(readings.begin(), 7)
    assert readings.is_newest(readings.begin(), 3)


def test_older_reading_is_passed_over_when_a_chain_of_others_overlaps() -> None:
    readings = ReadOrder()
    first, second = readings.begin(), readings.begin()
    assert readings.is_newest(second, 8)
    third = readings.begin()
    assert not readings.is_newest(first, 7)
    assert readings.is_newest(third, 8)
