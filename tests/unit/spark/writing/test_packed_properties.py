"""Properties of a whole column are the bytes of `pack_properties`, row by row."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.protocol.message import pack_properties
from keylane.spark.writing.packed_properties import pack_maps

MAP = pa.map_(pa.string(), pa.string())
TEXTS = st.text(max_size=5) | st.integers(0, 300).map(lambda size: "x" * size)
MAPS = st.none() | st.dictionaries(TEXTS, TEXTS, max_size=20)


@given(st.lists(MAPS, max_size=20), st.integers(0, 3))
def test_column_is_packed_as_each_row_is(rows: list[dict[str, str] | None], left_out: int):
    """Nulls, empty maps, slices, and texts and maps of each kind of head."""
    maps = pa.array([None if row is None else list(row.items()) for row in rows], MAP)
    packed = pack_maps(maps.slice(left_out))
    assert packed.to_pylist() == [pack_properties(row) for row in rows[left_out:]]


def test_long_text_is_packed_as_each_row_is():
    row = {"n": "x" * 300, "m" * 256: "é" * 20_000}
    assert pack_maps(pa.array([list(row.items())], MAP)).to_pylist() == [pack_properties(row)]


@pytest.mark.parametrize(
    "row",
    [[("n", None)], [("n", "1"), ("n", "2")], [("n", "x" * 65_536)], [("n", "x" * 65_535)]],
    ids=["missing", "twice", "too long", "too long together"],
)
def test_row_that_needs_a_look_of_its_own_is_left_to_the_caller(row: list[tuple[str, str | None]]):
    assert pack_maps(pa.array([[("n", "1")], row], MAP)) is None
    assert pack_maps(pa.array([[("n", b"\xff")]], pa.map_(pa.string(), pa.binary()))) is None


def test_worker_imports_no_pandas_when_it_packs():
    """A quarter of a second and 47 MB of each worker."""
    maps = pa.record_batch({"properties": pa.array([[("n", "1")], None], MAP)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, maps.schema) as stream:
        stream.write_batch(maps)
    program = (
        "import sys, pyarrow as pa; from keylane.spark.writing.packed_properties import "
        "pack_maps;"
        "(batch,) = pa.ipc.open_stream(sys.stdin.buffer);"
        "print(pack_maps(batch.column(0)).nbytes > 5, 'pandas' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        input=sink.getvalue().to_pybytes(),
        capture_output=True,
    )
    assert (done.stdout, done.stderr) == (b"True False\n", b"")
