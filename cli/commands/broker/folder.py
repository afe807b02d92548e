"""`keylane broker` verify, dump and index: inspect the data folder of a stopped broker, and
rebuild, convert or compare its indexes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import click
import msgspec

from ....broker.offline.index_work import IndexReport, rebuild_index, switch_index, verify_indexes
from ....broker.offline.inspection import inspect_folder, log_bounds, walk_log, walk_scheduled
from ....broker.offline.promotion import promote_candidate, read_candidate
from ....broker.partition.image import decode_partition
from ....broker.partition.records import decode_body
from ....broker.scheduled.records import (
    Delivered,
    Record,
    ScheduledForSubject,
    ScheduledMessageRecord,
    Taken,
    decode_changes,
)
from ....broker.settings import INDEX_KINDS
from ....broker.storage.copy_file import Candidate
from ....broker.storage.data_folder import read_identity
from ....broker.storage.fail_points import make_files
from ....broker.storage.files import Files, RealFiles
from ....broker.storage.log.holes import Hole
from ....protocol.batch import columns
from ....protocol.errors import ConflictError, DataFolderError, KeylaneError, Reason
from ....protocol.message import unpack_properties
from ....protocol.record import HEADER_BYTES, Compression, Header, Kind
from ....protocol.text import counted, listed, printable
from ...confirmation import confirm, will_ask
from ...connection import open_admin
from ...message_json import shown_properties
from ...options import OutputFormat
from ...screen import make_table, run, show_data, show_error, show_line, show_row, show_table
from ...status import showing_progress

TEXT_CHARS_MAX = 60


class MessageInRecord(TypedDict):
    """A message of a record, as JSON, with long texts cut."""

    key: str
    value: str
    properties: NotRequired[dict[str, str] | str]


class ScheduledFields(TypedDict, total=False):
    """A change of scheduled messages, as JSON; no change has all of the fields."""

    position: int
    kind: str
    scheduled_ids: list[str]
    delivery: str
    subject: str
    logical: int
    deliver_at_ms: int
    sent_at_ns: int
    value_bytes: int
    subject_id: int
    value: str
    properties: dict[str, str] | str
    damage: str


class RecordFields(TypedDict, total=False):
    """A record of the log, as JSON; no record has all of the fields."""

    position: int
    kind: str
    partition_id: int
    length: int
    base_offset: int
    count: int
    first_sent_at_ns: int
    appended_at_ms: int
    producer: list[int]
    compression: str
    messages: list[MessageInRecord]
    end_offset: int
    subject: str
    next_offset: int
    groups: list[str]
    groups_told: bool
    body: Any
    scheduled: list[ScheduledFields]
    damage: str
    end: int


@contextmanager
def locked_folder(
    folder: Path, output: OutputFormat, *, writes: bool = False
) -> Iterator[RealFiles]:
    """
    Lock the folder and yield its files. If this fails, print the error and exit with status 1.

    A read-only folder is rejected if the caller `writes` to it.
    """
    files = make_files(str(folder))
    try:
        read_identity(files)  # checked before locking, which would create a missing folder
        _lock(files, folder, writes=writes)
        yield files
    except KeylaneError as error:
        show_error(error, output)
        raise click.exceptions.Exit(1) from None
    finally:
        files.close()


def _lock(files: RealFiles, folder: Path, *, writes: bool) -> None:
    """Lock the folder. Raises DataFolderError if a broker is using it."""
    try:
        if writes:
            files.lock()
        else:
            files.lock_to_read()
    except DataFolderError as error:
        if not isinstance(error.__cause__, BlockingIOError):
            raise
        raise DataFolderError(
            f"a broker or a follower is using the data folder {folder} now: stop it first; a "
            "running broker is inspected with keylane broker health HOST:PORT",
            path=str(folder),
        ) from error


def promote(folder: Path, meta: str, output: OutputFormat, *, yes: bool) -> None:
    """Make a copy the folder of its broker group. Exit with status 1 if that is refused."""
    loses = False

    async def ask(candidate: Candidate) -> None:
        nonlocal loses
        loses = await _promote_in_database(meta, candidate, yes=yes)

    with locked_folder(folder, output, writes=True) as files:
        candidate = read_candidate(files)
        broker_group = candidate.copy.broker_group
        run(output, ask(candidate))
        promotion = promote_candidate(files, candidate)
    if output is not OutputFormat.TABLE:
        show_data(output, promotion)
        return
    show_line(
        f"{folder} is the data folder of broker group {broker_group} now, with its log up to "
        f"position {promotion.log_end}; start the broker on it: keylane broker run --group "
        f"{broker_group} --data {folder}"
    )
    if loses:
        show_line(
            "What it lacks is given up. If keylane broker list says that it is refused as an older "
            f"copy: keylane broker accept {broker_group}"
        )


async def _promote_in_database(meta: str, candidate: Candidate, *, yes: bool) -> bool:
    """
    Promote a copy; if acks have not waited for it, only if what it lacks is given up. Return True
    if it was.

    Raises:
        ConflictError: nobody can be asked whether it is given up.
    """
    try:
        await _ask_for_promotion(meta, candidate, lose=False)
    except ConflictError as error:
        may_lose = error.reason in {Reason.COPY_LACKS_ACKED, Reason.COPIES_QUARANTINED}
        if not may_lose or not (yes or will_ask(yes=yes)):
            raise
        broker_group = candidate.copy.broker_group
        if not yes:
            async with open_admin(meta) as admin:
                members = (await admin.copies(broker_group)).members
            show_line(f"{error.message}.", errors=True)
            better = f"have everything: {listed(members)}" if members else "are left that have more"
            show_line(f"{'These copies' if members else 'No copies'} {better}.", errors=True)
        confirm(f"Give up what broker group {broker_group} has acked and this copy lacks?", yes=yes)
        await _ask_for_promotion(meta, candidate, lose=True)
        return True
    return False


async def _ask_for_promotion(meta: str, candidate: Candidate, *, lose: bool) -> None:
    async with open_admin(meta) as admin:
        await admin.promote_copy(
            candidate.copy.broker_group,
            candidate.copy.copy_id,
            broker_id=candidate.broker_id,
            log_end=candidate.log_end,
            lose=lose,
        )


def verify_folder(folder: Path, output: OutputFormat) -> None:
    """Check every checksum in a data folder. Exit with status 1 if anything is wrong."""
    with (
        locked_folder(folder, output) as files,
        showing_progress("checking the log") as reach,
    ):
        inspection = inspect_folder(files, _along_log(files, reach))
    if output is not OutputFormat.TABLE:
        show_data(output, inspection)
    else:
        rows = [
            (name.replace("_", " "), value)
            for name, value in vars(inspection).items()
            if name not in {"problems", "stopped_partitions"}
        ]
        state = (
            counted(len(inspection.problems), "problem")
            if inspection.problems
            else "nothing is wrong"
        )
        show_table(make_table(f"{folder}: {state}", ("", "found#"), rows))
        for problem in inspection.problems:
            show_line(problem)
        if inspection.stopped_partitions:
            show_line(f"stopped partitions: {', '.join(map(str, inspection.stopped_partitions))}")
    if inspection.problems:
        raise click.exceptions.Exit(1)


def _along_log(files: Files, reach: Callable[[int, int], None]) -> Callable[[int], None]:
    """Return the function to call with each position of the log that has been read."""
    start, end = log_bounds(files)
    return lambda position: reach(position - start, end - start)


class _StopWalk(Exception):  # noqa: N818 - not an error
    """Raised to end a walk over records after enough of them have been printed."""


def dump_folder(
    folder: Path,
    output: OutputFormat,
    *,
    partition: int | None,
    start: int,
    limit: int,
    messages: bool,
) -> None:
    """Print the records of a data folder, oldest first, one per line."""
    printed_count = 0

    def print_record(header: Header, body: memoryview) -> None:
        nonlocal printed_count
        if partition is None:
            is_selected = header.position >= start
        else:
            is_before_start = header.kind == Kind.MESSAGES and header.next_offset <= start
            is_selected = header.partition_id == partition and not is_before_start
        if not is_selected:
            return
        if printed_count >= limit:
            raise _StopWalk
        printed_count += 1
        record = _record_fields(header, body, messages=messages)
        if output is OutputFormat.TABLE:
            sys.stdout.write(_format_record(record) + "\n")
        else:
            show_row(output, record)

    def print_damage(damage: Hole) -> None:
        if damage.end > start or partition is not None:
            text = f"{damage.start:>14}  DAMAGE up to position {damage.end}: {damage.reason}"
            record = RecordFields(position=damage.start, damage=damage.reason, end=damage.end)
            if output is OutputFormat.TABLE:
                show_line(text)
            else:
                show_row(output, record)

    with locked_folder(folder, output) as files:
        try:
            walk_log(files, print_record, print_damage, start=0 if partition is not None else start)
        except _StopWalk:
            pass


def dump_scheduled(folder: Path, output: OutputFormat, *, limit: int, messages: bool) -> None:
    """Print the changes of scheduled messages in a data folder, oldest first, one per line."""
    printed_count = 0

    def print_changes(position: int, changes: Sequence[Record]) -> None:
        nonlocal printed_count
        for change in changes:
            if printed_count >= limit:
                raise _StopWalk
            printed_count += 1
            fields = _scheduled_fields(position, change, messages=messages)
            if output is not OutputFormat.TABLE:
                show_row(output, fields)
            else:
                other_fields = {
                    name: value
                    for name, value in fields.items()
                    if name not in {"position", "kind"}
                }
                text = printable(
                    "  ".join(f"{name}={value}" for name, value in other_fields.items())
                )
                sys.stdout.write(f"{position:>14}  {fields['kind']:<9}  {text}\n")

    with locked_folder(folder, output) as files:
        problems: list[str] = []
        with suppress(_StopWalk):
            problems = walk_scheduled(files, print_changes)[1]
    for problem in problems:
        if output is OutputFormat.TABLE:
            show_line(f"DAMAGE: {problem}")
        else:
            show_row(output, ScheduledFields(damage=problem))


def _scheduled_fields(position: int, record: Record, *, messages: bool) -> ScheduledFields:
    """Return a change of scheduled messages as a dict of fields."""
    fields: ScheduledFields = {
        "position": position,
        "kind": "WAITS"
        if isinstance(record, ScheduledMessageRecord)
        else type(record).__name__.upper(),
    }
    if not isinstance(record, ScheduledMessageRecord):
        ids = record.scheduled_ids if hasattr(record, "scheduled_ids") else (record.scheduled_id,)
        fields["scheduled_ids"] = [each.hex() for each in ids]
        if isinstance(record, Taken | Delivered):
            fields["delivery"] = record.delivery
        if isinstance(record, Taken):
            fields |= {"subject": record.subject, "logical": record.logical_partition}
        return fields
    fields |= {
        "scheduled_ids": [record.scheduled_id.hex()],
        "subject": record.subject,
        "deliver_at_ms": record.deliver_at_ms,
        "sent_at_ns": record.sent_at_ns,
        "value_bytes": len(record.value),
    }
    if isinstance(record, ScheduledForSubject):
        fields["subject_id"] = record.subject_id
    if messages:
        fields["value"] = _shorten(record.value)
        if record.packed_properties:
            fields["properties"] = _properties(record.packed_properties)
    return fields


def _record_fields(header: Header, body: memoryview, *, messages: bool) -> RecordFields:
    """Return a log record as a dict of fields."""
    kind = Kind(header.kind).name
    record: RecordFields = {
        "position": header.position,
        "kind": kind,
        "partition_id": header.partition_id,
        "length": header.length,
    }
    if header.kind == Kind.MESSAGES:
        record |= {
            "base_offset": header.base_offset,
            "count": header.count,
            "first_sent_at_ns": header.first_sent_at_ns,
            "appended_at_ms": header.appended_at_ms,
            "producer": [header.producer_id, header.producer_epoch, header.sequence],
        }
        if header.compression != Compression.NONE:
            record["compression"] = Compression(header.compression).name
        if messages:
            record["messages"] = list(_decode_messages(header, body))
    elif header.kind == Kind.SEAL:
        record["end_offset"] = header.base_offset
    elif header.kind == Kind.STATE:
        partition = decode_partition(header.partition_id, body)
        record |= {"subject": partition.facts.subject, "next_offset": partition.next_offset}
        record["groups"] = sorted(partition.groups)
        record["groups_told"] = partition.groups_told
    elif header.kind == Kind.SCHEDULED:
        changes = decode_changes(body, header.position)
        record["scheduled"] = [
            _scheduled_fields(header.position, change, messages=messages) for change in changes
        ]
    elif header.kind != Kind.TOLD:
        record["body"] = msgspec.to_builtins({"": decode_body(header, body)})[""]
    return record


def _decode_messages(header: Header, body: memoryview) -> Iterator[MessageInRecord]:
    batch = columns(bytes(HEADER_BYTES) + bytes(body), header)
    for index in range(header.count):
        key, value = (
            batch.blob[edges[index] : edges[index + 1]]
            for edges in (batch.key_edges, batch.value_edges)
        )
        message: MessageInRecord = {"key": _shorten(key), "value": _shorten(value)}
        start, end = batch.property_edges[index : index + 2]
        if start < end:
            message["properties"] = _properties(batch.blob[start:end])
        yield message


def _properties(packed: bytes) -> dict[str, str] | str:
    try:
        return shown_properties(unpack_properties(packed))
    except KeylaneError:  # brokers do not check properties
        return _shorten(packed)


def _shorten(data: bytes) -> str:
    text = data.decode("utf-8", "backslashreplace")
    return (
        text
        if len(text) <= TEXT_CHARS_MAX
        else f"{text[:TEXT_CHARS_MAX]}… ({counted(len(data), 'byte')})"
    )


def _format_record(record: RecordFields) -> str:
    """Format a record as one line, followed by one line per message."""
    other_fields = {
        name: value
        for name, value in record.items()
        if name not in {"position", "kind", "partition_id", "messages"}
    }
    text = printable("  ".join(f"{name}={value}" for name, value in other_fields.items()))
    head = f"{record['position']:>14}  {record['kind']:<9}  partition {record['partition_id']}"
    lines = [f"{head}  {text}"]
    for index, message in enumerate(record.get("messages", ())):
        offset = record["base_offset"] + index
        line = f"{'':>14}    {offset}  {message['key']!r}: {message['value']!r}"
        lines.append(
            printable(f"{line}  {message['properties']}" if "properties" in message else line)
        )
    return "\n".join(lines)


def rebuild(folder: Path, index: str, output: OutputFormat) -> None:
    """Rebuild one index from the log."""
    _check_kind(index)
    _run_on_indexes(
        folder,
        output,
        "rebuilding the index",
        lambda files, reach: [rebuild_index(files, index, _along_log(files, reach))],
    )


def switch(folder: Path, to: str, output: OutputFormat) -> None:
    """Convert the index from the other kind to this one."""
    _check_kind(to)
    _run_on_indexes(
        folder,
        output,
        "converting the index",
        lambda files, reach: [switch_index(files, to, reach)],
    )


def verify(folder: Path, output: OutputFormat) -> None:
    """Compare all indexes with the log. Exit with status 1 if anything differs."""
    _run_on_indexes(
        folder,
        output,
        "comparing indexes with the log",
        lambda files, reach: verify_indexes(files, _along_log(files, reach)),
    )


def _check_kind(index: str) -> None:
    """Raise BadParameter unless `index` is a kind of index."""
    if index not in INDEX_KINDS:
        raise click.BadParameter(f"{index!r} is neither {' nor '.join(INDEX_KINDS)}")


def _run_on_indexes(
    folder: Path,
    output: OutputFormat,
    what: str,
    work: Callable[[Files, Callable[[int, int], None]], list[IndexReport]],
) -> None:
    """Run `work` on the indexes of a folder and show its reports."""
    with (
        locked_folder(folder, output, writes=True) as files,
        showing_progress(what) as reach,
    ):
        reports = work(files, reach)
    if output is not OutputFormat.TABLE:
        show_data(output, reports)
    else:
        rows = [
            (report.index, report.partitions, report.batches, report.position, len(report.problems))
            for report in reports
        ]
        columns = ("index", "partitions#", "batches#", "position#", "problems#")
        show_table(make_table(str(folder), columns, rows))
        for report in reports:
            for problem in report.problems:
                show_line(f"{report.index}: {problem}")
    if any(report.problems for report in reports):
        raise click.exceptions.Exit(1)
