"""Long lists of ids are divided among several statements."""

from __future__ import annotations

from keylane.metaserver.sql.dialect import IDS_PER_STATEMENT, split_ids


def test_portions_have_each_id_once_and_ascend_when_ids_are_many():
    """Rows are locked in the same order as by one statement."""
    ids = [*range(2 * IDS_PER_STATEMENT, -1, -1), 7, 7]
    sizes = [len(portion) for portion in split_ids(ids)]
    assert sizes == [IDS_PER_STATEMENT, IDS_PER_STATEMENT, 1]
    assert [each for portion in split_ids(ids) for each in portion] == list(
        range(2 * IDS_PER_STATEMENT + 1)
    )


def test_portions_are_none_when_there_is_no_id():
    """A statement is executed for none."""
    assert list(split_ids([])) == []
