"""`keylane produce`: send one message, or one for each line of standard input, and tell what is stored.

line ─▶ message ─▶ future ─▶ receipt        after a failed line no more is read; lines that were sent are waited for
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

import msgspec

from ...producer import Producer, SendFuture
from ...protocol.errors import ConfigError, Fate, InputError, InputUnfinishedError, KeylaneError
from ...protocol.ids import check_name
from ...protocol.message import Receipt
from ...protocol.text import counted
from ..options import WAIT_S, OutputFormat
from ..screen import show_error, show_json, show_line
from .lines import (
    LineFormat,
    numbered_lines,
    parse_line,
    parse_ranges,
    parse_separator,
    show_ranges,
)

FUTURES_AHEAD = 10_000
INTERRUPT_FLUSH_S = 5.0
"""After an interrupt, what is queued has this long to be stored."""


class _Tally:
    """Receipts, shown as they come (JSON) or counted at the end (table)."""

    def __init__(self, form: OutputFormat) -> None:
        self._json = form is OutputFormat.JSON
        self._first: Receipt | None = None
        self.count = 0
        self._partitions: set[int] = set()

    def add(self, receipt: Receipt, line: int | None = None) -> None:
        self.count += 1
        self._first = self._first or receipt
        self._partitions.add(receipt.partition_id)
        if self._json:
            where = {} if line is None else {"line": line}
            show_json(where | msgspec.structs.asdict(receipt))

    def close(self) -> None:
        if self._json:
            return
        if self.count == 1 and self._first is not None:
            receipt = self._first
            reordered = ", reordered" if receipt.reordered else ""
            show_line(
                f"stored at offset {receipt.offset} of partition {receipt.partition_id} "
                f"({receipt.durable}{reordered})"
            )
        else:
            partitions = ", ".join(map(str, sorted(self._partitions))) or "none"
            show_line(f"{counted(self.count, 'message')} stored; partitions: {partitions}")


async def produce(
    meta: str,
    form: OutputFormat,
    *,
    subject: str,
    key: str,
    value: str | None,
    separator: str | None,
    as_json: bool,
    keyless: bool,
    lines: str | None,
) -> None:
    """
    Send `value`, or each line of standard input, and show where it is stored.

    Raises:
        InputUnfinishedError: not all lines are stored; it says which are not.
        KeylaneError: `value` is not stored, or an option is impossible.
    """
    check_name("subject", subject)
    if value is not None and (separator is not None or as_json or lines is not None):
        raise ConfigError("--key-separator, --json and --lines are for lines, not for VALUE")
    if as_json and separator is not None:
        raise ConfigError("a line is either JSON or has a --key-separator")
    if key and (separator is not None or as_json):
        raise ConfigError("the key is in each line: leave --key out")
    if keyless and separator is None:
        raise ConfigError("--keyless is for lines with a --key-separator")
    line_format = LineFormat(
        separator=None if separator is None else parse_separator(separator),
        as_json=as_json,
        keyless=keyless,
    )
    ranges = [] if lines is None else parse_ranges(lines)
    tally = _Tally(form)
    async with Producer(meta, wait_s=WAIT_S.get()) as producer:
        if value is not None:
            tally.add(await producer.send(subject, _bytes(value), key=_bytes(key)))
        else:
            sending = _Lines(producer, tally, subject, _bytes(key), line_format)
            await sending.run(ranges, form)
        tally.close()


class _Lines:
    """Sends the lines of standard input and records which are stored."""

    def __init__(
        self, producer: Producer, tally: _Tally, subject: str, key: bytes, form: LineFormat
    ) -> None:
        self._producer = producer
        self._tally = tally
        self._subject = subject
        self._key = key
        self._form = form
        self._sent: asyncio.Queue[tuple[int, SendFuture] | None] = asyncio.Queue()
        """Lines whose receipts are waited for, in their order; None behind the last."""
        self._ahead = asyncio.Semaphore(FUTURES_AHEAD)
        self._next_line = 1
        """The first line that was not sent."""
        self._failed: list[int] = []
        """Lines that were sent and are not known to be stored."""
        self._cause: KeylaneError | None = None
        """Of the first line that failed."""
        self._doubtful = False
        """Some failed line may be stored."""

    async def run(self, ranges: Sequence[tuple[int, int | None]], form: OutputFormat) -> None:
        """
        Send the lines in `ranges` (all, if it is empty) until one fails.

        Raises:
            InputUnfinishedError: a line failed; what was sent before is settled.
        """
        self._next_line = ranges[0][0] if ranges else 1
        reader = asyncio.create_task(self._send(ranges), name="read lines")
        settler = asyncio.create_task(self._settle(reader), name="take receipts")
        try:
            with _cancelled_by_sigterm():
                await asyncio.wait([reader, settler], return_when=asyncio.FIRST_COMPLETED)
                if settler.done():  # it failed, as when standard output is closed
                    reader.cancel()
                await settler
        except asyncio.CancelledError:
            await self._abort(reader, settler)
            show_error(self._unfinished("interrupted", ranges), form)
            raise
        if self._cause is not None:
            raise self._unfinished(self._cause.message, ranges) from self._cause
        await reader  # raises a fault of our own

    async def _send(self, ranges: Sequence[tuple[int, int | None]]) -> None:
        try:
            async for number, line in numbered_lines(sys.stdin.buffer, ranges):
                self._next_line = number
                message = parse_line(line, self._form)
                await self._producer.drain()
                await self._ahead.acquire()
                future = self._producer.send(
                    self._subject,
                    message.value,
                    key=message.key or self._key,
                    properties=message.properties,
                )
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
        """Take the receipts in the order of the lines; nothing more is read after a failure."""
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
        """Let what is queued be stored within INTERRUPT_FLUSH_S, give the rest up, and settle all of it."""
        reader.cancel()
        with contextlib.suppress(TimeoutError, KeylaneError):
            async with asyncio.timeout(INTERRUPT_FLUSH_S):
                await self._producer.flush()
        await self._producer.close(flush=False)
        await asyncio.wait([reader, settler])

    def _unfinished(
        self, cause: str, ranges: Sequence[tuple[int, int | None]]
    ) -> InputUnfinishedError:
        failed = sorted(self._failed)
        rest = [
            (max(start, self._next_line), end)
            for start, end in ranges or [(1, None)]
            if end is None or end > self._next_line
        ]
        shown = show_ranges(_joined([*((number, number + 1) for number in failed), *rest]))
        text = f"line {failed[0]}: {cause}" if failed else cause
        doubt = "; some of them may be stored" if self._doubtful else ""
        error = InputUnfinishedError(
            f"{text}. Lines stored: {self._tally.count}; lines not stored: {shown}{doubt}",
            stored=self._tally.count,
            line=failed[0] if failed else self._next_line,
            lines=shown,
        )
        if not self._tally.count and not self._doubtful:
            error.fate = Fate.NOT_DONE
        return error


def _joined(ranges: Sequence[tuple[int, int | None]]) -> list[tuple[int, int | None]]:
    """Ascending ranges, adjacent ones joined."""
    joined: list[tuple[int, int | None]] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


@contextlib.contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the input as SIGINT does: the stored lines are reported."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _bytes(text: str) -> bytes:
    """What the user typed, byte for byte, whatever its encoding."""
    return text.encode(errors="surrogateescape")
