"""`keylane produce`: sends one message, or one per line or row of the input, and shows where they
are stored.

    line ─▶ message ─▶ future ─▶ receipt

After a line fails, the command stops reading and waits for the receipts of all sent lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypedDict

import msgspec

from ...producer import Producer, ScheduledFuture, SendFuture
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, Fate, InputError, KeylaneError, Reason
from ...protocol.ids import check_name
from ...protocol.message import Receipt
from ...protocol.scheduled.deliver_at import AHEAD_MS_MAX, read_deliver_at
from ...protocol.scheduled.receipt import ScheduledReceipt
from ...protocol.text import counted, format_time
from ..options import WAIT_S, InputFormat, OutputFormat, parse_headers
from ..screen import show_error, show_line, show_row
from ..status import percent, showing
from .lines import (
    STANDARD_INPUT,
    LineFormat,
    OutgoingMessage,
    RecordParser,
    format_ranges,
    numbered_lines,
    parse_line,
    parse_ranges,
    parse_separator,
)
from .rows import CsvTable, Ndjson, guess_format

PendingSend = SendFuture | ScheduledFuture
CLOCK = SystemClock()
IN_FLIGHT_MAX = 10_000
TYPED_LINE = "reading messages from standard input, one per line; Ctrl-D ends"
INTERRUPT_FLUSH_S = 5.0
"""How many seconds queued messages have to be stored after an interrupt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """The options of `keylane produce`."""

    subject: str
    value: str | None = None
    key: str | None = None
    separator: str | None = None
    keyless: bool = False
    lines: str | None = None
    file: Path | None = None
    format: InputFormat | None = None
    key_field: str | None = None
    headers: Sequence[str] = ()
    deliver_at: str | None = None
    delay_s: float | None = None


class InputLine(TypedDict, total=False):
    """The number of the line of a message in the input, as JSON; a receipt follows."""

    line: int


class SendInput(NamedTuple):
    """How the input is converted to messages."""

    parse: Callable[[bytes], OutgoingMessage]
    records: RecordParser | None
    key: bytes
    properties: Mapping[str, str]
    deliver_at: Callable[[], int | None]
    """Returns the delivery time of a message that is sent now, in milliseconds since 1970; None for
    immediate delivery.
    """


class ReceiptTally:
    """Shows receipts as they arrive (JSON), or counts them and shows the counts at the end
    (table).
    """

    def __init__(self, output: OutputFormat) -> None:
        self._output = output
        self._first_receipt: Receipt | ScheduledReceipt | None = None
        self.count = 0
        self._reordered = 0
        self._duplicates = 0
        """Number of messages that may have been stored twice."""
        self._partitions: set[int] = set()
        self._broker_groups: set[str] = set()
        """Broker groups that store scheduled messages."""

    def add(self, receipt: Receipt | ScheduledReceipt, line: int | None = None) -> None:
        """Count a receipt, or show it as JSON; `line` is its line number in the input."""
        self.count += 1
        self._first_receipt = self._first_receipt or receipt
        if isinstance(receipt, ScheduledReceipt):
            self._broker_groups.add(receipt.broker_group)
        else:
            self._reordered += receipt.reordered
            self._duplicates += receipt.duplicate == "possible"
            self._partitions.add(receipt.partition_id)
        if self._output is not OutputFormat.TABLE:
            line_field: InputLine = {} if line is None else {"line": line}
            show_row(self._output, {**line_field, **msgspec.structs.asdict(receipt)})
            sys.stdout.flush()

    @property
    def anomalies_text(self) -> str:
        """A description of reordered and possibly duplicated messages, as the end of a sentence; ""
        if there are none.
        """
        reordered = f", {self._reordered} of them reordered" if self._reordered else ""
        return reordered + (f", {self._duplicates} maybe stored twice" if self._duplicates else "")

    def close(self) -> None:
        """Show the counts, unless each receipt was shown as JSON."""
        if self._output is not OutputFormat.TABLE:
            return
        receipt = self._first_receipt
        if isinstance(receipt, ScheduledReceipt):
            groups = ", ".join(sorted(self._broker_groups))
            if self.count == 1:
                until = f"until {format_time(receipt.deliver_at_ms)}: id {receipt.scheduled_id}"
            else:
                until = f"for later; the first is delivered at {format_time(receipt.deliver_at_ms)}"
            count_text = counted(self.count, "message is kept", "messages are kept")
            show_line(f"{count_text} by {groups} ({receipt.durable}) {until}")
        elif self.count == 1 and receipt is not None:
            folders = f" in {receipt.copies} folders" if receipt.copies > 1 else ""
            reordered = ", reordered" if receipt.reordered else ""
            possible = ", maybe stored twice" if self._duplicates else ""
            show_line(
                f"stored at offset {receipt.offset} of partition {receipt.partition_id} "
                f"({receipt.durable}{folders}{reordered}{possible})"
            )
        else:
            partitions = ", ".join(map(str, sorted(self._partitions))) or "none"
            stored = f"{counted(self.count, 'message')} stored{self.anomalies_text}"
            show_line(f"{stored}; partitions: {partitions}")


async def produce(meta: str, output: OutputFormat, options: SendOptions) -> None:
    """
    Send the value, or each line or row of the input, and show where it has been stored.

    Raises:
        InputError: the file cannot be opened, or some lines were not stored; the error lists them.
        KeylaneError: the value was not stored, or an option is invalid.
    """
    check_name("subject", options.subject)
    source = _build_input(options)
    ranges = [] if options.lines is None else parse_ranges(options.lines)
    tally = ReceiptTally(output)
    is_typed = options.value is None and options.file is None and sys.stdin.isatty()
    with contextlib.ExitStack() as files:
        stream = sys.stdin.buffer if options.file is None else _open_file(options.file, files)
        async with Producer(meta, wait_s=WAIT_S.get()) as producer:
            if options.value is not None:
                message = OutgoingMessage(source.key, _bytes(options.value), None)
                with showing(f"sending the message to {options.subject}"):
                    receipt = await _send(producer, options.subject, message, source)
                tally.add(receipt)
            else:
                name = STANDARD_INPUT if options.file is None else str(options.file)
                lines = partial(numbered_lines, stream, records=source.records, name=name)
                if is_typed:
                    print(TYPED_LINE, file=sys.stderr, flush=True)
                sender = _LineSender(
                    producer, tally, options.subject, source, lines, is_typed=is_typed
                )
                # A terminal on which lines or receipts appear needs no other sign of progress.
                shows_receipts = output is not OutputFormat.TABLE and sys.stdout.isatty()
                with contextlib.ExitStack() as status:
                    if not is_typed and not shows_receipts:
                        text = partial(progress_text, name, stream, tally)
                        status.enter_context(showing(text))
                    await sender.run(ranges, output)
            tally.close()


def progress_text(name: str, stream: BinaryIO, tally: ReceiptTally) -> str:
    """Return how many messages are stored and, if the input is a file, how much of it was read."""
    try:
        number = stream.fileno()
        share = percent(os.lseek(number, 0, os.SEEK_CUR), os.fstat(number).st_size)
    except OSError:  # a pipe has no position
        share = ""
    read = f",{share} of the input read" if share else ""
    return f"sending {name}: {counted(tally.count, 'message')} stored{read}"


def _send(
    producer: Producer, subject: str, message: OutgoingMessage, source: SendInput
) -> PendingSend:
    """Send a message, or schedule it if the options set a delivery time."""
    key = message.key or source.key
    properties = {**source.properties, **(message.properties or {})}
    deliver_at = source.deliver_at()
    if deliver_at is None:
        return producer.send(subject, message.value, key=key, properties=properties)
    return producer.send(
        subject, message.value, key=key, properties=properties, deliver_at=deliver_at
    )


def _delivery_time(options: SendOptions) -> Callable[[], int | None]:
    """Return the function to use as `SendInput.deliver_at`. Raises InvalidRequestError."""
    if options.deliver_at is not None:
        at_ms = read_deliver_at(options.deliver_at, now_ms=CLOCK.wall_ms())
        return lambda: at_ms
    if options.delay_s is not None:
        delay_ms = round(options.delay_s * 1000)
        return lambda: CLOCK.wall_ms() + delay_ms
    return lambda: None


def _build_input(options: SendOptions) -> SendInput:
    """Convert the options to a SendInput. Raises ConfigError if they conflict."""
    input_format = options.format or guess_format(options.file)
    rows = input_format in {InputFormat.CSV, InputFormat.NDJSON}
    has_line_key = options.separator is not None or options.key_field is not None
    line_options = (
        options.separator,
        options.lines,
        options.file,
        options.format,
        options.key_field,
    )
    conflicts = {
        "--key-separator, --key-field, --format, --file and --lines are for lines, not for VALUE": (
            options.value is not None and any(v is not None for v in line_options)
        ),
        "a line has a --key-separator only in the format lines": (
            options.separator is not None and input_format is not InputFormat.LINES
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
            options.key is not None and (has_line_key or input_format is InputFormat.JSON)
        ),
        "--keyless is for lines with a --key-separator or a --key-field": (
            options.keyless and not has_line_key
        ),
    }
    for problem, applies in conflicts.items():
        if applies:
            raise ConfigError(problem)
    key, properties = _bytes(options.key or ""), parse_headers(options.headers)
    deliver_at = _delivery_time(options)
    if rows:
        parser_class = CsvTable if input_format is InputFormat.CSV else Ndjson
        parser = parser_class(options.key_field, key=options.key or "", keyless=options.keyless)
        return SendInput(parser.parse, parser.records, key, properties, deliver_at)
    separator = None if options.separator is None else parse_separator(options.separator)
    line_format = LineFormat(separator, input_format is InputFormat.JSON, options.keyless)
    return SendInput(partial(parse_line, form=line_format), None, key, properties, deliver_at)


def _open_file(path: Path, files: contextlib.ExitStack) -> BinaryIO:
    try:
        return files.enter_context(path.open("rb"))
    except OSError as error:
        raise InputError(f"{path} cannot be opened: {error.strerror or error}") from error


class _LineSender:
    """Sends the lines or rows of the input and records which of them have been stored."""

    def __init__(
        self,
        producer: Producer,
        tally: ReceiptTally,
        subject: str,
        source: SendInput,
        lines: Callable[[Sequence[tuple[int, int | None]]], AsyncIterator[tuple[int, bytes]]],
        *,
        is_typed: bool,
    ) -> None:
        self._is_typed = is_typed
        """True if a person types the lines, which cannot be read again."""
        self._producer = producer
        self._tally = tally
        self._subject = subject
        self._source = source
        self._numbered_lines = lines
        self._sent: asyncio.Queue[tuple[int, PendingSend] | None] = asyncio.Queue()
        """Lines that were sent and have no receipt yet, in order; None marks the end."""
        self._in_flight_slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._next_line = 1
        """The first line that has not been sent yet."""
        self._failed_lines: list[int] = []
        """Lines that failed."""
        self._first_error: KeylaneError | None = None
        """The error of the line that failed first."""
        self._may_be_stored = False
        """True if a failed line may have been stored."""
        self._signaled = asyncio.Event()
        """Set by the first signal that ends the command."""
        self._hurried = asyncio.Event()
        """Set by the second one: queued messages are given up at once."""

    async def run(self, ranges: Sequence[tuple[int, int | None]], output: OutputFormat) -> None:
        """
        Send the lines in `ranges` (all if it is empty) until one fails.

        Raises:
            InputError: a line failed; by then, the outcome of every sent line is known.
            KeyboardInterrupt, CancelledError: a SIGINT or a SIGTERM ended the command. Before that
                it has shown which lines are not stored.
        """
        self._next_line = ranges[0][0] if ranges else 1
        read_task = asyncio.create_task(self._send(ranges), name="read lines")
        receipt_task = asyncio.create_task(self._await_receipts(read_task), name="take receipts")
        with _handle_signals(self._on_signal) as signals:
            signal_task = asyncio.create_task(self._signaled.wait(), name="await a signal")
            await asyncio.wait(
                [read_task, receipt_task, signal_task], return_when=asyncio.FIRST_COMPLETED
            )
            if receipt_task.done():  # it failed, for example because standard output is closed
                read_task.cancel()
            await asyncio.wait([receipt_task, signal_task], return_when=asyncio.FIRST_COMPLETED)
            signal_task.cancel()
            if not receipt_task.done():
                await self._abort(read_task, receipt_task)
                show_error(self._unfinished_error("interrupted", ranges), output)
                raise KeyboardInterrupt if signals[0] is signal.SIGINT else asyncio.CancelledError
            receipt_task.result()
        if self._first_error is not None:
            raise self._unfinished_error(self._first_error.message, ranges) from self._first_error
        await read_task  # raises an error only if there is a bug

    def _on_signal(self) -> None:
        """Begin to end the command; at the second signal, stop waiting for queued messages."""
        (self._hurried if self._signaled.is_set() else self._signaled).set()

    async def _send(self, ranges: Sequence[tuple[int, int | None]]) -> None:
        try:
            source = self._source
            async for number, line in self._numbered_lines(ranges):
                self._next_line = number
                message = source.parse(line)
                await self._producer.drain()
                await self._in_flight_slots.acquire()
                future = _send(self._producer, self._subject, message, source)
                self._next_line = number + 1
                self._sent.put_nowait((number, future))
        except KeylaneError as error:  # the line at `_next_line` was not sent
            error_line = error.line if isinstance(error, InputError) else None
            number = max(self._next_line, error_line or 0)
            self._fail(number, error)
            self._next_line = number + 1
        finally:
            self._sent.put_nowait(None)

    async def _await_receipts(self, read_task: asyncio.Task[None]) -> None:
        """Await the receipts in the order of the lines. Stops reading after a failure."""
        while (sent := await self._sent.get()) is not None:
            number, future = sent
            try:
                receipt = await future
            except KeylaneError as error:
                self._fail(number, error)
                read_task.cancel()
            else:
                self._tally.add(receipt, number)
            self._in_flight_slots.release()

    def _fail(self, number: int, error: KeylaneError) -> None:
        """Record that a line failed."""
        self._failed_lines.append(number)
        self._first_error = self._first_error or error
        self._may_be_stored = self._may_be_stored or error.fate is Fate.UNKNOWN

    async def _abort(self, read_task: asyncio.Task[None], receipt_task: asyncio.Task[None]) -> None:
        """Stop reading, give queued messages INTERRUPT_FLUSH_S to be stored, or until the next
        signal, drop the rest, and await all receipts.
        """
        read_task.cancel()
        flush_task = asyncio.create_task(self._producer.flush(), name="flush")
        hurry_task = asyncio.create_task(self._hurried.wait(), name="await another signal")
        await asyncio.wait(
            [flush_task, hurry_task],
            timeout=INTERRUPT_FLUSH_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        hurry_task.cancel()
        flush_task.cancel()
        await asyncio.wait([flush_task])
        if not flush_task.cancelled():
            flush_task.exception()  # the lines' own futures have raised it too
        await self._producer.close(flush=False)
        await asyncio.wait([read_task, receipt_task])

    def _unfinished_error(self, cause: str, ranges: Sequence[tuple[int, int | None]]) -> InputError:
        """Build the error that lists the lines that were not stored."""
        failed = sorted(self._failed_lines)
        unsent = [
            (max(start, self._next_line), end)
            for start, end in ranges or [(1, None)]
            if end is None or end > self._next_line
        ]
        ranges_text = format_ranges(
            _join_ranges([*((number, number + 1) for number in failed), *unsent])
        )
        text = f"line {failed[0]}: {cause}" if failed else cause
        doubt = "; some of them may be stored" if self._may_be_stored else ""
        not_stored = "" if self._is_typed else f"; lines not stored: {ranges_text}"
        error = InputError(
            Reason.INPUT_UNFINISHED,
            f"{text}. Lines stored: {self._tally.count}{self._tally.anomalies_text}"
            f"{not_stored}{doubt}",
            stored=self._tally.count,
            line=failed[0] if failed else self._next_line,
            lines=ranges_text,
        )
        error.hint = (
            "Run the command again, and type the lines that are not stored."
            if self._is_typed
            else error.hint.replace("LINES", ranges_text)
        )
        if not self._tally.count and not self._may_be_stored:
            error.fate = Fate.NOT_DONE
        return error


def _join_ranges(ranges: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Merge adjacent ranges in an ascending list."""
    joined: list[tuple[int, int | None]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


@contextlib.contextmanager
def _handle_signals(on_signal: Callable[[], None]) -> Iterator[Sequence[signal.Signals]]:
    """Call `on_signal` at each SIGINT and SIGTERM, so that the stored lines are reported before the
    command ends. Yields the signals so far.
    """
    loop = asyncio.get_running_loop()
    signals: list[signal.Signals] = []

    def handle(number: signal.Signals) -> None:
        signals.append(number)
        on_signal()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handle, number)
    try:
        yield signals
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _bytes(text: str) -> bytes:
    """Return the original bytes of a command-line argument, whatever its encoding."""
    return text.encode(errors="surrogateescape")
