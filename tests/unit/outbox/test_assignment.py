"""Which waiting rows are recorded in which batches."""

from hypothesis import given
from hypothesis import strategies as st

from keylane.outbox.assignment import (
    Capacity,
    SizeLimit,
    SubjectRange,
    assign,
    capacity_table,
    closed_ranges,
)
from keylane.outbox.batches import OutboxRow, SendSession
from keylane.protocol.limits import LOGICAL_PARTITIONS, MESSAGE_BYTES_MAX

SESSION = SendSession(7, 0)


def row(row_id: int, logical: int = 0, key: bytes = b"k", size: int = 1) -> OutboxRow:
    return OutboxRow(row_id, "s", logical, key, bytes(size), b"", 0)


def two_senders(low: int, high: int) -> list[Capacity | None]:
    capacities = {1: Capacity(1, SESSION, 10, low), 2: Capacity(2, SESSION, 20, high)}
    return capacity_table([1] * 512 + [2] * 512, capacities, [])


def recorded(rows, table, *, halted=(), count=3, size=10_000, limits=None):
    return assign(
        rows,
        {"s": table},
        set(halted),
        limits=limits or {},
        batch_bytes=size,
        batch_count=count,
    )


ROWS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 9_000)), max_size=40
).map(
    lambda assigned: [
        row(number, half * 512, b"%d" % key, size)
        for number, (half, key, size) in enumerate(assigned, 1)
    ]
)


@given(ROWS, st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.integers(1, 10_000))
def test_batches_are_the_first_rows_of_each_lane_in_order(rows, low, high, count, size):
    assigned = recorded(rows, two_senders(low, high), count=count, size=size)
    for partition_id, capacity, start in ((1, low, 10), (2, high, 20)):
        batches = [batch for batch in assigned.batches if batch.partition_id == partition_id]
        own = [each for each in rows if (each.logical < 512) == (partition_id == 1)]
        taken = [each for batch in batches for each in batch.rows]
        assert taken == own[: len(taken)]
        assert len(batches) <= capacity
        assert taken == own or len(batches) == capacity
        expected = start
        for batch in batches:
            assert batch.sequence == expected
            assert 0 < len(batch.rows) <= count
            assert batch.id == batch.rows[0].id
            expected += len(batch.rows)


def test_rows_of_the_largest_size_fit_batches_of_the_largest_setting():
    rows = [row(number, size=MESSAGE_BYTES_MAX - 1) for number in range(1, 4)]
    assigned = recorded(rows, two_senders(5, 5), size=MESSAGE_BYTES_MAX // 2)
    assert [len(batch.encode()) > MESSAGE_BYTES_MAX for batch in assigned.batches] == [True] * 3


def test_rows_of_a_halted_key_are_named_and_others_are_recorded():
    rows = [row(1, key=b"a"), row(2, key=b"b"), row(3, key=b"a"), row(4, key=b"")]
    assigned = recorded(rows, two_senders(1, 1), halted={("s", b"a"), ("other", b"b"), ("s", b"")})
    assert assigned.halted == [1, 3]
    assert [each.id for each in assigned.batches[0].rows] == [2, 4]


def test_row_over_a_confirmed_limit_is_refused_and_newer_rows_of_its_key_go_on():
    rows = [row(1, size=2_000), row(2, size=10), row(3, key=b"", size=2_000)]
    assigned = recorded(rows, two_senders(1, 1), limits={"s": SizeLimit(2_000, True)})
    assert [each.id for batch in assigned.batches for each in batch.rows] == [2, 3]
    assert assigned.refused == {1: assigned.refused[1]}
    assert "2001 bytes" in assigned.refused[1]
    assert not assigned.unconfirmed


def test_row_over_an_unconfirmed_limit_waits_with_the_newer_rows_of_its_key():
    rows = [row(1, size=2_000), row(2, size=10), row(3, key=b"other", size=10)]
    assigned = recorded(rows, two_senders(1, 1), limits={"s": SizeLimit(1_999, False)})
    assert [each.id for batch in assigned.batches for each in batch.rows] == [3]
    assert (assigned.refused, assigned.unconfirmed) == ({}, {"s"})


def test_subject_without_a_table_is_named():
    assigned = assign([row(1)], {}, set(), limits={}, batch_bytes=1, batch_count=1)
    assert assigned.unknown == {"s"}
    assert not assigned.batches


def test_rows_of_a_barred_range_wait():
    capacities = {1: Capacity(1, SESSION, 0, 5)}
    table = capacity_table([1] * LOGICAL_PARTITIONS, capacities, [(256, 512)])
    assigned = recorded([row(1, 255), row(2, 256), row(3, 511), row(4, 512)], table)
    assert [each.id for batch in assigned.batches for each in batch.rows] == [1, 4]
    assert closed_ranges({"s": table}) == [SubjectRange("s", 256, 512)]


def test_rows_wait_while_the_route_is_not_known():
    table = capacity_table([], {}, [])
    assert closed_ranges({"s": table}) == [SubjectRange("s", 0, LOGICAL_PARTITIONS)]
    assert not recorded([row(1)], table).batches
