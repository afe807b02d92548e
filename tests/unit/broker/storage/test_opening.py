"""Each opening of a data folder has a name of its own and knows those before it."""

from __future__ import annotations

import random

from keylane.broker.storage.data_folder import (
    FIRST_MAX,
    NEWEST_MAX,
    begin_opening,
    read_opening,
    record_heard,
)
from keylane.broker.storage.data_folder import (
    OPENING_PATH as PATH,
)
from keylane.protocol.control import OPENINGS_MAX
from keylane.testing.machines.disk import SimDisk


def test_opening_names_those_before_it() -> None:
    """One after the other, whether a metaserver heard of them or not."""
    disk, rng = SimDisk(), random.Random(1)
    first = begin_opening(disk, rng=rng)
    assert first.earlier == ()
    record_heard(disk, first)
    second = begin_opening(disk, rng=rng)
    third = begin_opening(disk, rng=rng)
    assert second.earlier == (first.opening,)
    assert third.earlier == (first.opening, second.opening)
    assert len({first.opening, second.opening, third.opening}) == 3


def test_opening_names_the_last_that_was_heard_of_after_many_that_were_not() -> None:
    """However often a broker starts without a metaserver."""
    disk, rng = SimDisk(), random.Random(2)
    for number in range(3 * FIRST_MAX):
        heard = begin_opening(disk, rng=rng)
        record_heard(disk, heard)
        unheard = 10 * NEWEST_MAX if number % 7 == 0 else 0
        for _ in range(unheard):
            last = begin_opening(disk, rng=rng)
            assert heard.opening in last.earlier
            assert len(last.earlier) <= OPENINGS_MAX


def test_opening_is_on_the_disk_before_it_is_told() -> None:
    """A loss of power right after the start leaves its name."""
    disk, rng = SimDisk(), random.Random(3)
    first = begin_opening(disk, rng=rng)
    again = disk.disk_after_crash(random.Random(4))
    assert read_opening(again).opening == first.opening


def test_opening_keeps_the_name_before_it_when_the_disk_takes_no_writes() -> None:
    """A full disk is no reason not to serve what can be read."""
    disk, rng = SimDisk(), random.Random(5)
    first = begin_opening(disk, rng=rng)
    disk.free_space = 0
    assert begin_opening(disk, rng=rng) == first
    record_heard(disk, first)
    assert read_opening(disk) == first


def test_opening_begins_anew_when_its_file_is_unreadable() -> None:
    """What is no JSON of ours is passed over: the metaserver decides whether that is enough."""
    disk, rng = SimDisk(), random.Random(6)
    disk.open_append(PATH).append([b"{not json"])
    assert begin_opening(disk, rng=rng).earlier == ()
