"""The options of a write, the reports of its tasks, and the check before a job is published. Pure.

    tasks: rows ─▶ hidden subject;  each task ends with a TaskReport
    driver: check_job ─▶ publish, once

Invariants
    A job is only published if the hidden subject has exactly the rows of one successful attempt per
    task.
    Two tasks never have rows from the same source partition and logical partition, because the rows
    of a key could then be stored in any order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import xxhash

from ...arrow.connection_security import PLAIN, ConnectionSecurity
from ...protocol.address import parse_addresses
from ...protocol.errors import ConfigError, Reason, RowsError, SubjectDeletedError
from ...protocol.ids import Subject, check_name
from ...protocol.limits import PARTITIONS_MAX
from ...protocol.routing import Route
from ...protocol.text import parse_number
from ..shared_options import (
    SECURITY_PARSERS,
    Parsers,
    advice,
    parse_flag,
    parse_security,
    parse_values,
    raise_problems,
)

Order = Literal["auto", "required", "none"]
ADDED_BY_SPARK = ("path", "checkpointlocation", "provider", "owner", "querycontext")
"""Options that Spark adds, in lowercase, in addition to those that begin with `option.`."""
SQL_WRITES = (
    "INSERT and CREATE TABLE … AS SELECT in SQL pass no options to a write, not even those of the "
    'table: use frame.write.format("keylane")'
)
ONCE_CHARS_MAX = 100
_ONCE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)/([0-9]+)")
TIMEOUT_MS = 120_000
TIMEOUT_MS_MAX = 3_600_000


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """
    The options of a write.

        option      meaning                                                         default
        meta        host:port of a metaserver; several, separated by commas         required
        subject     the subject to write to                                         required
        partitions  create the subject with this many partitions if it does not     it must exist
                    exist
        order       auto: if there are columns partition (or queue) and offset,     auto
                    offsets must rise, and a key that was read must have them;
                    required: the columns must exist; none: they are not checked
        once        name and number of a batch job, for example landing/17; it is
                    published once, however often it runs
        hidden      name of the hidden subject that a batch job fills               chosen
        publish     false: fill `hidden`, but do not publish it                     true
        timeoutMs   milliseconds that a task, or the commit, waits for a broker     120000
                    or the metaserver
        tlsCa, tlsCert, tlsKey, tokenFile   see shared_options.py                   environment
    """

    meta: tuple[str, ...]
    subject: Subject
    partitions: int = 0
    order: Order = "auto"
    once: str = ""
    """The name of the job, in the form that is used in the name of its hidden subject."""
    hidden: str = ""
    publish: bool = True
    timeout_ms: int = TIMEOUT_MS
    security: ConnectionSecurity = PLAIN


def parse_write_options(given_options: Mapping[str, str]) -> WriteOptions:
    """
    Parse the options of a write. Spark passes names and values as strings, and names in any case.

    Raises:
        ConfigError: options are unknown, missing or invalid; the error lists all of them.
    """
    options = {str(name).lower(): str(value).strip() for name, value in given_options.items()}
    problems: dict[str, str] = {}
    known_options = {name.lower() for name in NAMES}
    for name in sorted(options.keys() - known_options):
        if name not in ADDED_BY_SPARK and not name.startswith(("option.", "spark.")):
            problems[name[:80]] = advice(name, NAMES)
    values = parse_values(options, _PARSERS, problems)
    values["security"] = parse_security(values, problems)
    if not problems and values.get("publish") is False and "hidden" not in values:
        problems["hidden"] = "required with publish=false"
    if "once" in values:
        for name in {"hidden", "publish"} & values.keys():
            problems[name] = "a job with `once` has a hidden subject of its own, and publishes it"
    if problems:
        raise_problems(problems, "" if options.keys() & known_options else f"; {SQL_WRITES}")
    return WriteOptions(**values)


def _parse_integer(text: str, low: int, high: int) -> int:
    number = parse_number(text)
    if number is None or not low <= number <= high:
        raise ValueError(f"give a whole number from {low} to {high}, not {text!r:.80}")
    return number


def _parse_order(text: str) -> str:
    if text.lower() not in {"auto", "required", "none"}:
        raise ValueError(f"give auto, required or none, not {text!r:.80}")
    return text.lower()


def _parse_once(once: str) -> str:
    """Return the job name for the option `once`: `landing-17` for `landing/17`."""
    match = _ONCE.fullmatch(once)
    if match is None or len(once) > ONCE_CHARS_MAX:
        # Without a number, all batches of a query would be the same job, and only the first would
        # be published.
        raise ValueError(
            f"give a name and the number of the batch, for example landing/17, not {once!r:.80}"
        )
    return f"{match[1]}-{int(match[2])}"


_PARSERS: Parsers = {
    "meta": ("meta", lambda text: tuple(parse_addresses(text))),
    "subject": ("subject", lambda text: Subject(check_name("subject", text))),
    "partitions": ("partitions", lambda text: _parse_integer(text, 1, PARTITIONS_MAX)),
    "order": ("order", _parse_order),
    "once": ("once", _parse_once),
    "hidden": ("hidden", lambda text: check_name("subject", text)),
    "publish": ("publish", parse_flag),
    "timeoutMs": ("timeout_ms", lambda text: _parse_integer(text, 1, TIMEOUT_MS_MAX)),
    **SECURITY_PARSERS,
}
NAMES = tuple(_PARSERS)


def check_unused(hidden_subject: str, subject: str, stored_counts: Mapping[int, int]) -> None:
    """
    Check that the hidden subject named in the options is empty, because a job that fails will
    delete it.

    Args:
        stored_counts: the number of messages by partition id of the hidden subject.

    Raises:
        ConfigError: the subject has messages from another job.
    """
    if count := sum(stored_counts.values()):
        problem = (
            f"{hidden_subject!r} has {count} messages of another job: publish them (keylane "
            f"subject publish {hidden_subject} {subject}), delete them (keylane subject delete "
            f"{hidden_subject}), or give another name"
        )
        raise ConfigError(f"the options cannot work: hidden: {problem}")


def check_subject_id(route: Route, subject_id: int) -> None:
    """
    Check that a route belongs to the subject that a job started to fill.

    Args:
        subject_id: the id of the subject; 0 if unknown.

    Raises:
        SubjectDeletedError: the subject was deleted, and another one has the same name.
    """
    if subject_id and route.subject_id and route.subject_id != subject_id:
        raise SubjectDeletedError(
            f"subject {route.subject!r} with id {subject_id} was deleted, and another one has its "
            "name, which does not belong to this job",
            subject=str(route.subject),
        )


def producer_id(*parts: object) -> int:
    """Return the producer id for the rows of a task, which is the same in each attempt."""
    text = "\0".join(map(str, parts)).encode()
    return xxhash.xxh3_64_intdigest(text) >> 1 | 1


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The rows that a successful attempt of a task has stored."""

    task: int
    rows: Mapping[int, int] = field(default_factory=dict)
    """The number of rows by partition id."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """The logical partitions of rows with keys, as a bit set for each source partition."""


def check_job(reports: Sequence[TaskReport | None], stored_counts: Mapping[int, int]) -> int:
    """
    Check that the hidden subject has exactly the rows of the tasks, and return the number of rows.

    Args:
        reports: the report of each task; None if an attempt without rows sent no report.
        stored_counts: the number of messages by partition id of the hidden subject.

    Raises:
        RowsError: two tasks may have written rows of the same key, or the hidden subject does not
            have exactly the rows of the tasks.
    """
    known_reports = [report for report in reports if report is not None]
    check_sources(known_reports)
    expected: Counter[int] = Counter()
    for report in known_reports:
        expected.update(report.rows)
    for partition_id in sorted({*expected, *stored_counts}):
        stored_count = stored_counts.get(partition_id, 0)
        if stored_count != expected[partition_id]:
            raise RowsError(
                Reason.ROWS_DIFFER,
                f"partition {partition_id} has {stored_count} messages, and the tasks have written "
                f"{expected[partition_id]}",
                partition_id=partition_id,
            )
    return expected.total()


def check_sources(reports: Sequence[TaskReport]) -> None:
    """Raise RowsError if two tasks have rows from the same source partition and logical
    partition.
    """
    seen_bits: dict[str, int] = {}
    for report in reports:
        for source, partition_bits in report.sources.items():
            if seen_bits.get(source, 0) & partition_bits:
                raise RowsError(
                    Reason.ROW_ORDER,
                    f"rows of one key of source partition {source} may be in task {report.task} "
                    "and in another one, and tasks run at the same time",
                    task=report.task,
                )
            seen_bits[source] = seen_bits.get(source, 0) | partition_bits
