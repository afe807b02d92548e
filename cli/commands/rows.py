"""Converts rows of CSV and NDJSON input to messages: the value is a JSON object, and one of its
fields may be the order key.

CSV is UTF-8 with a header, commas, and `"` as the quote. A quoted field may contain line ends,
which are kept. The number of a row is that of its first line. Blank lines are skipped.
"""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import msgspec

from ...protocol.errors import ConfigError, InputError, InvalidRequestError, MessageTooLargeError
from ...protocol.text import counted, listed
from ..options import InputFormat
from .lines import LINE_BYTES_MAX, OutgoingMessage, strip_line_end

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


BY_SUFFIX = {".csv": InputFormat.CSV, ".ndjson": InputFormat.NDJSON, ".jsonl": InputFormat.NDJSON}
UNCLEAR_SUFFIX = ".json"
"""The suffix of messages, of rows, and of one document of many lines alike."""


def guess_format(path: Path | None) -> InputFormat:
    """
    Return the format implied by a file's suffix, which is LINES for standard input and all other
    suffixes.

    Raises:
        ConfigError: the suffix is `.json`, which does not say what a line is.
    """
    if path is not None and path.suffix.lower() == UNCLEAR_SUFFIX:
        raise ConfigError(
            f"the suffix of {path} does not say what a line is: pass --format json if each line is "
            'a message such as {"key": "a", "value": "1"}, --format ndjson if each line is sent as '
            "it is and must be a JSON object, --format lines for any text"
        )
    return (
        InputFormat.LINES if path is None else BY_SUFFIX.get(path.suffix.lower(), InputFormat.LINES)
    )


class Ndjson:
    """
    Parses NDJSON: each line is a JSON object and is sent unchanged.

    Args:
        key_field: the field with the order key; None if the lines contain no key.
        key: the order key of every line; it must not be the name of a field.
        keyless: send rows without a key as unordered messages; otherwise they are errors.
    """

    def __init__(self, key_field: str | None, *, key: str = "", keyless: bool = False) -> None:
        self._key_field = key_field
        self._key = key
        self._keyless = keyless

    async def records(
        self, lines: AsyncIterator[tuple[int, bytes]]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the non-blank lines with their numbers."""
        async for number, line in lines:
            text = strip_line_end(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
            if text.strip():
                yield number, text

    def parse(self, line: bytes) -> OutgoingMessage:
        """
        Convert one line to a message.

        Raises:
            InvalidRequestError: the line is not a JSON object, or its key is missing or is neither
                text nor an integer.
        """
        try:
            fields = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"not a JSON object: {error}") from None
        _check_constant_key(self._key, fields)
        if self._key_field is None:
            return OutgoingMessage(b"", line)
        key = fields.get(self._key_field)
        if key is not None and type(key) not in (str, int):
            raise InvalidRequestError(
                f"the key is text or a whole number, and {self._key_field!r} is neither"
            )
        text = "" if key is None else str(key)
        return OutgoingMessage(_encode_key(text, self._key_field, keyless=self._keyless), line)


class CsvTable:
    """
    Parses CSV: each row is sent as a JSON object of strings, with the column names of the header.

    Args:
        key_field: the column with the order key; None if the rows contain no key.
        key: the order key of every row; it must not be the name of a column.
        keyless: send rows without a key as unordered messages; otherwise they are errors.
    """

    def __init__(self, key_field: str | None, *, key: str = "", keyless: bool = False) -> None:
        self._key_field = key_field
        self._key = key
        self._keyless = keyless
        self._columns: list[str] = []
        csv.field_size_limit(LINE_BYTES_MAX)

    async def records(
        self, lines: AsyncIterator[tuple[int, bytes]]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yield the rows after the header, each with the number of its first line.

        Raises:
            InputError: the input ends inside a quoted field, or the header is missing or invalid.
            MessageTooLargeError: a row has more than LINE_BYTES_MAX bytes.
        """
        row: list[bytes] = []
        size_bytes = first_line = 0
        in_quotes = False
        async for number, raw in lines:
            line = raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw
            if not row:
                first_line, size_bytes = number, 0
            if not in_quotes and not strip_line_end(line):
                continue
            row.append(line)
            size_bytes += len(line)
            if size_bytes > LINE_BYTES_MAX:
                raise MessageTooLargeError(
                    f"a row without end, from line {first_line} on",
                    size_bytes=size_bytes,
                    limit_bytes=LINE_BYTES_MAX,
                )
            in_quotes = is_quote_open(line, in_quotes=in_quotes)
            if in_quotes:
                continue
            record, row = strip_line_end(b"".join(row)), []
            if self._columns:
                yield first_line, record
            else:
                self._read_header(record, first_line)
        if in_quotes:
            raise InputError(
                f"the row of line {first_line} ends in a quoted field", line=first_line
            )
        if not self._columns:
            raise InputError("the input has no header", line=1)

    def _read_header(self, record: bytes, line: int) -> None:
        try:
            columns = _parse_row(record)
            _check_constant_key(self._key, columns)
        except InvalidRequestError as error:
            raise InputError(f"the header: {error.message}", line=line) from None
        duplicates = sorted({name for name in columns if columns.count(name) > 1})
        if duplicates:
            raise InputError(f"the header has columns twice: {listed(duplicates)}", line=line)
        if self._key_field is not None and self._key_field not in columns:
            raise InputError(
                f"the header has no column {self._key_field!r}, but: {listed(columns)}", line=line
            )
        self._columns = columns

    def parse(self, record: bytes) -> OutgoingMessage:
        """
        Convert one row to a message.

        Raises:
            InvalidRequestError: the row is not UTF-8, has a misplaced quote, a different number of
                fields than the header, or no key.
        """
        fields = _parse_row(record)
        if len(fields) != len(self._columns):
            raise InvalidRequestError(
                f"the header has {counted(len(self._columns), 'column')}, and this row "
                f"{len(fields)}"
            )
        row = dict(zip(self._columns, fields, strict=True))
        value = msgspec.json.encode(row)
        if self._key_field is None:
            return OutgoingMessage(b"", value)
        return OutgoingMessage(
            _encode_key(row[self._key_field], self._key_field, keyless=self._keyless), value
        )


def is_quote_open(line: bytes, *, in_quotes: bool) -> bool:
    """
    Return True if a CSV line ends inside a quoted field, which the next line continues.

    Args:
        in_quotes: True if the line starts inside a quoted field.
    """
    position = 0
    while True:
        if not in_quotes:
            if line[position : position + 1] == b'"':
                position, in_quotes = position + 1, True
                continue
            quote_end = position - 1
        else:
            quote_end = line.find(b'"', position)
            if quote_end < 0:
                return True
            if line[quote_end + 1 : quote_end + 2] == b'"':
                position = quote_end + 2
                continue
        comma = line.find(b",", quote_end + 1)
        if comma < 0:
            return False
        position, in_quotes = comma + 1, False


def _parse_row(record: bytes) -> list[str]:
    if record.endswith(b"\r"):  # Python would ignore it
        raise InvalidRequestError("not a row of CSV: a carriage return at its end is in no quotes")
    try:
        rows = list(csv.reader([record.decode()], strict=True))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise InvalidRequestError(f"not a row of CSV: {error}") from None
    return rows[0] if rows else []


def _check_constant_key(key: str, names: Collection[str]) -> None:
    """Raise InvalidRequestError if `key`, which would be the key of every row, is the name of a
    field.
    """
    if key and key in names:
        raise InvalidRequestError(
            f"--key {key} would be the key of every row; --key-field {key} takes it from each row"
        )


def _encode_key(text: str, field: str, *, keyless: bool) -> bytes:
    if not text and not keyless:
        raise InvalidRequestError(f"no key in {field!r}; --keyless sends such rows without order")
    return text.encode()
