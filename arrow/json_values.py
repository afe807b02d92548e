"""Decodes JSON values into columns, a batch at a time, with pyarrow's JSON reader. Pure.

    values   {"carrier":"AA","delay":3}  {"carrier":"BA"}  {"carrier":      the third is truncated
                    │ joined by newlines and parsed together;
                    ▼ if that fails, each half is parsed alone, at last each value
    struct   {AA, 3}                     {BA, null}        null, or a CodecError

Fields of a value that are not in the schema are ignored; fields that a value lacks become null.

Values that pyarrow refuses are read one by one, in the way of Spark's `from_json`, as far as they
are JSON and fit: any JSON as a string, the last of two fields of the same name, seconds since 1970
and fractions beyond microseconds as a timestamp, NaN and infinity.

Invariants
    Row i of the result is the value of row i: a value that is not exactly one JSON object never
    shifts other rows.
    A text is decoded exactly as its JSON says, or its value does not fit: no byte of it is changed.

Source: a value that begins with { and ends with } cannot continue in the next line, because in JSON
no { follows a }.
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
"""Number of rows up to which each value is read alone, after pyarrow has refused them together."""
_SPACE = b" \t\r\n"
_EMPTY, _NEWLINE = pa.Array.from_buffers(
    pa.binary(),
    2,
    [None, pa.py_buffer(np.array([0, 0, 1], np.int32)), pa.py_buffer(b"\n")],
    null_count=0,
)


class JsonValues:
    """Decodes columns of JSON values."""

    def __init__(self, schema: str | pa.Schema, bad_values: str) -> None:
        """
        Args:
            schema: see `json_schema`.
            bad_values: the treatment of a value that does not fit: "fail" raises an error, "null"
                makes it null.

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
        Return the values as structs.

        Args:
            values: a binary column without nulls, not empty.
            partition_id, first_offset: the origin of the first value, for errors.

        Raises:
            CodecError: a value does not fit, and `bad_values` is "fail".
        """
        try:
            chunks = self._chunks(values, 0)
        except _BadValueError as bad:
            offset = first_offset + bad.row
            raise CodecError(
                Reason.JSON_VALUE,
                f"partition {partition_id}, offset {offset}: the value is not JSON of the schema: "
                f"{bad.reason}",
                partition_id=partition_id,
                offset=offset,
            ) from None
        return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)

    def _chunks(self, values: pa.Array, row: int) -> list[pa.Array]:
        """Decode `values`, which begin at row `row`, and return them in pieces."""
        try:
            return [self._parsed(values)]
        except (pa.ArrowInvalid, UnicodeDecodeError):
            count = len(values)
            if count > SINGLY_ROWS:
                half = count // 2
                return [
                    *self._chunks(values.slice(0, half), row),
                    *self._chunks(values.slice(half), row + half),
                ]
            return list(self._singly(values, row))

    def _singly(self, values: pa.Array, row: int) -> Iterator[pa.Array]:
        """Decode `values` one by one, and yield them in pieces; raise _BadValueError."""
        plain: list[bytes] = []
        for number, value in enumerate(values.to_pylist()):
            try:
                plain.append(_plain(value, self.type))
            except _UnfitError as unfit:
                try:  # pyarrow knows more forms of a time, and passes over fields that are not read
                    self._parsed(values.slice(number, 1))
                    plain.append(value)
                except (pa.ArrowInvalid, UnicodeDecodeError):
                    if self._fails:
                        raise _BadValueError(row + number, str(unfit)) from None
                    if plain:
                        yield self._parsed(_column(plain))
                    yield pa.nulls(1, self.type)
                    plain = []
        if plain:
            yield self._parsed(_column(plain))

    def _parsed(self, values: pa.Array) -> pa.Array:
        lines = pc.binary_join_element_wise(_trimmed(values), _EMPTY, _NEWLINE)
        data = np.frombuffer(lines.buffers()[2], np.uint8)
        edges = np.frombuffer(lines.buffers()[1], np.int32)[: len(lines) + 1]
        if np.count_nonzero(data == ord("\n")) > len(lines):
            data = data.copy()
            # White space between tokens all the same, and no JSON inside a text, as a newline is
            # none.
            data[data == ord("\n")] = ord("\t")
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
        decoded = pa.StructArray.from_arrays(columns, fields=list(self.type))
        decoded.validate(full=True)  # a text may be no UTF-8
        return decoded


def json_values(options: ReadOptions) -> JsonValues | None:
    """Return the decoder that the options ask for, or None if values stay bytes; raise
    ConfigError.
    """
    _check_bad_values(options.bad_values)
    if options.json_schema is None:
        if options.bad_values != FAIL:
            raise ConfigError("bad_values: no value is decoded without a schema: give one too")
        return None
    return JsonValues(options.json_schema, options.bad_values)


def _check_bad_values(bad_values: object) -> None:
    """Raise ConfigError unless the option has one of its two values."""
    if bad_values not in (FAIL, NULL):
        raise ConfigError(f"bad_values: give {FAIL} or {NULL}, not {bad_values!r:.40}")


class _BadValueError(Exception):
    """A value does not fit."""

    def __init__(self, row: int, reason: str) -> None:
        self.row = row
        self.reason = reason


class _UnfitError(Exception):
    """A value, or a field of it, does not fit the schema."""


class _Number(str):
    """A number as it is written in the JSON."""

    __slots__ = ()


class _Object(list[tuple[str, Any]]):
    """The fields of an object, several of the same name included."""

    __slots__ = ()


_json = json.JSONDecoder(
    object_pairs_hook=_Object, parse_int=_Number, parse_float=_Number, parse_constant=float
)
_WORDS = {None: "null", True: "true", False: "false"}
_WHOLE = re.compile(r"-?\d{1,19}")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d:\d\d(?:\.\d{1,12})?(?:Z|[+-]\d\d(?::?\d\d)?)?)?"
)
_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_BEYOND = {
    "NaN": "NaN",
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), "Infinity"),
    **dict.fromkeys(("-Infinity", "-INF"), "-Infinity"),
}
"""Texts for numbers that JSON lacks, with the forms that pyarrow reads."""


def _plain(value: bytes, kind: pa.StructType) -> bytes:
    """Rewrite a value as JSON that pyarrow can read with the types of the schema; raise
    _UnfitError.
    """
    try:
        parsed = _json.decode(value.decode())
        if not isinstance(parsed, _Object):
            raise _UnfitError("it is no object")
        return _text_of(_fields_of(parsed, kind)).encode()
    except UnicodeError:
        raise _UnfitError("a text is not UTF-8") from None
    except RecursionError:
        raise _UnfitError("it is nested too deep") from None
    except ValueError as error:
        raise _UnfitError(str(error)) from None


def _fields_of(given: _Object, kind: pa.StructType) -> _Object:
    by_name = dict(given)
    fields = _Object()
    for field in kind:
        try:
            fields.append((field.name, _read_as(by_name.get(field.name), field.type)))
        except _UnfitError as unfit:
            raise _UnfitError(f"{field.name}: {unfit}") from None
    return fields


def _read_as(given: Any, kind: pa.DataType) -> Any:
    """Convert a part of a value to this type; raise _UnfitError."""
    if given is None:
        return None
    if pa.types.is_string(kind):
        return given if type(given) is str else _text_of(given)
    if pa.types.is_struct(kind) and isinstance(given, _Object):
        return _fields_of(given, kind)
    if pa.types.is_list(kind) and type(given) is list:
        return [_read_as(each, kind.value_type) for each in given]
    if pa.types.is_boolean(kind) and type(given) is bool:
        return given
    if pa.types.is_integer(kind) and isinstance(given, _Number) and _WHOLE.fullmatch(given):
        most = 1 << (kind.bit_width - 1)
        if -most <= int(given) < most:
            return given
    if pa.types.is_floating(kind):
        if isinstance(given, _Number):
            # pyarrow refuses a number that is too big for any type.
            number = float(given)
            return _Number(json.dumps(number)) if math.isinf(number) else given
        text = json.dumps(given) if type(given) is float else given
        if type(text) is str and text in _BEYOND:
            return _Number(_BEYOND[text])
    if pa.types.is_timestamp(kind):
        time = _time_of(given)
        if time is not None:
            return time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    raise _UnfitError(f"{_text_of(given):.60} is no {kind}")


def _time_of(given: Any) -> datetime | None:
    """Return a time, cut to microseconds, in UTC if it names no zone; None if it is no time."""
    try:
        if isinstance(given, _Number) and _WHOLE.fullmatch(given):
            return _BEGIN + timedelta(seconds=int(given))
        if type(given) is str and _TIME.fullmatch(given):
            time = datetime.fromisoformat(given)
            return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        pass
    return None


def _text_of(given: Any) -> str:
    """Return a part of a value as JSON without white space; numbers keep their written form."""
    if type(given) is str:
        return encode_basestring(given)
    if isinstance(given, _Number):
        return str(given)
    if isinstance(given, _Object):
        return "{" + ",".join(f"{_text_of(name)}:{_text_of(each)}" for name, each in given) + "}"
    if isinstance(given, list):
        return "[" + ",".join(map(_text_of, given)) + "]"
    if isinstance(given, float):  # NaN and infinity, which JSON lacks
        return f'"{json.dumps(given)}"'
    return _WORDS[given]


def _column(texts: list[bytes]) -> pa.Array:
    # `pa.array(texts)` would import pandas.
    edges = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    buffers = [None, pa.py_buffer(edges), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(pa.binary(), len(texts), buffers, null_count=0)


def _trimmed(values: pa.Array) -> pa.Array:
    """Return the values without white space around them; raise ArrowInvalid if one is no JSON
    object.
    """
    edges = np.frombuffer(values.buffers()[1], np.int32)
    edges = edges[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)
    if _are_objects(data, edges):
        return values
    texts = [bytes(data[start:end]).strip(_SPACE) for start, end in pairwise(edges.tolist())]
    if not all(text[:1] == b"{" and text[-1:] == b"}" for text in texts):
        raise pa.ArrowInvalid("no object")
    return _column(texts)


def _are_objects(data: np.ndarray, edges: np.ndarray) -> bool:
    """Return True if every value begins with { and ends with }."""
    if np.any(np.diff(edges) < 2):
        return False
    return bool(np.all(data[edges[:-1]] == ord("{")) and np.all(data[edges[1:] - 1] == ord("}")))
