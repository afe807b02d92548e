"""Where the bands of a lineage lie, for histories that are right and for others."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from keylane.console.lineage.bands import BANDS_MAX, MOMENTS_MAX, Band, lay_out_bands
from keylane.protocol.operations import PartitionHistory
from keylane.protocol.routing import Partition, PartitionState
from support.lineages import MINUTE_MS, NOON_MS, SubjectStory


def changes() -> st.SearchStrategy[list[tuple[str, int]]]:
    resizes = st.tuples(st.just("resize"), st.integers(1, 40))
    moves = st.tuples(st.just("move"), st.integers(0, 1_000))
    return st.lists(st.one_of(resizes, moves), max_size=12)


def told(changes: list[tuple[str, int]], *, timed: bool, step_ms: int = MINUTE_MS) -> SubjectStory:
    story = SubjectStory()
    story.resize(4, timed=timed)
    for kind, number in changes:
        story.at_ms += step_ms
        if kind == "resize":
            story.resize(number, timed=timed)
        else:
            story.move(story.open_ids[number % len(story.open_ids)], "g9", timed=timed)
    return story


def is_apart(one: Band, other: Band) -> bool:
    ranges = [(each.partition.range_start, each.partition.range_end) for each in (one, other)]
    low, high = max(low for low, _ in ranges), min(high for _, high in ranges)
    moments = [(each.start, 1_000 if each.end is None else each.end) for each in (one, other)]
    start, end = max(start for start, _ in moments), min(end for _, end in moments)
    return low >= high or start >= end


@given(changes(), st.booleans())
def test_bands_cover_each_logical_partition_once_at_any_moment(changes, timed):
    """Also where no time is known, because the lineage tells the order."""
    bands = lay_out_bands(told(changes, timed=timed).entries.values())
    for moment in range(len(bands.times_ms)):
        sizes = [
            band.partition.range_end - band.partition.range_start
            for band in bands.bands
            if band.start <= moment and (band.end is None or moment < band.end)
        ]
        assert sum(sizes) == 1024
    assert all(is_apart(*pair) for pair in combinations(bands.bands, 2))


@given(changes())
def test_moments_are_the_changes_when_their_times_are_known(changes):
    story = told(changes, timed=True)
    times_ms = lay_out_bands(story.entries.values()).times_ms
    opened = sorted({entry.opened_ms for entry in story.entries.values()})
    assert list(times_ms) == opened


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1023),
            st.integers(1, 1024),
            st.lists(st.integers(1, 12), max_size=3),
            st.one_of(st.none(), st.integers(NOON_MS, NOON_MS + 5)),
        ),
        max_size=12,
    )
)
def test_bands_never_overlap_whatever_the_database_says(rows):
    """Partitions that are their own ancestors, siblings that overlap, a calendar that jumped."""
    entries = []
    for number, (low, size, parents, opened_ms) in enumerate(rows, 1):
        partition = Partition(
            partition_id=number,
            name=f"s.p{number}",
            queue=0,
            range_start=low,
            range_end=min(1024, low + size),
            broker_group="g1",
            state=PartitionState.OPEN,
            parents=tuple(parents),
        )
        entries.append(PartitionHistory(partition=partition, opened_ms=opened_ms))
    bands = lay_out_bands(entries)
    assert len(bands.bands) == len(entries)
    assert all(band.end is None or band.start < band.end for band in bands.bands)
    assert all(is_apart(*pair) for pair in combinations(bands.bands, 2))


def test_parent_begins_before_its_child_when_the_calendar_jumps_back():
    """The time of the child is then not shown, because it would be wrong."""
    story = SubjectStory()
    story.resize(2)
    story.at_ms -= MINUTE_MS
    story.resize(1)
    bands = lay_out_bands(story.entries.values())
    assert bands.times_ms == (NOON_MS, None)
    assert [(band.start, band.end) for band in bands.bands] == [(0, 1), (0, 1), (1, None)]


def test_upgraded_subject_has_times_from_the_first_change_on():
    """keylane 0.2 stored none."""
    story = SubjectStory()
    story.resize(4, timed=False)
    story.resize(6, timed=False)
    story.resize(3)
    assert lay_out_bands(story.entries.values()).times_ms == (None, None, NOON_MS)


def test_planned_partitions_have_no_bands():
    story = SubjectStory()
    story.resize(2)
    story.resize(3)
    for number in story.open_ids:
        story.set_state(number, PartitionState.PLANNED)
    assert len(lay_out_bands(story.entries.values()).bands) == 2


def test_oldest_bands_are_left_out_when_there_are_too_many():
    """What is left begins at the first moment that is left."""
    story = SubjectStory()
    for count in (1_000, 701, 999) * 2:
        story.at_ms += MINUTE_MS
        story.resize(count)
    bands = lay_out_bands(story.entries.values())
    assert len(bands.bands) <= BANDS_MAX
    assert bands.earlier == len(story.entries) - len(bands.bands) > 0
    assert min(band.start for band in bands.bands) == 0
    assert sum(band.end is None for band in bands.bands) == 999


def test_oldest_moments_are_left_out_when_there_are_too_many():
    story = SubjectStory()
    story.resize(2)
    for number in range(MOMENTS_MAX + 50):
        story.at_ms += MINUTE_MS
        story.move(story.open_ids[-1], f"g{number % 2}")
    bands = lay_out_bands(story.entries.values())
    assert len(bands.times_ms) == MOMENTS_MAX
    assert bands.times_ms[-1] == story.at_ms
    assert bands.bands[0].start == 0
    assert bands.bands[0].end is None
