"""Blocks of rows that `send_arrow` cuts of what it is given, without a broker."""

import subprocess
import sys
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from keylane.producer.tables.arrow import EMPTY_KEY, ArrowSource, Block
from keylane.protocol.errors import InvalidRequestError

LIMIT = 1 << 20


class FrameOfObjects:
    """As a frame of polars with a column of Python objects, which it hands to Arrow as their
    addresses.
    """

    schema: ClassVar = {"v": "Object"}

    def __init__(self, *values: object) -> None:
        self._values = values

    def __getitem__(self, name: str) -> list[object]:
        return {"v": [*self._values]}[name]

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        addresses = [id(value).to_bytes(8, "little") for value in self._values]
        return pa.table({"v": pa.array(addresses, pa.binary(8))}).__arrow_c_stream__()


def block_of(source: object, *, key: str | None = None) -> Block:
    """The only block of a small source."""
    (block,) = ArrowSource(source, key=key, value="v").iter_blocks()
    return block


def values_of(block: Block) -> list[bytes]:
    return [block.values.row(index) for index in range(len(block))]


def test_dictionary_of_views_is_read_as_its_texts():
    """Frames of polars have their categories so; rows of a slice, and rows without a value, too."""
    views = pa.array(["packed", "paid"], pa.string_view())
    indices = pa.array([1, 0, None, 1], pa.uint32())
    column = pa.DictionaryArray.from_arrays(indices, views)
    block = block_of(pa.table({"v": column}).slice(1))
    assert values_of(block) == [b"packed", b"", b"paid"]
    assert block.find_unsendable_rows(LIMIT) == {1: "no value"}


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (3, "3 is neither bytes nor text"),
        (np.array([1, 2]), "array([1, 2]) is neither bytes nor text"),
        ("\ud800", "'\\ud800' is not valid UTF-8: surrogates not allowed"),
        (pd.NA, "no value"),
        (None, "no value"),
    ],
)
def test_object_that_cannot_be_sent_is_told_with_its_row(bad: object, why: str):
    """Whichever of the errors of Python it brings about in Arrow."""
    frame = pd.DataFrame({"v": pd.Series(["a", bad, b"c", 4], dtype=object)})
    block = block_of(frame)
    assert block.find_unsendable_rows(LIMIT) == {1: why, 3: "4 is neither bytes nor text"}
    assert (block.values.row(0), block.values.row(2)) == (b"a", b"c")


def test_missing_key_of_pandas_is_no_key():
    frame = pd.DataFrame({"k": ["a", pd.NA, float("nan"), 4], "v": ["1", "2", "3", "4"]})
    block = block_of(frame, key="k")
    assert block.keys is not None
    assert [block.keys.row(index) for index in range(3)] == [b"a", b"", b""]
    assert list(block.find_unsendable_rows(LIMIT)) == [3]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())],
)
def test_key_that_is_an_empty_text_cannot_be_sent(kind):
    """It is most often a value that is missing; null says that there is no key."""
    keys = pa.array(["a", "", None, ""], pa.string()).cast(kind)
    table = pa.table({"k": keys, "v": ["1", "2", "", "4"]})
    block = block_of(table, key="k")
    assert block.find_unsendable_rows(LIMIT) == {1: EMPTY_KEY, 3: EMPTY_KEY}


def test_key_of_empty_bytes_is_no_key():
    table = pa.table({"k": pa.array([b"a", b"", None]), "v": ["1", "2", "3"]})
    assert block_of(table, key="k").find_unsendable_rows(LIMIT) == {}


def test_empty_key_among_objects_cannot_be_sent():
    frame = pd.DataFrame({"k": ["a", "", 4], "v": ["1", "", "3"]})
    reasons = block_of(frame, key="k").find_unsendable_rows(LIMIT)
    assert reasons == {1: EMPTY_KEY, 2: "4 is neither bytes nor text"}


def test_addresses_of_objects_are_not_sent():
    """The objects themselves are looked at: texts and bytes are sent, others refused."""
    block = block_of(FrameOfObjects("text", object()))
    assert block.values.row(0) == b"text"
    assert list(block.find_unsendable_rows(LIMIT)) == [1]


def test_columns_of_one_name_are_refused():
    """Pandas hands both out as one, whose elements are their names."""
    frame = pd.DataFrame([["a", "b"], ["c", "d"]], columns=["v", "v"])
    with pytest.raises(InvalidRequestError, match="Duplicate column names"):
        block_of(frame)


AFTER_MAIN = """
import asyncio, threading
import pyarrow as pa
from keylane.producer.tables.arrow import ArrowSource

rows = pa.table({"v": ["a", "b"]}).to_reader(max_chunksize=1)

async def read() -> None:
    print([len(blocks) async for blocks in ArrowSource(rows, key=None, value="v").stream_blocks()])

def work() -> None:
    threading.main_thread().join()
    asyncio.run(read())

threading.Thread(target=work).start()
"""


def test_stream_is_read_in_a_thread_that_outlives_the_main_thread():
    """No pool takes work any more."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_MAIN], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("[1, 1]\n", "")
