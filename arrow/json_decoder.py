"""Decodes the JSON values of a batch into columns with pyarrow's JSON reader. Pure.

    values   {"carrier":"AA","delay":3}  {"carrier":"BA"}  {"carrier":      the third is truncated
                    │ joined by newlines and parsed together;
                    ▼ if that fails, each half is parsed separately, finally each value
    struct   {AA, 3}                     {BA, null}        null, or a CodecError

Fields that are not in the schema are ignored; missing fields become null.

Values that pyarrow rejects are converted one by one in the same way as Spark's `from_json`, if they
are JSON and fit the schema. A string field accepts any JSON, the last of several fields with the
same name counts, a timestamp may be in seconds since 1970 or have more digits than microseconds,
and NaN and infinity are allowed.

Invariants
    Row i of the result is the value of row i. A value that is not exactly one JSON object never
    shifts other rows.
    A string is decoded exactly or rejected; none of its bytes is changed.

A value that begins with { and ends with } cannot continue on the next line, because in JSON a {
never follows a }.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from json.encoder import encode_basestring
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from ..protocol.errors import CodecError, ConfigError, Reason
from .json_schema import json_type
from .selection import ReadOptions

FAIL, NULL = "fail", "null"
SINGLY_ROWS = 256
"""The largest number of rows that are converted one by one after pyarrow has rejected them; more
rows are halved first.
"""
_SPACE = b" \t\r\n"
_EMPTY, _NEWLINE = pa.Array.from_buffers(
    pa.binary(),
    2,
    [None, pa.py_buffer(np.array([0, 0, 1], np.int32)), pa.py_buffer(b"\n")],
    null_count=0,
)


class JsonDecoder:
    """Decodes columns of JSON values."""

    def __init__(self, schema: str | pa.Schema, bad_values: str) -> None:
        """
        Args:
            schema: see `json_schema`.
            bad_values: what happens to a value that does not fit the schema: "fail" raises an
                error, "null" returns null.

        Raises:
            ConfigError: an argument is invalid.
        """
        _check_bad_values(bad_values)
        self.type = json_type(schema)
        self._raises = bad_values == FAIL
        self._parse_options = pj.ParseOptions(
            explicit_schema=pa.schema(list(self.type)), unexpected_field_behavior="ignore"
        )

    def decode(self, values: pa.Array, partition_id: int, first_offset: int) -> pa.Array:
        """
        Return the values as structs.

        Args:
            values: a binary column without nulls, which is not empty.
            partition_id, first_offset: where the first value comes from, for errors.

        Raises:
            CodecError: a value does not fit, and `bad_values` is "fail".
        """
        try:
            chunks = self._decode_chunks(values, 0)
        except _BadRowError as bad:
            offset = first_offset + bad.row
            raise CodecError(
                Reason.JSON_VALUE,
                f"partition {partition_id}, offset {offset}: the value does not fit the JSON "
                f"schema: {bad.reason}",
                partition_id=partition_id,
                offset=offset,
            ) from None
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)

    def _decode_chunks(self, values: pa.Array, row: int) -> list[pa.Array]:
        """Decode `values`, whose first row is `row`, and return them in one or more chunks."""
        try:
            return [self._parse(values)]
        except (pa.ArrowInvalid, UnicodeDecodeError):
            count = len(values)
            if count > SINGLY_ROWS:
                half = count // 2
                return [
                    *self._decode_chunks(values.slice(0, half), row),
                    *self._decode_chunks(values.slice(half), row + half),
                ]
            return list(self._decode_singly(values, row))

    def _decode_singly(self, values: pa.Array, row: int) -> Iterator[pa.Array]:
        """Decode `values` one by one, and yield them in chunks; raise _BadRowError."""
        normalized: list[bytes] = []
        for number, value in enumerate(values.to_pylist()):
            try:
                normalized.append(_normalize(value, self.type))
            except _MismatchError as mismatch:
                try:  # pyarrow accepts more forms of times, and ignores fields that are not read
                    self._parse(values.slice(number, 1))
                    normalized.append(value)
                except (pa.ArrowInvalid, UnicodeDecodeError):
                    if self._raises:
                        raise _BadRowError(row + number, str(mismatch)) from None
                    if normalized:
                        yield self._parse(_binary_array(normalized))
                    yield pa.nulls(1, self.type)
                    normalized = []
        if normalized:
            yield self._parse(_binary_array(normalized))

    def _parse(self, values: pa.Array) -> pa.Array:
        lines = pc.binary_join_element_wise(_strip(values), _EMPTY, _NEWLINE)
        data = np.frombuffer(lines.buffers()[2], np.uint8)
        edges = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines) + 1]
        if np.count_nonzero(data == ord("\n")) > len(lines):
            data = data.copy()
            # A tab is white space between tokens like a newline, and as invalid inside a text.
            data[data == ord("\n")] = ord("\t")
            data[edges[1:] - 1] = ord("\n")
        table = pj.read_json(
            pa.BufferReader(pa.py_buffer(data)),
            pj.ReadOptions(use_threads=False, block_size=len(data) + 1),
            self._parse_options,
        )
        if table.num_rows != len(values):
            raise pa.ArrowInvalid("more than one object")
        columns = [
            column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
            for column in table.columns
        ]
        decoded = pa.StructArray.from_arrays(columns, fields=list(self.type))
        decoded.validate(full=True)  # finds texts that are not UTF-8
        return decoded


def build_json_decoder(options: ReadOptions) -> JsonDecoder | None:
    """Return the decoder for the options, or None if values remain bytes. Raises ConfigError."""
    _check_bad_values(options.bad_values)
    if options.json_schema is None:
        if options.bad_values != FAIL:
            raise ConfigError("bad_values: values are decoded only with a schema: give one too")
        return None
    return JsonDecoder(options.json_schema, options.bad_values)


def _check_bad_values(bad_values: object) -> None:
    """Raise ConfigError if the option is neither "fail" nor "null"."""
    if bad_values not in (FAIL, NULL):
        raise ConfigError(f"bad_values: give {FAIL} or {NULL}, not {bad_values!r:.40}")


class _BadRowError(Exception):
    """The value of a row does not fit the schema."""

    def __init__(self, row: int, reason: str) -> None:
        self.row = row
        self.reason = reason


class _MismatchError(Exception):
    """A value or one of its fields does not fit the schema."""


class _Number(str):
    """A number, as it is written in the JSON."""

    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    """The fields of a JSON object; several may have the same name."""

    __slots__ = ()


_json = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=float
)
_LITERALS = {None: "null", True: "true", False: "false"}
_INTEGER = re.compile(r"-?\d{1,19}")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:\.\d{1,12})?(?:Z|[+-]\d\d(?::?\d\d)?)?)?"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NON_FINITE = {
    "NaN": "NaN",
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), "Infinity"),
    **dict.fromkeys(("-Infinity", "-INF"), "-Infinity"),
}
"""Strings that stand for numbers that JSON cannot represent, mapped to the spelling that pyarrow
reads.
"""


def _normalize(value: bytes, kind: pa.StructType) -> bytes:
    """Rewrite a value as JSON that pyarrow can read with the schema. Raises _MismatchError."""
    try:
        parsed = _json.decode(value.decode())
        if not isinstance(parsed, _Object):
            raise _MismatchError("it is not an object")
        return _to_json(_convert_fields(parsed, kind)).encode()
    except UnicodeError:
        raise _MismatchError("a text is not UTF-8") from None
    except RecursionError:
        raise _MismatchError("it is nested too deeply") from None
    except ValueError as error:
        raise _MismatchError(str(error)) from None


def _convert_fields(value: _Object, kind: pa.StructType) -> _Object:
    by_name = dict(value)
    fields = _Object()
    for field in kind:
        try:
            fields.append((field.name, _convert(by_name.get(field.name), field.type)))
        except _MismatchError as mismatch:
            raise _MismatchError(f"{field.name}: {mismatch}") from None
    return fields


def _convert(value: Any, kind: pa.DataType) -> Any:
    """Convert a part of a value to the given type. Raises _MismatchError."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if type(value) is str else _to_json(value)
    if pa.types.is_struct(kind) and isinstance(value, _Object):
        return _convert_fields(value, kind)
    if pa.types.is_list(kind) and type(value) is list:
        return [_convert(each, kind.value_type) for each in value]
    if pa.types.is_boolean(kind) and type(value) is bool:
        return value
    if pa.types.is_integer(kind) and isinstance(value, _Number) and _INTEGER.fullmatch(value):
        limit = 1 << (kind.bit_width - 1)
        if -limit <= int(value) < limit:
            return value
    if pa.types.is_floating(kind):
        if isinstance(value, _Number):
            # pyarrow refuses a number that is too large for a double.
            number = float(value)
            return _Number(json.dumps(number)) if math.isinf(number) else value
        text = json.dumps(value) if type(value) is float else value
        if type(text) is str and text in _NON_FINITE:
            return _Number(_NON_FINITE[text])
    if pa.types.is_timestamp(kind):
        time = _to_time(value)
        if time is not None:
            return time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    raise _MismatchError(f"{_to_json(value):.60} is not a {kind}")


def _to_time(value: Any) -> datetime | None:
    """Return a time truncated to microseconds, or None if the value is not a time. A time without a
    zone is UTC.
    """
    try:
        if isinstance(value, _Number) and _INTEGER.fullmatch(value):
            return _EPOCH + timedelta(seconds=int(value))
        if type(value) is str and _TIME.fullmatch(value):
            time = datetime.fromisoformat(value)
            return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        pass
    return None


def _to_json(value: Any) -> str:
    """Return a part of a value as JSON without whitespace; numbers keep their original spelling."""
    if type(value) is str:
        return encode_basestring(value)
    if isinstance(value, _Number):
        return str(value)
    if isinstance(value, _Object):
        return "{" + ",".join(f"{_to_json(name)}:{_to_json(each)}" for name, each in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_to_json, value)) + "]"
    if isinstance(value, float):  # NaN and infinity, which JSON cannot represent
        return f'"{json.dumps(value)}"'
    return _LITERALS[value]


def _binary_array(texts: list[bytes]) -> pa.Array:
    # `pa.array(texts)` would import pandas.
    edges = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers, null_count=0)


def _strip(values: pa.Array) -> pa.Array:
    """Strip whitespace from the values. Raises ArrowInvalid if one is not a JSON object."""
    edges = np.frombuffer(values.buffers()[1], np.int32)
    edges = edges[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if _are_objects(data, edges):
        return values
    texts = [bytes(data[start:end]).strip(_SPACE) for start, end in pairwise(edges.tolist())]
    if not all(text[:1] == b"{" and text[-1:] == b"}" for text in texts):
        raise pa.ArrowInvalid("not an object")
    return _binary_array(texts)


def _are_objects(data: np.ndarray, edges: np.ndarray) -> bool:
    """Return True if every value begins with { and ends with }."""
    if np.any(np.diff(edges) < 2):
        return False
    return bool(np.all(data[edges[:-1]] == ord("{")) and np.all(data[edges[1:] - 1] == ord("}")))
