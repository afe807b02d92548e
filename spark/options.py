"""The options of `spark.read.format("keylane")`, their defaults and their checks. Pure.

    option          meaning                                                      default
    meta            host:port of a metaserver; several, separated by commas      required
    subject         the subject to read; several, separated by commas            required
    partitions      ids of physical partitions to read: "3,4"                    all that have data
    keys            order keys to read: "a,b", or as JSON:                       all
                    ["a,b", {"base64": "/w=="}]
    start           where reading begins: see below                              earliest
    end             where reading ends, exclusive                                latest
    columns         columns to yield, in this order: "offset,key,value"          arrow/schema.py
    failOnDataLoss  rows that retention has removed fail the read                true
    ordered         one task reads a partition and its descendants               false
    minPartitions   number of tasks; large partitions are cut until there are    none is cut
                    as many
    taskBytes       approximate bytes of a task; larger partitions are cut       none is cut
    bytesPerSecond  limit for the bytes that one task receives                   no limit
    jsonSchema      schema of JSON values: "carrier STRING, delay INT"           values are bytes
    badValues       what to do with a value that does not match: fail, null      fail
    retrySeconds    how long planning retries unreachable servers                60
    batchRows       approximate number of rows of an Arrow batch                 16384
    fromCopies      read from copies that serve reads; from brokers what they    false
                    lack
    gcFreeze        exclude loaded objects from each worker's garbage collector  true
    maxRowsPerTrigger  limit for the rows in a batch of a stream                 no limit
    commitGroup     consumer group whose cursors follow the stream's sink        no cursor moves
    tlsCa           file of the CA that signed the servers' certificates         environment
    tlsCert         file of a client certificate                                 environment
    tlsKey          file of the certificate's key                                environment
    tokenFile       file with a token                                            environment

A start or an end is one of
    earliest, latest
    -1h, -2d, 2024-05-31T12:00:00Z    the first message that was stored then or later
    group:NAME                        the durable cursor of a consumer group
    {"3": 17, "4": "-1h"}             by partition id: an offset, or one of the above
    manifest:DIR                      the end of the backfill in this folder; only as the start
                                      of a stream

Invariants
    Option names are case-insensitive, as in Spark.
    One error lists all invalid options.

`columns` is an option, because Spark has no column pruning for Python data sources.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from ..arrow.json_decoder import FAIL, NULL
from ..arrow.json_schema import json_type
from ..arrow.schema import COLUMNS_OF_SEVERAL, EVERY_COLUMN
from ..arrow.selection import (
    EARLIEST,
    LATEST,
    CursorOf,
    Edge,
    Point,
    ReadBound,
    ReadOptions,
    StoredAt,
)
from ..protocol.address import parse_addresses
from ..protocol.errors import KeylaneError
from ..protocol.ids import MAX_I64, Subject, check_name
from ..protocol.reading.instants import parse_instant_ms
from ..protocol.text import parse_number
from .shared_options import (
    SECURITY_PARSERS,
    advice,
    parse_flag,
    parse_security,
    parse_values,
    raise_problems,
)

BATCH_ROWS_MAX = 1_000_000
KEYS_MAX = 10_000
SUBJECTS_MAX = 100
RETRY_S_MAX = 3_600
TASKS_MAX = 100_000
TASK_BYTES_MIN = 1 << 20
_GROUP = "group:"
_MANIFEST = "manifest:"
_ADDED_BY_SPARK = {"path", "paths", "checkpointlocation"}


def user_options(given_options: Mapping[str, str]) -> dict[str, str]:
    """Return the options without the table properties and paths that Spark adds."""
    options = {str(name): str(value) for name, value in given_options.items()}
    names = {name.lower() for name in options}
    if is_sql_table(options):
        return {name: value for name, value in options.items() if f"option.{name.lower()}" in names}
    return {name: value for name, value in options.items() if name.lower() not in _ADDED_BY_SPARK}


def is_sql_table(given_options: Mapping[str, str]) -> bool:
    """Return True if the options come from CREATE TABLE, in which case Spark repeats each one with
    the prefix `option.`.
    """
    return any(str(name).lower() == "provider" for name in given_options)


def parse_options(given_options: Mapping[str, str], *, now_ms: int) -> ReadOptions:
    """
    Parse the options of a read. Spark passes names and values as strings, and names in any case.

    Args:
        now_ms: the time that "-1h" is relative to, in milliseconds since 1970.

    Raises:
        ConfigError: options are unknown, missing or invalid; the error lists all of them.
    """
    options = user_options(given_options)
    problems = {
        name[:80]: advice(name, NAMES) for name in sorted(options) if name.lower() not in _KNOWN
    }
    texts = {name.lower(): value.strip() for name, value in options.items()}
    parsers = _PARSERS | {
        "start": ("start", partial(_parse_start, now_ms=now_ms)),
        "end": ("end", partial(_parse_bound, default=LATEST, now_ms=now_ms)),
    }
    values = parse_values(texts, parsers, problems)
    problems |= _find_conflicts(values)
    values["security"] = parse_security(values, problems)
    if problems:
        raise_problems(problems)
    if len(values["subjects"]) > 1:
        values.setdefault("columns", COLUMNS_OF_SEVERAL)
    return ReadOptions(**values)


def _find_conflicts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a problem for each option that conflicts with another, by option name."""
    problems = {}
    if values.get("ordered"):
        for name, field in (("minPartitions", "min_partitions"), ("taskBytes", "task_bytes")):
            if field in values:
                problems[name] = "cuts partitions, which breaks the order that `ordered` asks for"
    if values.get("start", EARLIEST).manifest and len(values.get("subjects", ())) > 1:
        problems["start"] = "a backfill has one subject, so only one can be read"
    if "bad_values" in values and "json_schema" not in values:
        problems["badValues"] = "needs jsonSchema: without it no value is decoded"
    if "keys" in values and "commit_group" in values:
        problems["commitGroup"] = (
            "its cursors would pass the messages of all keys that `keys` leaves out; filter the "
            "DataFrame instead of using `keys`"
        )
    start, end = values.get("start", EARLIEST).point, values.get("end", LATEST).point
    if isinstance(start, StoredAt) and isinstance(end, StoredAt) and end.at_ms < start.at_ms:
        problems["end"] = "before the start"
    return problems


def _parse_subjects(text: str) -> tuple[Subject, ...]:
    names = [Subject(check_name("subject", part.strip())) for part in text.split(",")]
    if len(set(names)) != len(names):
        raise ValueError("a subject is named twice")
    if len(names) > SUBJECTS_MAX:
        raise ValueError(f"at most {SUBJECTS_MAX} subjects are read together, not {len(names)}")
    return tuple(names)


def _parse_partition_id(text: str) -> int:
    number = parse_number(text.strip())
    if not number:
        raise ValueError(f"give ids of physical partitions, not {text.strip()!r:.80}")
    return number


def _parse_partitions(text: str) -> frozenset[int]:
    return frozenset(_parse_partition_id(part) for part in text.split(","))


def _parse_keys(text: str) -> frozenset[bytes]:
    if not text.startswith("["):
        keys = [part.strip().encode() for part in text.split(",")]
    else:
        try:
            keys = [_parse_key(each) for each in json.loads(text)]
        except (ValueError, RecursionError):
            raise ValueError(
                f'give "a,b" or JSON such as ["a,b", {{"base64": "/w=="}}], not {text!r:.80}'
            ) from None
    if b"" in keys or not keys:
        raise ValueError("a key is empty, and messages without a key have no order")
    if len(keys) > KEYS_MAX:
        raise ValueError(f"at most {KEYS_MAX} keys are read by name, not {len(keys)}")
    return frozenset(keys)


def _parse_key(item: object) -> bytes:
    if isinstance(item, str):
        return item.encode()
    if isinstance(item, dict) and item.keys() == {"base64"}:
        return b64decode(str(item["base64"]), validate=True)
    raise ValueError("not a key")


def _parse_start(text: str, now_ms: int) -> ReadBound:
    if text.startswith(_MANIFEST):
        folder = text.removeprefix(_MANIFEST).strip()
        if not folder:
            raise ValueError("give manifest:DIR with the folder of a backfill")
        return ReadBound(0, manifest=folder)
    return _parse_bound(text, EARLIEST, now_ms)


def _parse_bound(text: str, default: ReadBound, now_ms: int) -> ReadBound:
    if not text.startswith("{"):
        return ReadBound(_parse_point(text, now_ms))
    try:
        points = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        points = None
    if not points:
        raise ValueError(f'give {{"<partition id>": offset}}, not {text!r:.80}')
    by_partition = {
        _parse_partition_id(name): _parse_point(point, now_ms) for name, point in points
    }
    if len(by_partition) != len(points):
        raise ValueError(f"a partition is named twice in {text!r:.80}")
    return ReadBound(default.point, by_partition)


def _parse_point(item: object, now_ms: int) -> Point:
    if type(item) is int and 0 <= item <= MAX_I64:
        return item
    if not isinstance(item, str):
        raise ValueError(  # noqa: TRY004 - the parsers of all options raise ValueError
            f"an offset is a whole number in [0, 2**63), not {item!r:.80}"
        )
    text = item.strip()
    if text.lower() in set(Edge):
        return Edge(text.lower())
    if text.startswith(_GROUP):
        return CursorOf(check_name("consumer group", text.removeprefix(_GROUP).strip()))
    if text.isascii() and text.isdigit():
        raise ValueError(
            f'an offset counts the messages of one partition: {{"<partition id>": {text[:20]}}}'
        )
    try:
        return StoredAt(parse_instant_ms(text, now_ms=now_ms))
    except KeylaneError as error:
        raise ValueError(
            f"{error.message}; or earliest, latest, group:NAME, or offsets by partition id as JSON"
        ) from None


def _parse_columns(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in EVERY_COLUMN:
            matches = get_close_matches(name.lower(), EVERY_COLUMN, n=1)
            hint = (
                f"did you mean {matches[0]}?" if matches else f"there are {', '.join(EVERY_COLUMN)}"
            )
            raise ValueError(f"no column {name!r:.80}; {hint}")
    if len(set(names)) != len(names):
        raise ValueError("a column is named twice")
    return names


def _integer_parser(noun: str, low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = parse_number(text)
        if number is None or not low <= number <= high:
            raise ValueError(f"give {low} to {high} {noun}, not {text!r:.80}")
        return number

    return parse


def _check_json_schema(text: str) -> str:
    json_type(text)
    return text


def _parse_bad_values(text: str) -> str:
    if text.lower() not in {FAIL, NULL}:
        raise ValueError(f"give {FAIL} or {NULL}, not {text!r:.80}")
    return text.lower()


_PARSERS: dict[str, tuple[str, Callable[..., object]]] = {
    "meta": ("meta", lambda text: tuple(parse_addresses(text))),
    "subject": ("subjects", _parse_subjects),
    "partitions": ("partitions", _parse_partitions),
    "keys": ("keys", _parse_keys),
    "start": ("start", _parse_start),
    "end": ("end", _parse_bound),
    "columns": ("columns", _parse_columns),
    "failOnDataLoss": ("fail_on_data_loss", parse_flag),
    "ordered": ("ordered", parse_flag),
    "minPartitions": ("min_partitions", _integer_parser("tasks", 1, TASKS_MAX)),
    "taskBytes": ("task_bytes", _integer_parser("bytes", TASK_BYTES_MIN, MAX_I64)),
    "bytesPerSecond": ("bytes_per_second", _integer_parser("bytes", 1, MAX_I64)),
    "jsonSchema": ("json_schema", _check_json_schema),
    "badValues": ("bad_values", _parse_bad_values),
    "retrySeconds": ("retry_s", _integer_parser("seconds", 0, RETRY_S_MAX)),
    "batchRows": ("batch_rows", _integer_parser("rows", 1, BATCH_ROWS_MAX)),
    "fromCopies": ("from_copies", parse_flag),
    "gcFreeze": ("gc_freeze", parse_flag),
    "maxRowsPerTrigger": ("max_rows_per_trigger", _integer_parser("rows", 1, MAX_I64)),
    "commitGroup": ("commit_group", lambda text: check_name("consumer group", text)),
    **SECURITY_PARSERS,
}
"""The ReadOptions field and the parser for each option. Bounds are parsed relative to a time."""
NAMES = tuple(_PARSERS)
_KNOWN = {name.lower() for name in NAMES}
