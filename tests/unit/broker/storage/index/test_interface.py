"""What every index has to do, shown on both."""

from __future__ import annotations

import random

import pytest

from keylane.broker.storage.index.interface import FIND_UNITS_MAX, Unit, offset_at
from keylane.protocol.control import TimeBound
from keylane.protocol.errors import CorruptLogError
from support.indexes import ALL, KINDS, ListIndex, opener

LOWER, UPPER = TimeBound.LOWER, TimeBound.UPPER


@pytest.fixture(params=KINDS)
def reopen(request, tmp_path):
    """Opens the index, closing the one opened before."""
    opened = []
    make = opener(request.param, tmp_path)

    def again():
        for queues in opened:
            queues.close()
        opened[:] = [make()]
        return opened[0]

    yield again
    opened[0].close()


@pytest.fixture
def queues(reopen):
    return reopen()


def fill(queues, model, *, batches, partitions=3, seed=1, at_ms=1000):
    rng = random.Random(seed)
    units = []
    for _ in range(batches):
        partition_id = rng.randint(1, partitions)
        at_ms += rng.choice((0, 0, 1, 5))
        units.append(
            (
                partition_id,
                model.add(partition_id, rng.randint(1, 5), rng.randint(96, 300), at_ms),
            )
        )
    for start in range(0, len(units), 50):
        queues.dispatch(units[start : start + 50])
    return at_ms


def same(queues, model, partitions=3):
    for partition_id in range(1, partitions + 2):
        bounds = model.bounds(partition_id)
        assert queues.bounds(partition_id) == bounds
        live = model.live(partition_id)
        offset = bounds[0] if bounds else 0
        changed = []
        while part := queues.find(partition_id, offset, end=ALL, bytes_max=ALL):
            changed += part
            offset = part[-1].next_offset
        assert changed == live
    assert queues.partitions() == sorted(model.next)


def test_unknown_partition_has_no_units(queues):
    """An unknown partition has no bounds, no batches, and nothing at any time."""
    assert queues.find(1, 0, end=ALL, bytes_max=ALL) == []
    assert queues.bounds(1) is None
    assert queues.find_by_time(1, 0, LOWER) is None
    assert queues.find_by_time(1, 0, UPPER) is None
    assert queues.partitions() == []


def test_single_batch_is_found_by_offset_and_time(queues):
    """A single batch is found by each of its offsets, and by times before, at and after its own."""
    unit = Unit(0, 3, 500, 100, 1000)
    queues.dispatch([(7, unit)])
    for offset in range(3):
        assert queues.find(7, offset, end=3, bytes_max=1) == [unit]
    assert queues.find(7, 3, end=ALL, bytes_max=ALL) == []
    assert queues.find(7, 0, end=0, bytes_max=ALL) == []
    bounds = {
        (at_ms, bound): offset_at(queues.find_by_time(7, at_ms, bound), bound)
        for at_ms in (999, 1000, 1001)
        for bound in TimeBound
    }
    assert bounds == {
        (999, LOWER): 0,
        (1000, LOWER): 0,
        (1001, LOWER): None,
        (999, UPPER): None,
        (1000, UPPER): 2,
        (1001, UPPER): 2,
    }


def test_every_offset_and_budget(queues):
    """Reads begin at the batch that holds the offset and end at the budget of bytes, at the end, or
    both.
    """
    model = ListIndex()
    fill(queues, model, batches=900)
    rng = random.Random(2)
    for _ in range(300):
        partition_id = rng.randint(1, 3)
        offset = rng.randint(0, model.next[partition_id] + 1)
        end = rng.randint(offset, offset + 300)
        bytes_max = rng.choice((1, 1000, 20_000, ALL))
        wanted = model.find(partition_id, offset, end=end, bytes_max=bytes_max)
        assert queues.find(partition_id, offset, end=end, bytes_max=bytes_max) == wanted


def test_read_is_bounded_by_count(queues):
    """However many bytes are asked for, one call returns a bounded number of batches."""
    units = [(1, Unit(n, 1, 100 * n, 100, n)) for n in range(FIND_UNITS_MAX + 10)]
    queues.dispatch(units)
    assert len(queues.find(1, 5, end=ALL, bytes_max=ALL)) == FIND_UNITS_MAX


def test_gap_is_refused(queues):
    """A batch that does not follow the last one is refused, with all that came with it."""
    queues.dispatch([(1, Unit(0, 2, 0, 100, 1))])
    for base in (0, 1, 3):
        with pytest.raises(CorruptLogError):
            queues.dispatch([(2, Unit(0, 1, 100, 100, 1)), (1, Unit(base, 1, 200, 100, 1))])
    with pytest.raises(CorruptLogError):
        queues.dispatch([(3, Unit(0, 1, 100, 100, 1)), (3, Unit(2, 1, 200, 100, 1))])
    assert queues.bounds(1) == (0, 2)
    assert queues.partitions() == [1]


def test_partition_may_begin_anywhere(queues):
    """The first batch known of a partition need not be its first one: the log before it may be
    gone.
    """
    queues.dispatch([(1, Unit(40, 2, 700, 100, 1)), (1, Unit(42, 2, 800, 100, 1))])
    assert queues.bounds(1) == (40, 44)
    assert queues.find(1, 39, end=ALL, bytes_max=ALL) == []
    assert offset_at(queues.find_by_time(1, 0, LOWER), LOWER) == 40


def test_bounds_find_the_first_and_last_batch_of_equal_times(queues):
    """Of many batches of one time LOWER is the first and UPPER the last, across blocks too."""
    times = [10] * 3 + [20] * 400 + [30] * 3
    queues.dispatch([(1, Unit(n, 1, 100 * n, 100, at)) for n, at in enumerate(times)])
    assert [
        offset_at(queues.find_by_time(1, at, LOWER), LOWER) for at in (9, 10, 15, 20, 21, 30, 31)
    ] == [
        0,
        0,
        3,
        3,
        403,
        403,
        None,
    ]
    assert [
        offset_at(queues.find_by_time(1, at, UPPER), UPPER) for at in (9, 10, 15, 20, 21, 30, 31)
    ] == [
        None,
        2,
        2,
        402,
        402,
        405,
        405,
    ]


def test_clock_that_goes_back(queues):
    """A batch stamped before the one it follows counts as of that one's time, also when it comes
    later.
    """
    queues.dispatch([(1, Unit(n, 1, 100 * n, 100, at)) for n, at in enumerate((100, 200, 150))])
    queues.dispatch([(1, Unit(3, 1, 300, 100, 120)), (1, Unit(4, 1, 400, 100, 250))])
    times = [unit.appended_at_ms for unit in queues.find(1, 0, end=ALL, bytes_max=ALL)]
    assert times == [100, 200, 200, 200, 250]
    assert offset_at(queues.find_by_time(1, 150, LOWER), LOWER) == 1
    assert offset_at(queues.find_by_time(1, 200, UPPER), UPPER) == 3


def test_offset_of_any_time_is_as_in_a_walk_over_all_batches(queues):
    """Any time finds what a walk over all batches finds."""
    model = ListIndex()
    last_ms = fill(queues, model, batches=1500)
    for at_ms in range(995, last_ms + 5, 7):
        for partition_id in (1, 2, 3):
            for bound in TimeBound:
                wanted = model.find_by_time(partition_id, at_ms, bound)
                assert queues.find_by_time(partition_id, at_ms, bound) == wanted


def retained(queues, position):
    return dict(pair for step in queues.retain(position) for pair in step)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_retained_index_keeps_the_batches_above_the_position_over_a_restart(reopen, part):
    """Batches below a position are gone at once, bounds are right, and stay so over a restart."""
    queues, model = reopen(), ListIndex()
    last_ms = fill(queues, model, batches=1200)
    position = int(model.position * part)
    assert retained(queues, position) == model.retain(position)
    assert retained(queues, position) == {}
    same(queues, model)
    for at_ms in range(995, last_ms + 5, 13):
        for bound in TimeBound:
            assert queues.find_by_time(2, at_ms, bound) == model.find_by_time(2, at_ms, bound)
    queues.checkpoint(model.position)
    queues = reopen()
    assert queues.recover(model.position, first_position=position) == model.position
    same(queues, model)
    fill(queues, model, batches=400, seed=3, at_ms=last_ms)
    same(queues, model)


def test_partition_whose_batches_are_all_gone_goes_on(reopen):
    """Retention of everything keeps the numbers: the next batch takes the next offset, the first is
    no gap.
    """
    queues = reopen()
    queues.dispatch([(1, Unit(0, 5, 0, 100, 10))])
    assert retained(queues, 100) == {1: 5}
    assert queues.bounds(1) == (5, 5)
    assert queues.find_by_time(1, 0, LOWER) is None
    assert queues.find_by_time(1, 99, UPPER) is None
    queues.checkpoint(100)
    queues = reopen()
    queues.recover(100, first_position=100)
    with pytest.raises(CorruptLogError):
        queues.dispatch([(1, Unit(0, 1, 100, 100, 5))])
    queues.dispatch([(1, Unit(5, 1, 100, 100, 5))])
    assert queues.bounds(1) == (5, 6)
    assert queues.find_by_time(1, 10, UPPER).base_offset == 5


@pytest.mark.parametrize("batches", [1, 300])
def test_dropped_partition_is_forgotten_when_its_batches_are_gone(reopen, batches):
    """Subjects that come and go leave nothing behind; other partitions keep their numbers, also
    without batches.
    """
    queues, end = reopen(), 300 * batches
    for n in range(batches):
        queues.dispatch(
            [(number, Unit(n, 1, 300 * n + 100 * (number - 1), 100, n)) for number in (1, 2, 3)]
        )
    assert list(queues.retain(150, dropped={1, 3}))
    assert queues.partitions() == [1, 2, 3]
    list(queues.retain(end, dropped={1, 3}))
    queues.checkpoint(end)
    list(queues.retain(end, dropped={1, 3}))
    assert queues.partitions() == [2]
    assert queues.bounds(1) is None
    assert queues.bounds(2) == (batches, batches)
    queues.checkpoint(end + 1)
    queues.close()
    queues = reopen()
    assert queues.recover(end + 1, first_position=end) == end + 1
    list(queues.retain(end, dropped={1, 3}))
    assert queues.partitions() == [2]
    queues.dispatch([(2, Unit(batches, 1, end + 1, 100, 500))])
    assert queues.bounds(2) == (batches, batches + 1)


def test_batches_are_retained_when_the_log_was_cut_below_what_retention_had_removed(reopen):
    queues, model = reopen(), ListIndex()
    queues.dispatch(
        [
            (1, model.add(1, 2, 100, 10)),
            (2, model.add(2, 5, 100, 10)),
            (1, model.add(1, 2, 100, 10)),
        ]
    )
    assert retained(queues, 250) == model.retain(250)
    queues.close()
    queues = reopen()
    known = queues.recover(100)
    assert known == 100
    model.truncate(known)
    queues.dispatch([(2, model.add(2, 6, 100, 20)), (1, model.add(1, 1, 100, 20))])
    assert retained(queues, 150) == model.retain(150) != {}


@pytest.mark.parametrize("batches", [0, 1, 126, 127, 128, 800])
def test_restart_after_a_checkpoint_needs_nothing_again(reopen, batches):
    """What was there at a checkpoint is there after a restart, and only what is newer is asked
    for.
    """
    queues, model = reopen(), ListIndex()
    fill(queues, model, batches=batches, partitions=1)
    queues.checkpoint(model.position + 1000)
    queues = reopen()
    assert queues.recover(model.position + 5000) == (model.position + 1000 if batches else 1000)
    same(queues, model)


@pytest.mark.parametrize("part", [0.0, 0.2, 0.7, 0.99])
def test_older_snapshot_takes_the_index_back(reopen, part):
    """What lies at or after the position that the log is replayed from is forgotten, then
    dispatched again.
    """
    queues, model = reopen(), ListIndex()
    last_ms = fill(queues, model, batches=1000)
    queues.checkpoint(model.position)
    queues = reopen()
    position = int(model.position * part)
    assert queues.recover(position) == position
    model.truncate(position)
    same(queues, model)
    fill(queues, model, batches=500, seed=9, at_ms=last_ms)
    same(queues, model)


def test_log_that_begins_behind_the_index_rebuilds_it(reopen):
    """If the log no longer has what the index lacks, the index begins anew with what the log
    has.
    """
    queues = reopen()
    queues.dispatch([(1, Unit(0, 5, 0, 100, 10))])
    queues.checkpoint(100)
    queues = reopen()
    assert queues.recover(9000, first_position=5000) == 0
    assert queues.partitions() == []
    queues.dispatch([(1, Unit(50, 5, 5000, 100, 10))])
    assert queues.bounds(1) == (50, 55)


def test_dispatch_takes_many_units_of_many_partitions(queues):
    """A group commit's batches are all there, whatever their mixture."""
    model = ListIndex()
    units = [(n % 2 or n, model.add(n % 2 or n, 1, 100, n)) for n in range(2, 1500)]
    queues.dispatch(units)
    assert queues.partitions() == sorted(model.next)
    assert queues.find(1, 0, end=ALL, bytes_max=ALL) == model.live(1)
    assert queues.find(800, 0, end=ALL, bytes_max=ALL) == model.live(800)
    assert queues.find(800, 1, end=ALL, bytes_max=ALL) == []
