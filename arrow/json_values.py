"""Values that are JSON become columns, a batch at a time, by pyarrow's reader of JSON.  Pure.

    values   {"carrier":"AA","delay":3}  {"carrier":"BA"}  {"carrier":            the third is cut
                    │ joined by newlines, parsed at once; halved where that fails
                    ▼
    struct   {AA, 3}                     {BA, null}        null, or a JsonValueError

A field that the schema lacks is left out; one that a value lacks is null.

Invariants
    Row i of the result is the value of row i: a value that is not exactly one JSON object never shifts another.

Source: a line that begins with { and ends with } cannot go on in the next line: no JSON has { behind }.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ..protocol.errors import ConfigError, JsonValueError
from .json_schema import json_type
from .selection import ReadOptions

FAIL, NULL = "fail", "null"
_SPACE = b" \t\r\n"
_EMPTY, _NEWLINE = pa.Array.from_buffers(
    pa.binary(),
    2,
    [None, pa.py_buffer(np.array([0, 0, 1], np.int32)), pa.py_buffer(b"\n")],
    null_count=0,
)


class JsonValues:
    """Decodes columns of values."""

    def __init__(self, schema: str | pa.Schema, bad_values: str) -> None:
        """
        Args:
            schema: see `json_schema`.
            bad_values: what a value that does not fit becomes: "fail", an error; "null", a null.

        Raises:
            ConfigError
        """
        _check_bad_values(bad_values)
        self.type = json_type(schema)
        self._fails = bad_values == FAIL
        self._parsing = pj.ParseOptions(
            explicit_schema=pa.schema(list(self.type)), unexpected_field_behavior="ignore"
        )

    def decode(self, values: pa.Array, partition_id: int, first_offset: int) -> pa.Array:
        """
        The values as structs.

        Args:
            values: a binary column without nulls, not empty.
            partition_id, first_offset: where the first of them comes from, for errors.

        Raises:
            JsonValueError: a value does not fit, and `bad_values` is "fail".
        """
        try:
            chunks = self._chunks(values, 0)
        except _BadValueError as bad:
            offset = first_offset + bad.row
            raise JsonValueError(
                f"partition {partition_id}, offset {offset}: the value is not JSON of the schema: {bad.reason}",
                partition_id=partition_id,
                offset=offset,
            ) from None
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)

    def _chunks(self, values: pa.Array, row: int) -> list[pa.Array]:
        """`values`, decoded, in pieces; the first of them is row `row`."""
        try:
            return [self._parsed(values)]
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            count = len(values)
            if count > 1:
                half = count // 2
                return [
                    *self._chunks(values.slice(0, half), row),
                    *self._chunks(values.slice(half), row + half),
                ]
            if self._fails:
                raise _BadValueError(row, str(error).removesuffix(" in row 0")) from None
            return [pa.nulls(1, self.type)]

    def _parsed(self, values: pa.Array) -> pa.Array:
        lines = pc.binary_join_element_wise(_trimmed(values), _EMPTY, _NEWLINE)
        data = np.frombuffer(lines.buffers()[2], np.uint8)
        edges = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines) + 1]
        if np.count_nonzero(data == ord("\n")) > len(lines):
            data = data.copy()
            data[data == ord("\n")] = ord(" ")
            data[edges[1:] - 1] = ord("\n")
        table = pj.read_json(
            pa.BufferReader(pa.py_buffer(data)),
            pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            self._parsing,
        )
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("more than one object")
        columns = [
            column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            for column in table.columns
        ]
        made = pa.StructArray.from_arrays(columns, fields=list(self.type))
        made.validate(full=True)  # a text may be no UTF-8
        return made


def json_values(options: ReadOptions) -> JsonValues | None:
    """The decoder that the options ask for; None: values stay bytes.  Raises ConfigError."""
    _check_bad_values(options.bad_values)
    if options.json_schema is None:
        return None
    return JsonValues(options.json_schema, options.bad_values)


def _check_bad_values(bad_values: object) -> None:
    """Raises ConfigError, also where no schema is given that it would be of."""
    if bad_values not in (FAIL, NULL):
        raise ConfigError(f"bad_values: {FAIL} or {NULL} is wanted, not {bad_values!r:.40}")


class _BadValueError(Exception):
    """A value does not fit."""

    def __init__(self, row: int, reason: str) -> None:
        self.row = row
        self.reason = reason


def _trimmed(values: pa.Array) -> pa.Array:
    """The values without white space around them; raises ArrowInvalid if one is no JSON object."""
    edges = np.frombuffer(values.buffers()[1], np.int32)
    edges = edges[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if _are_objects(data, edges):
        return values
    texts = [bytes(data[start:end]).strip(_SPACE) for start, end in pairwise(edges.tolist())]
    edges = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    joined = b"".join(texts)
    if not _are_objects(np.frombuffer(joined, np.uint8), edges):
        raise pa.ArrowInvalid("no object")
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(joined)]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers, null_count=0)


def _are_objects(data: np.ndarray, edges: np.ndarray) -> bool:
    """True if every value begins with { and ends with }."""
    if np.any(np.diff(edges) < 2):
        return False
    return bool(np.all(data[edges[:-1]] == ord("{")) and np.all(data[edges[1:] - 1] == ord("}")))
