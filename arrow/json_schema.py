"""Parses the schema of JSON values, given as Spark DDL or as an Arrow schema. Pure.

    carrier STRING, delay INT, legs ARRAY<STRUCT<origin: STRING, minutes: DOUBLE>>

Source: the Spark SQL types that JSON can represent. Maps and dates must be declared as STRING,
because pyarrow's JSON reader supports neither.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa

from ..protocol.errors import ConfigError
from .columns import TIME

_TOKEN = re.compile(r"\s*(?:`([^`]+)`|([A-Za-z_]\w*)|([<>(),:])|([0-9]+)|(\S))")
_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "timestamp": TIME,
}
DEPTH_MAX = 32
FIELDS_MAX = 1_000


def json_type(schema: str | pa.Schema) -> pa.StructType:
    """
    Return the Arrow type of a value with this schema.

    Raises:
        ConfigError: the schema cannot be parsed, or it has a type that JSON cannot represent.
    """
    if not isinstance(schema, str | pa.Schema | pa.StructType):
        raise ConfigError(f"schema: give NAME TYPE, … or a pyarrow.Schema, not {schema!r:.60}")
    if not isinstance(schema, str):
        for field in schema:
            _check_supported(field.type, 1)
        return pa.struct(list(schema))
    tokens = _Tokens(schema)
    fields = _parse_fields(tokens, "", 1)
    if not fields:
        raise tokens.syntax_error("a name and a type")
    return pa.struct(fields)


class _Tokens:
    """The remaining tokens of a schema text, and the number of named fields seen so far."""

    def __init__(self, text: str) -> None:
        self._remaining = list(_tokenize(text))
        self.count = 0

    def peek(self) -> str:
        """Return the next token in lowercase, or "" at the end."""
        return self._remaining[0].lower() if self._remaining else ""

    def consume(self, expected: str = "") -> str:
        """Consume the next token and return it. Raises ConfigError if it is not `expected`."""
        if not self._remaining or expected not in {"", self._remaining[0]}:
            raise self.syntax_error(repr(expected) if expected else "a name")
        return self._remaining.pop(0)

    def consume_name(self) -> str:
        """Consume a field name and return it. Raises ConfigError."""
        name = self.consume().strip("`")
        if not re.fullmatch(r"[\w .$-]+", name):
            raise self.syntax_error("a name")
        self.count += 1
        if self.count > FIELDS_MAX:
            raise ConfigError(f"schema: more than {FIELDS_MAX} fields")
        return name

    def syntax_error(self, expected: str) -> ConfigError:
        """Return the error for a text in which `expected` should come next."""
        remaining_text = " ".join(self._remaining)
        return ConfigError(
            f"schema: {expected} is expected at {remaining_text!r:.40}: give NAME TYPE, …, for "
            f"example 'carrier STRING, delay INT'"
        )


def _tokenize(text: str) -> Iterator[str]:
    for quoted, word, mark, number, other in _TOKEN.findall(text):
        yield f"`{quoted}`" if quoted else word or mark or number or other


def _parse_fields(tokens: _Tokens, end: str, depth: int) -> list[pa.Field]:
    fields: list[pa.Field] = []
    while tokens.peek() not in {"", end}:
        if fields:
            tokens.consume(",")
        name = tokens.consume_name()
        if tokens.peek() == ":":
            tokens.consume()
        fields.append(pa.field(name, _parse_type(tokens, depth)))
    if len({field.name for field in fields}) < len(fields):
        raise ConfigError("schema: a field is named twice")
    return fields


def _parse_type(tokens: _Tokens, depth: int) -> pa.DataType:
    if depth > DEPTH_MAX:
        raise ConfigError(f"schema: nested more than {DEPTH_MAX} deep")
    if tokens.peek() in {"array", "struct"}:
        kind = tokens.consume().lower()
        tokens.consume("<")
        nested_type = (
            pa.list_(_parse_type(tokens, depth + 1))
            if kind == "array"
            else pa.struct(_parse_fields(tokens, ">", depth + 1))
        )
        tokens.consume(">")
        return nested_type
    scalar_type = _TYPES.get(tokens.peek())
    if scalar_type is None:
        raise tokens.syntax_error(f"one of {', '.join(_TYPES)}, array<…>, struct<…>")
    tokens.consume()
    return scalar_type


def _check_supported(kind: pa.DataType, depth: int) -> None:
    """Raise ConfigError if pyarrow's JSON reader does not support the type."""
    if depth > DEPTH_MAX:
        raise ConfigError(f"schema: nested more than {DEPTH_MAX} deep")
    if pa.types.is_struct(kind):
        for field in kind:
            _check_supported(field.type, depth + 1)
    elif pa.types.is_list(kind):
        _check_supported(kind.value_type, depth + 1)
    elif kind not in _TYPES.values():
        raise ConfigError(f"schema: a value of type {kind} cannot be read from JSON")
