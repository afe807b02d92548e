"""`keylane produce`: sends one message, or one for each line or row of the input, and shows where
they are stored.

    line ─▶ message ─▶ future ─▶ receipt

After a failed line nothing more is read, and the command waits for the receipts of all lines that
were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from ...producer import Producer, ScheduledFuture, SendFuture
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, Fate, InputError, KeylaneError, Reason
from ...protocol.ids import check_name
from ...protocol.message import Receipt
from ...protocol.scheduled.deliver_at import AHEAD_MS_MAX, read_deliver_at, shown
from ...protocol.scheduled.receipt import ScheduledReceipt
from ...protocol.text import counted
from ..options import WAIT_S, InputFormat, OutputFormat, headers_of
from ..screen import show_error, show_json, show_line
from .lines import (
    STANDARD_INPUT,
    LineFormat,
    Outgoing,
    Records,
    numbered_lines,
    parse_line,
    parse_ranges,
    parse_separator,
    show_ranges,
)
from .rows import CsvTable, Ndjson, format_of

Sending = SendFuture | ScheduledFuture
CLOCK = SystemClock()
FUTURES_AHEAD = 10_000
INTERRUPT_FLUSH_S = 5.0
"""Seconds after an interrupt in which queued messages may still be stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """The options that the user typed."""

    subject: str
    value: str | None = None
    key: str | None = None
    separator: str | None = None
    as_json: bool = False
    keyless: bool = False
    lines: str | None = None
    file: Path | None = None
    format: InputFormat | None = None
    key_field: str | None = None
    headers: Sequence[str] = ()
    deliver_at: str | None = None
    delay_s: float | None = None


class SendInput(NamedTuple):
    """How input is turned into messages."""

    parse: Callable[[bytes], Outgoing]
    records: Records | None
    key: bytes
    properties: Mapping[str, str]
    deliver_at: Callable[[], int | None]
    """Returns the delivery time of a message that is sent now, in milliseconds since 1970; None:
    at once.
    """


class ReceiptTally:
    """Receipts, which are shown as they arrive (JSON) or counted at the end (table)."""

    def __init__(self, form: OutputFormat) -> None:
        self._json = form is OutputFormat.JSON
        self._first: Receipt | ScheduledReceipt | None = None
        self.count = 0
        self._reordered = 0
        self._possible = 0
        """Number of messages that may be stored twice."""
        self._partitions: set[int] = set()
        self._groups: set[str] = set()
        """Broker groups that keep messages for a later delivery."""

    def add(self, receipt: Receipt | ScheduledReceipt, line: int | None = None) -> None:
        """Count a receipt, and show it as JSON; `line` is the number of its line in the input."""
        self.count += 1
        self._first = self._first or receipt
        if isinstance(receipt, ScheduledReceipt):
            self._groups.add(receipt.broker_group)
        else:
            self._reordered += receipt.reordered
            self._possible += receipt.duplicate == "possible"
            self._partitions.add(receipt.partition_id)
        if self._json:
            where = {} if line is None else {"line": line}
            show_json(where | msgspec.structs.asdict(receipt))

    @property
    def declared(self) -> str:
        """The declarations of the receipts, as the end of a sentence; empty if there are none."""
        reordered = f", {self._reordered} of them reordered" if self._reordered else ""
        return reordered + (f", {self._possible} maybe stored twice" if self._possible else "")

    def close(self) -> None:
        """Show the counts, unless each receipt was shown."""
        if self._json:
            return
        if isinstance(self._first, ScheduledReceipt):
            groups = ", ".join(sorted(self._groups))
            if self.count == 1:
                until = f"until {shown(self._first.deliver_at_ms)}: id {self._first.scheduled_id}"
            else:
                until = f"for later; the first is delivered at {shown(self._first.deliver_at_ms)}"
            kept = counted(self.count, "message is kept", "messages are kept")
            show_line(f"{kept} by {groups} ({self._first.durable}) {until}")
        elif self.count == 1 and self._first is not None:
            receipt = self._first
            reordered = ", reordered" if receipt.reordered else ""
            possible = ", maybe stored twice" if self._possible else ""
            show_line(
                f"stored at offset {receipt.offset} of partition {receipt.partition_id} "
                f"({receipt.durable}{reordered}{possible})"
            )
        else:
            partitions = ", ".join(map(str, sorted(self._partitions))) or "none"
            stored = f"{counted(self.count, 'message')} stored{self.declared}"
            show_line(f"{stored}; partitions: {partitions}")


async def produce(meta: str, form: OutputFormat, options: SendOptions) -> None:
    """
    Send the value, or each line or row of the input, and show where it is stored.

    Raises:
        InputError: not all lines are stored; the error names the others.
        InputError: the file cannot be opened.
        KeylaneError: the value is not stored, or an option is invalid.
    """
    check_name("subject", options.subject)
    source = _input_of(options)
    ranges = [] if options.lines is None else parse_ranges(options.lines)
    tally = ReceiptTally(form)
    with contextlib.ExitStack() as files:
        stream = sys.stdin.buffer if options.file is None else _opened(options.file, files)
        async with Producer(meta, wait_s=WAIT_S.get()) as producer:
            if options.value is not None:
                message = Outgoing(source.key, _bytes(options.value), None)
                tally.add(await _send(producer, options.subject, message, source))
            else:
                name = STANDARD_INPUT if options.file is None else str(options.file)
                lines = partial(numbered_lines, stream, records=source.records, name=name)
                await _Lines(producer, tally, options.subject, source, lines).run(ranges, form)
            tally.close()


def _send(producer: Producer, subject: str, message: Outgoing, source: SendInput) -> Sending:
    """Queue a message, or schedule it at a broker."""
    key = message.key or source.key
    properties = {**source.properties, **(message.properties or {})}
    deliver_at = source.deliver_at()
    if deliver_at is None:
        return producer.send(subject, message.value, key=key, properties=properties)
    return producer.send(
        subject, message.value, key=key, properties=properties, deliver_at=deliver_at
    )


def _deliver_at(options: SendOptions) -> Callable[[], int | None]:
    """Return a function for the delivery time of a message that is sent now; raise
    InvalidRequestError.
    """
    if options.deliver_at is not None:
        at_ms = read_deliver_at(options.deliver_at, now_ms=CLOCK.wall_ms())
        return lambda: at_ms
    if options.delay_s is not None:
        delay_ms = round(options.delay_s * 1000)
        return lambda: CLOCK.wall_ms() + delay_ms
    return lambda: None


def _input_of(options: SendOptions) -> SendInput:
    """Return how these options send the input; raise ConfigError if they exclude each other."""
    form = InputFormat.JSON if options.as_json else options.format or format_of(options.file)
    rows = form in {InputFormat.CSV, InputFormat.NDJSON}
    own_key = options.separator is not None or options.key_field is not None
    of_lines = (options.separator, options.lines, options.file, options.format, options.key_field)
    impossible = {
        "--key-separator, --key-field, --json, --format, --file and --lines are for "
        "lines, not for VALUE": (
            options.value is not None and (options.as_json or any(v is not None for v in of_lines))
        ),
        "--json and --format are two formats": (
            options.as_json and options.format not in {None, InputFormat.JSON}
        ),
        "a line has a --key-separator only in the format lines": (
            options.separator is not None and form is not InputFormat.LINES
        ),
        "--key-field is for the formats csv and ndjson": (
            options.key_field is not None and not rows
        ),
        "--deliver-at and --delay are two times": (
            options.deliver_at is not None and options.delay_s is not None
        ),
        "--delay is over 366 days": (options.delay_s or 0) * 1000 > AHEAD_MS_MAX,
        "--key is empty: remove it to send without a key, which has no order": options.key == "",
        "the key is in each line: remove --key": (
            options.key is not None and (own_key or form is InputFormat.JSON)
        ),
        "--keyless is for lines with a --key-separator or a --key-field": (
            options.keyless and not own_key
        ),
    }
    for problem, met in impossible.items():
        if met:
            raise ConfigError(problem)
    key, properties = _bytes(options.key or ""), headers_of(options.headers)
    deliver_at = _deliver_at(options)
    if rows:
        kind = CsvTable if form is InputFormat.CSV else Ndjson
        source = kind(options.key_field, keyless=options.keyless)
        return SendInput(source.message, source.records, key, properties, deliver_at)
    separator = None if options.separator is None else parse_separator(options.separator)
    line_format = LineFormat(separator, form is InputFormat.JSON, options.keyless)
    return SendInput(partial(parse_line, form=line_format), None, key, properties, deliver_at)


def _opened(path: Path, files: contextlib.ExitStack) -> BinaryIO:
    try:
        return files.enter_context(path.open("rb"))
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror or error}") from error


class _Lines:
    """Sends the lines or rows of the input, and records which are stored."""

    def __init__(
        self,
        producer: Producer,
        tally: ReceiptTally,
        subject: str,
        source: SendInput,
        lines: Callable[[Sequence[tuple[int, int | None]]], AsyncIterator[tuple[int, bytes]]],
    ) -> None:
        self._producer = producer
        self._tally = tally
        self._subject = subject
        self._source = source
        self._numbered = lines
        self._sent: asyncio.Queue[tuple[int, Sending] | None] = asyncio.Queue()
        """Lines that wait for their receipts, in order; None after the last."""
        self._ahead = asyncio.Semaphore(FUTURES_AHEAD)
        self._next_line = 1
        """The first line that was not sent."""
        self._failed: list[int] = []
        """Lines that failed, so that they are not known to be stored."""
        self._cause: KeylaneError | None = None
        """The error of the first line that failed."""
        self._doubtful = False
        """True if a failed line may be stored."""

    async def run(self, ranges: Sequence[tuple[int, int | None]], form: OutputFormat) -> None:
        """
        Send the lines in `ranges` (all, if it is empty) until one fails.

        Raises:
            InputError: a line failed; the results of all lines that were sent are known.
        """
        self._next_line = ranges[0][0] if ranges else 1
        reader = asyncio.create_task(self._send(ranges), name="read lines")
        settler = asyncio.create_task(self._settle(reader), name="take receipts")
        try:
            with _cancelled_by_sigterm():
                await asyncio.wait([reader, settler], return_when=asyncio.FIRST_COMPLETED)
                if settler.done():  # it failed, as when standard output is closed
                    reader.cancel()
                await asyncio.wait([settler])  # a signal ends this wait, and not the settler
                settler.result()
        except asyncio.CancelledError:
            await self._abort(reader, settler)
            show_error(self._unfinished("interrupted", ranges), form)
            raise
        if self._cause is not None:
            raise self._unfinished(self._cause.message, ranges) from self._cause
        await reader  # raises a fault of our own

    async def _send(self, ranges: Sequence[tuple[int, int | None]]) -> None:
        try:
            source = self._source
            async for number, line in self._numbered(ranges):
                self._next_line = number
                message = source.parse(line)
                await self._producer.drain()
                await self._ahead.acquire()
                future = _send(self._producer, self._subject, message, source)
                self._next_line = number + 1
                self._sent.put_nowait((number, future))
        except KeylaneError as error:  # this line was not sent
            ended_at = error.line if isinstance(error, InputError) else None
            number = max(self._next_line, ended_at or 0)
            self._fail(number, error)
            self._next_line = number + 1
        finally:
            self._sent.put_nowait(None)

    async def _settle(self, reader: asyncio.Task[None]) -> None:
        """Take the receipts in the order of the lines, and stop reading after a failure."""
        while (sent := await self._sent.get()) is not None:
            number, future = sent
            try:
                receipt = await future
            except KeylaneError as error:
                self._fail(number, error)
                reader.cancel()
            else:
                self._tally.add(receipt, number)
            self._ahead.release()

    def _fail(self, number: int, error: KeylaneError) -> None:
        self._failed.append(number)
        self._cause = self._cause or error
        self._doubtful = self._doubtful or error.fate is Fate.UNKNOWN

    async def _abort(self, reader: asyncio.Task[None], settler: asyncio.Task[None]) -> None:
        """Wait until queued messages are stored, for INTERRUPT_FLUSH_S at most, give up the others,
        and take all receipts.
        """
        reader.cancel()
        with contextlib.suppress(TimeoutError, KeylaneError):
            async with asyncio.timeout(INTERRUPT_FLUSH_S):
                await self._producer.flush()
        await self._producer.close(flush=False)
        await asyncio.wait([reader, settler])

    def _unfinished(self, cause: str, ranges: Sequence[tuple[int, int | None]]) -> InputError:
        failed = sorted(self._failed)
        rest = [
            (max(start, self._next_line), end)
            for start, end in ranges or [(1, None)]
            if end is None or end > self._next_line
        ]
        shown = show_ranges(_joined([*((number, number + 1) for number in failed), *rest]))
        text = f"line {failed[0]}: {cause}" if failed else cause
        doubt = "; some of them may be stored" if self._doubtful else ""
        error = InputError(
            Reason.INPUT_UNFINISHED,
            f"{text}. Lines stored: {self._tally.count}{self._tally.declared}; lines not stored: "
            f"{shown}{doubt}",
            stored=self._tally.count,
            line=failed[0] if failed else self._next_line,
            lines=shown,
        )
        error.hint = error.hint.replace("LINES", shown)
        if not self._tally.count and not self._doubtful:
            error.fate = Fate.NOT_DONE
        return error


def _joined(ranges: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Join adjacent ranges of an ascending list."""
    joined: list[tuple[int, int | None]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the input as SIGINT does, so that the stored lines are reported."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _bytes(text: str) -> bytes:
    """Return the bytes that the user typed, whatever their encoding."""
    return text.encode(errors="surrogateescape")
