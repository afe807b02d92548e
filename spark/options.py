"""The options of `spark.read.format("keylane")`: what each means, its default, and what is refused.  Pure.

    meta        host:port of a metaserver, several by comma                  required
    subject     the subject to read                                          required
    partitions  physical partitions to read, by id: "3,4"                    all that have data
    start       earliest | latest | {"<partition id>": offset, …}            earliest
    end         earliest | latest | {"<partition id>": offset, …}            latest
    columns     columns to yield, in this order: "offset,key,value"          all
    batchRows   rows of an Arrow batch, about                                16384
    gcFreeze    once per worker, keep its collector off what is loaded       true

    maxRowsPerTrigger   the most rows in a batch of a stream                 no limit

Invariants
    Names of options are compared without case, as Spark does.
    All problems of a set of options are in one error.

Source: no column pruning exists for Python data sources, so `columns` is an option.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..arrow.schema import EVERY_COLUMN
from ..arrow.selection import EARLIEST, LATEST, Edge, ReadBound, ReadOptions
from ..protocol.address import addresses_of
from ..protocol.errors import ConfigError, KeylaneError
from ..protocol.ids import MAX_I64, Subject, check_name

BATCH_ROWS_MAX = 1_000_000
NAMES = (
    "meta",
    "subject",
    "partitions",
    "start",
    "end",
    "columns",
    "batchRows",
    "gcFreeze",
    "maxRowsPerTrigger",
)


def parse_options(given: Mapping[str, str]) -> ReadOptions:
    """
    Read options as Spark hands them over: text to text, names in any case.

    Raises:
        ConfigError: lists every option that is unknown, missing, or has a value that cannot be.
    """
    options = {str(name).lower(): str(value) for name, value in given.items()}
    problems: dict[str, str] = {}
    known = {name.lower() for name in NAMES}
    for name in sorted(options.keys() - known):
        problems[name[:80]] = f"unknown; there are {', '.join(NAMES)}"
    values: dict[str, object] = {}
    for name, field, parse in _PARSERS:
        text = options.get(name.lower(), "").strip()
        if not text:
            if name in {"meta", "subject"}:
                problems[name] = "required"
            elif name.lower() in options:
                problems[name] = "empty"
            continue
        try:
            values[field] = parse(text)
        except (ValueError, KeylaneError) as error:
            problems[name] = error.message if isinstance(error, KeylaneError) else str(error)
    if problems:
        described = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
        raise ConfigError(f"the options cannot work: {described}", **problems)
    return ReadOptions(**values)  # type: ignore[arg-type]


def _addresses(text: str) -> tuple[str, ...]:
    return tuple(addresses_of(text))


def _subjects(text: str) -> tuple[Subject, ...]:
    return (Subject(check_name("subject", text)),)


def _partition_id(text: str) -> int:
    text = text.strip()
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= MAX_I64:
        raise ValueError(f"ids of physical partitions are wanted, not {text!r:.80}")
    return int(text)


def _partitions(text: str) -> frozenset[int]:
    return frozenset(_partition_id(part) for part in text.split(","))


def _start(text: str) -> ReadBound:
    return _bound(text, EARLIEST)


def _end(text: str) -> ReadBound:
    return _bound(text, LATEST)


def _bound(text: str, default: ReadBound) -> ReadBound:
    if text.lower() in {"earliest", "latest"}:
        return ReadBound(Edge(text.lower()))
    try:
        offsets = json.loads(text)
    except (ValueError, RecursionError):
        offsets = None
    if not isinstance(offsets, dict) or not offsets:
        raise ValueError(
            f'earliest, latest or {{"<partition id>": offset}} is wanted, not {text!r:.80}'
        )
    for offset in offsets.values():
        if type(offset) is not int or not 0 <= offset <= MAX_I64:
            raise ValueError(f"an offset is a whole number in [0, 2**63), not {offset!r:.80}")
    return ReadBound(
        default.point, {_partition_id(name): offset for name, offset in offsets.items()}
    )


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in EVERY_COLUMN:
            raise ValueError(f"no column {name!r:.80}; there are {', '.join(EVERY_COLUMN)}")
    if len(set(names)) != len(names):
        raise ValueError("a column is named twice")
    return names


def _batch_rows(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:20]) <= BATCH_ROWS_MAX:
        raise ValueError(f"1 to {BATCH_ROWS_MAX} rows are wanted, not {text!r:.80}")
    return int(text)


def _rows_per_trigger(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:20]) <= MAX_I64:
        raise ValueError(f"a number of rows from 1 on is wanted, not {text!r:.80}")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"true or false is wanted, not {text!r:.80}")
    return text.lower() == "true"


_PARSERS = (
    ("meta", "meta", _addresses),
    ("subject", "subjects", _subjects),
    ("partitions", "partitions", _partitions),
    ("start", "start", _start),
    ("end", "end", _end),
    ("columns", "columns", _columns),
    ("batchRows", "batch_rows", _batch_rows),
    ("gcFreeze", "gc_freeze", _flag),
    ("maxRowsPerTrigger", "max_rows_per_trigger", _rows_per_trigger),
)
