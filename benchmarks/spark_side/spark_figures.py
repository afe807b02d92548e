"""The figures of `make bench-spark`: their aims, medians, and the table of docs/PERFORMANCE.md."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """What is measured, and what it should reach; an aim is a least value, or a greatest if
    `most`.
    """

    what: str
    aim: float | None = None
    most: bool = False

    def reached(self, value: float) -> bool:
        """Return True if the value reaches the aim."""
        return self.aim is None or (value <= self.aim if self.most else value >= self.aim)

    @property
    def aim_text(self) -> str:
        """Return the aim as text."""
        return "" if self.aim is None else f"{'≤' if self.most else '≥'} {self.aim:,g}"


FIGURES = {
    "scan_rows_per_second": Figure("scan, rows a second"),
    "scan_vs_parquet": Figure("scan by a Parquet scan", 0.6),
    "ranges_vs_parquet": Figure("`read_ranges` by a Parquet scan", 0.75),
    "scan_vs_kafka": Figure("scan by Spark's Kafka connector, its defaults", 2.5),
    "scan_vs_kafka_tuned": Figure("scan by the connector, tuned", 1.5),
    "agg_vs_parquet": Figure("groupBy with aggregates over key, value and time, by Parquet", 0.8),
    "scan_vs_tuples": Figure("scan by a data source of Python tuples", 6),
    "fused_rows_per_second": Figure("counted in the worker, rows a second", 4_500_000),
    "write_rows_per_second": Figure("written, rows a second", 500_000),
    "small_partitions_ratio": Figure("1,000 partitions by 4, of as many rows", 3, most=True),
    "live_idle_p99_ms": Figure("live messages without a job, p99 in ms"),
    "live_p99_ratio": Figure("live p99 beside a scan, by that without a job", 2, most=True),
    "live_parquet_p99_ratio": Figure("live p99 beside a Parquet scan, by that without a job"),
    "cold_first_query_s": Figure("the first query of a session, s"),
    "broker_peak_mb": Figure("broker, peak memory, MB"),
}


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds that have it."""
    names = [name for name in FIGURES if any(name in figures for figures in rounds)]
    return {
        name: statistics.median(figures[name] for figures in rounds if name in figures)
        for name in names
    }


def medians_of_cpu(
    rounds: Sequence[Mapping[str, Mapping[str, float]]],
) -> dict[str, dict[str, float]]:
    """Return the median processor time per row in µs, by job and kind of process."""
    return {
        job: {
            kind: round(statistics.median(each[job][kind] for each in rounds), 3) for kind in kinds
        }
        for job, kinds in rounds[0].items()
    }


def cpu_lines(cpu_us: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each job, with its total processor time per row in µs, and that of each
    kind of process.
    """
    return [
        f"{job:12} {sum(kinds.values()):6.2f} µs a row: "
        + ", ".join(f"{kind} {value:.2f}" for kind, value in kinds.items())
        for job, kinds in cpu_us.items()
    ]


def lines_of(figures: Mapping[str, float], not_taken: Mapping[str, str]) -> list[str]:
    """Return a line for each figure with its aim; mark the figures that were not measured."""
    lines = []
    for name, figure in FIGURES.items():
        if name in figures:
            value = figures[name]
            verdict = "" if figure.aim is None or figure.reached(value) else "  NOT REACHED"
            lines.append(f"{name:24} {value:14,.2f}  {figure.aim_text:12}{verdict}")
        elif name in not_taken:
            lines.append(f"{name:24} NOT TAKEN: {not_taken[name]}")
    return lines


def table_of(figures: Mapping[str, float], not_taken: Mapping[str, str]) -> str:
    """Return the table for docs/PERFORMANCE.md."""
    rows = ["| what | key | figure | reach |", "| --- | --- | --- | --- |"]
    for name, figure in FIGURES.items():
        if name in figures:
            value = figures[name]
            shown = f"{value:,.0f}" if value >= 1_000 else f"{value:.2f}"
            missed = "" if figure.reached(value) else ": not reached"
            rows.append(f"| {figure.what} | `{name}` | {shown} | {figure.aim_text}{missed} |")
        elif name in not_taken:
            rows.append(f"| {figure.what} | `{name}` | not taken | {figure.aim_text} |")
    return "\n".join(rows)
