"""Shows the demo's progress, its verdict as a table, and its result as one JSON object."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from ...checker.findings import Findings
from ..options import OutputFormat
from ..screen import make_table, show_data
from .source import CarrierTable


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of the demo's output, with its fields in this order."""

    sent: int
    stored: int
    """Number of source rows in the log."""
    handled: int
    """Number of rows that were handled at least once."""
    redelivered: int
    """Number of messages that were delivered again after a failover."""
    lost: int
    order_violations: int
    stale_acks: int
    failover_seconds: float
    """Time in seconds from the SIGKILL until other consumers were handling all partitions of the
    killed one.
    """
    spark_rows: int
    spark_matches_csv: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result with more details for people. If `problems` is empty, the run was correct."""

    result: Result
    findings: Findings
    carriers: CarrierTable
    failover_limit_s: float
    retries: int
    """Number of batches that the producer sent again."""
    problems: tuple[str, ...]


class Screen(Protocol):
    """Shows the demo's progress."""

    def say(self, text: str) -> None:
        """Show a step."""
        ...

    def progress(self, sent: int, handled: int) -> None:
        """Show how many rows have been acked to the producer and handled by the consumers so
        far.
        """
        ...

    def time_step(self, text: str) -> AbstractContextManager[None]:
        """Show that `text` is in progress during the block, and how long it took afterwards."""
        ...

    def close(self) -> None:
        """End the progress display."""
        ...


class LineScreen:
    """Prints plain lines for a pipe or a log. Shows progress at every quarter."""

    def __init__(self, rows: int, write: Callable[[str], None]) -> None:
        self._rows = rows
        self._write = write
        self._began = time.monotonic()
        self._quarter = 0

    def say(self, text: str) -> None:
        """See `Screen`."""
        self._write(f"{time.monotonic() - self._began:6.1f} s  {text}")

    def progress(self, sent: int, handled: int) -> None:
        """See `Screen`."""
        quarter = min(4 * handled // self._rows, 4)
        if quarter > self._quarter:
            self._quarter = quarter
            # Redelivered messages must not push the count beyond the total.
            self.say(f"sent {sent:,}, handled {min(handled, self._rows):,} of {self._rows:,}")

    @contextmanager
    def time_step(self, text: str) -> Iterator[None]:
        """See `Screen`."""
        started = time.monotonic()
        self.say(f"{text} …")
        yield
        self.say(f"{text}: done, {time.monotonic() - started:.1f} s")

    def close(self) -> None:
        """See `Screen`."""


class _CountColumn(MofNCompleteColumn):
    """A column with the completed count and the total; empty if the total is unknown."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text()


class BarScreen:
    """Shows progress bars on a terminal, with the steps scrolling above them."""

    def __init__(self, rows: int, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(bar_width=None),
            _CountColumn(),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._lines = LineScreen(
            rows, lambda text: self._progress.console.print(text, highlight=False)
        )
        self._rows = rows
        self._sent = self._progress.add_task("sent", total=rows)
        self._handled = self._progress.add_task("handled", total=rows)
        self._progress.start()

    def say(self, text: str) -> None:
        """See `Screen`."""
        self._lines.say(text)

    def progress(self, sent: int, handled: int) -> None:
        """See `Screen`."""
        self._progress.update(self._sent, completed=sent)
        # Redelivered messages must not push the count beyond the total.
        self._progress.update(self._handled, completed=min(handled, self._rows))

    @contextmanager
    def time_step(self, text: str) -> Iterator[None]:
        """See `Screen`."""
        started = time.monotonic()
        task = self._progress.add_task(text, total=None)  # an indeterminate bar
        try:
            yield
        finally:
            self._progress.remove_task(task)
        self.say(f"{text}: done, {time.monotonic() - started:.1f} s")

    def close(self) -> None:
        """See `Screen`."""
        self._progress.stop()


class SilentScreen:
    """Shows nothing, for programs that only read the result."""

    def say(self, text: str) -> None:
        """See `Screen`."""

    def progress(self, sent: int, handled: int) -> None:
        """See `Screen`."""

    def time_step(self, text: str) -> AbstractContextManager[None]:
        """See `Screen`."""
        return nullcontext()

    def close(self) -> None:
        """See `Screen`."""


def open_screen(output: OutputFormat, rows: int) -> Screen:
    """Return the screen for the output format."""
    if output is not OutputFormat.TABLE:
        return SilentScreen()
    console = Console()
    if console.is_terminal:
        return BarScreen(rows, console)
    return LineScreen(rows, lambda text: print(text, flush=True))


def find_problems(
    result: Result, findings: Findings, *, rows: int, failover_limit_s: float, failed: int
) -> tuple[str, ...]:
    """Return a sentence for each failed check and each anomaly."""
    checks = (
        (result.sent == rows, f"{result.sent:,} of {rows:,} rows were sent"),
        (not failed, f"the producer gave up on {failed} messages"),
        (result.stored == rows, f"{result.stored:,} of {rows:,} rows are stored"),
        (result.handled == rows, f"{result.handled:,} of {rows:,} rows were handled"),
        (
            result.failover_seconds <= failover_limit_s,
            f"fail-over took {result.failover_seconds} s, over {failover_limit_s} s",
        ),
        (result.spark_rows == rows, f"Spark read {result.spark_rows:,} of {rows:,} rows"),
        (result.spark_matches_csv, "Spark's table differs from the one computed from the file"),
    )
    failed_checks = [text for has_passed, text in checks if not has_passed]
    failed_checks += [f"{count} x {anomaly}" for anomaly, count in findings.counts.items() if count]
    return tuple(failed_checks)


def is_same_table(actual: CarrierTable, expected: CarrierTable) -> bool:
    """Return True if both tables are equal, apart from rounding of the means."""
    if actual.keys() != expected.keys():
        return False
    for carrier, (flights, mean) in expected.items():
        found_flights, found_mean = actual[carrier]
        if found_flights != flights or (mean is None) != (found_mean is None):
            return False
        if mean is not None and found_mean is not None and abs(mean - found_mean) > 1e-9:
            return False
    return True


def show_verdict(output: OutputFormat, verdict: Verdict, *, note: str = "") -> None:
    """Print the tables and the problems, then `note` on standard error, and the result as the last
    line.
    """
    if output is OutputFormat.TABLE:
        _show_tables(verdict)
        sys.stdout.flush()
    if note:
        print(note, file=sys.stderr, flush=True)
    show_data(output, verdict.result)


def _show_tables(verdict: Verdict) -> None:
    console = Console()
    result = verdict.result
    carriers = [
        (carrier, f"{flights:,}", "-" if mean is None else f"{mean:.2f}")
        for carrier, (flights, mean) in sorted(verdict.carriers.items())
    ]
    console.print(
        make_table("Spark: by carrier", ("carrier", "flights#", "mean delay min#"), carriers)
    )
    totals = [
        ("rows sent and acked", f"{result.sent:,}"),
        ("rows stored, each once", f"{result.stored:,}"),
        ("rows handled, each at least once", f"{result.handled:,}"),
        ("handled again after a fail-over", f"{result.redelivered:,}"),
        ("lost", result.lost),
        ("out of order", result.order_violations),
        ("acks by a fenced owner", result.stale_acks),
        (
            f"fail-over, at most {verdict.failover_limit_s:.1f} s",
            f"{result.failover_seconds:.2f} s",
        ),
        ("batches the producer sent again", verdict.retries),
        ("rows read by Spark", f"{result.spark_rows:,}"),
        ("Spark's table equals the file's", "yes" if result.spark_matches_csv else "NO"),
        ("all of it took", f"{result.seconds:.1f} s"),
    ]
    console.print(make_table("the main job", ("what", "found#"), totals))
    for problem in verdict.problems:
        console.print(f"OFF: {problem}", style="bold red", markup=False, highlight=False)
    for example in verdict.findings.examples:
        console.print(f"  {example}", markup=False, highlight=False)
