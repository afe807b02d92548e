"""Turns rows of CSV and NDJSON input into messages: the value is a JSON object, and one of its
fields is the order key.

CSV is UTF-8, with commas, `"` around fields that need it, and a header. A row may have several
lines; line ends in a quoted field are kept, and the number of a row is that of its first line.
Blank lines are skipped.
"""

from __future__ import annotations

import csv
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from ...protocol.errors import InputError, InvalidRequestError, MessageTooLargeError
from ...protocol.text import counted, listed
from ..options import InputFormat
from .lines import LINE_BYTES_MAX, Outgoing, without_end

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


BY_SUFFIX = {".csv": InputFormat.CSV, ".ndjson": InputFormat.NDJSON, ".jsonl": InputFormat.NDJSON}


def format_of(path: Path | None) -> InputFormat:
    """Return the format for the suffix of a file's name; LINES for all others and for standard
    input.
    """
    return (
        InputFormat.LINES if path is None else BY_SUFFIX.get(path.suffix.lower(), InputFormat.LINES)
    )


class Ndjson:
    """
    Each line is a JSON object, and is sent unchanged.

    Args:
        key_field: the field with the order key; None: lines have no key of their own.
        keyless: a row without a key is a message without order; otherwise it is an error.
    """

    def __init__(self, key_field: str | None, *, keyless: bool = False) -> None:
        self._key_field = key_field
        self._keyless = keyless

    async def records(
        self, lines: AsyncIterator[tuple[int, bytes]]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the lines that are not blank, with their numbers."""
        async for number, line in lines:
            text = without_end(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
            if text.strip():
                yield number, text

    def message(self, line: bytes) -> Outgoing:
        """
        Return the message of one line.

        Raises:
            InvalidRequestError: the line is no JSON object, or its key is missing, or is neither
                text nor a whole number.
        """
        try:
            fields = msgspec.json.decode(line, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequestError(f"not a JSON object: {error}") from None
        if self._key_field is None:
            return Outgoing(b"", line)
        key = fields.get(self._key_field)
        if key is not None and type(key) not in (str, int):
            raise InvalidRequestError(
                f"the key is text or a whole number, and {self._key_field!r} is neither"
            )
        text = "" if key is None else str(key)
        return Outgoing(_key(text, self._key_field, keyless=self._keyless), line)


class CsvTable:
    """
    Each row is sent as a JSON object of texts, with the names in the header.

    Args:
        key_field: the column with the order key; None: rows have no key of their own.
        keyless: a row without a key is a message without order; otherwise it is an error.
    """

    def __init__(self, key_field: str | None, *, keyless: bool = False) -> None:
        self._key_field = key_field
        self._keyless = keyless
        self._columns: list[str] = []
        csv.field_size_limit(LINE_BYTES_MAX)

    async def records(
        self, lines: AsyncIterator[tuple[int, bytes]]
    ) -> AsyncIterator[tuple[int, bytes]]:
        """
        Yield the rows after the header, with the numbers of their first lines.

        Raises:
            InputError: the input ends in a quoted field, or the header is missing or wrong.
            MessageTooLargeError: a row has more than LINE_BYTES_MAX bytes.
        """
        row: list[bytes] = []
        size = start = 0
        inside = False
        async for number, read in lines:
            line = read.removeprefix(BYTE_ORDER_MARK) if number == 1 else read
            if not row:
                start, size = number, 0
            if not inside and not without_end(line):
                continue
            row.append(line)
            size += len(line)
            if size > LINE_BYTES_MAX:
                raise MessageTooLargeError(
                    f"a row without end, from line {start} on",
                    size_bytes=size,
                    limit_bytes=LINE_BYTES_MAX,
                )
            inside = ends_in_quotes(line, inside=inside)
            if inside:
                continue
            record, row = without_end(b"".join(row)), []
            if self._columns:
                yield start, record
            else:
                self._read_header(record, start)
        if inside:
            raise InputError(f"the row of line {start} ends in a quoted field", line=start)
        if not self._columns:
            raise InputError("the input has no header", line=1)

    def _read_header(self, record: bytes, line: int) -> None:
        try:
            columns = _fields(record)
        except InvalidRequestError as error:
            raise InputError(f"the header: {error.message}", line=line) from None
        twice = sorted({name for name in columns if columns.count(name) > 1})
        if twice:
            raise InputError(f"the header has columns twice: {listed(twice)}", line=line)
        if self._key_field is not None and self._key_field not in columns:
            raise InputError(
                f"the header has no column {self._key_field!r}, but: {listed(columns)}", line=line
            )
        self._columns = columns

    def message(self, record: bytes) -> Outgoing:
        """
        Return the message of one row.

        Raises:
            InvalidRequestError: the row is not UTF-8, has a wrong quote, another number of fields
                than the header, or no key.
        """
        fields = _fields(record)
        if len(fields) != len(self._columns):
            raise InvalidRequestError(
                f"the header has {counted(len(self._columns), 'column')}, and this row "
                f"{len(fields)}"
            )
        row = dict(zip(self._columns, fields, strict=True))
        value = msgspec.json.encode(row)
        if self._key_field is None:
            return Outgoing(b"", value)
        return Outgoing(_key(row[self._key_field], self._key_field, keyless=self._keyless), value)


def ends_in_quotes(line: bytes, *, inside: bool) -> bool:
    """
    Return True if a line of CSV ends in a quoted field, so that the next line continues its row.

    Args:
        inside: True if the line begins in a quoted field.
    """
    at = 0
    while True:
        if not inside:
            if line[at : at + 1] == b'"':
                at, inside = at + 1, True
                continue
            close = at - 1
        else:
            close = line.find(b'"', at)
            if close < 0:
                return True
            if line[close + 1 : close + 2] == b'"':
                at = close + 2
                continue
        comma = line.find(b",", close + 1)
        if comma < 0:
            return False
        at, inside = comma + 1, False


def _fields(record: bytes) -> list[str]:
    if record.endswith(b"\r"):  # Python would ignore it
        raise InvalidRequestError("not a row of CSV: a carriage return at its end is in no quotes")
    try:
        rows = list(csv.reader([record.decode()], strict=True))
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"not UTF-8 text: {error}") from None
    except csv.Error as error:
        raise InvalidRequestError(f"not a row of CSV: {error}") from None
    return rows[0] if rows else []


def _key(text: str, field: str, *, keyless: bool) -> bytes:
    if not text and not keyless:
        raise InvalidRequestError(f"no key in {field!r}; --keyless sends such rows without order")
    return text.encode()
