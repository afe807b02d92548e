"""A read of some keys returns exactly their rows in order, with the requested columns."""

from __future__ import annotations

import pyarrow as pa

from keylane.arrow.rows import KeyFilter

BATCH = pa.RecordBatch.from_pydict(
    {"key": [b"a", b"", b"b", b"a", b"ab"], "offset": [0, 1, 2, 3, 4]},
    schema=pa.schema([("key", pa.binary()), ("offset", pa.int64())]),
)


def test_rows_of_the_keys_are_chosen_when_the_key_is_no_column():
    chosen = KeyFilter({b"a", b"missing"}, ("offset",))
    assert chosen.columns_to_read == ("offset", "key")
    assert chosen.rows(BATCH).to_pydict() == {"offset": [0, 3]}


def test_columns_keep_their_order_when_the_key_is_one_of_them():
    chosen = KeyFilter({b"b"}, ("key", "offset"))
    assert chosen.columns_to_read == ("key", "offset")
    assert chosen.rows(BATCH).to_pydict() == {"key": [b"b"], "offset": [2]}


def test_no_row_is_left_when_no_key_is_there():
    assert KeyFilter({b"z"}, ("offset",)).rows(BATCH).num_rows == 0
