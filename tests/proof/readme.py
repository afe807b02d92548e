"""Writes the figures of README's section "Why you can believe it", in both languages, out of
docs/proof.jsonl and docs/PEERS.md. Pure but for the paths.

    PYTHONPATH=tests .venv/bin/python -m proof.readme
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from proof.document import SHARES, Totals, totals_of

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "docs" / "PEERS.md"
SECTIONS = {"README.md": "## Why you can believe it", "README.zh.md": "## 为什么可信"}
"""The heading above the figures of each page."""
RATE = "sent, every receipt awaited, a second"
LATENCY = "a single send to its ack, p50, ms"
PEER = "kafka"


def figures_of(peers: str, what: str) -> tuple[float, float]:
    """
    Return keylane's and Kafka's figure of a row of docs/PEERS.md, on the fastest machine.

    Raises:
        AssertionError: another machine's run says otherwise, so README cannot claim it.
    """
    headers = re.findall(r"^\| what \|.*$", peers, re.MULTILINE)
    rows = re.findall(rf"^\| {re.escape(what)} \|.*$", peers, re.MULTILINE)
    figures = []
    for header, row in zip(headers, rows, strict=True):
        cells = dict(zip(_cells(header), _cells(row), strict=True))
        ours, theirs = (float(cells[name].replace(",", "")) for name in ("keylane", PEER))
        figures.append((ours, theirs))
    assert len({ours > theirs for ours, theirs in figures}) == 1, f"the machines differ: {what}"
    return figures[0]


def lines_of(page: str, shares: str, peers: str) -> list[str]:
    """Return the lines of one of the pages."""
    totals = totals_of([json.loads(line) for line in shares.splitlines()])
    rates, latencies = figures_of(peers, RATE), figures_of(peers, LATENCY)
    return (_chinese if page == "README.zh.md" else _english)(totals, rates, latencies)


def with_lines(page: str, text: str, lines: list[str]) -> str:
    """Return the text of a page with these lines below its heading."""
    before, heading, after = text.partition(f"{SECTIONS[page]}\n\n")
    assert heading, f"{page} has no section {SECTIONS[page]!r}"
    rest = re.sub(r"\A(?:\* .*\n)*", "", after)
    return before + heading + "".join(f"{line}\n" for line in lines) + rest


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("| ").split("|")]


def _english(
    totals: Totals, rates: tuple[float, float], latencies: tuple[float, float]
) -> list[str]:
    faster, sooner = rates[0] > rates[1], latencies[0] < latencies[1]
    return [
        (
            f"* Simulation: {totals.faults:,} faults in {totals.seeds:,} simulated runs and in runs of "
            f"real programs; {_none_or(totals.bad, 'no')} violation{'s' * (totals.bad != 1)}."
        ),
        (
            f"* Real processes: {totals.acked:,} acked messages, "
            f"{_none_or(totals.wrong)} of them lost or out of order. Two independent programs judge "
            "the history of each run."
        ),
        (
            f"* Tests of the tests: we broke our own code on purpose in {totals.bugs:,} ways, one at a "
            f"time (mutants). The tests noticed {totals.caught:,} of them."
        ),
        (
            f"* {'Faster' if faster else 'Slower'} than Kafka with every receipt awaited: "
            f"{rates[0] / 1e6:.2f} M/s against {rates[1] / 1e6:.2f} M/s; each receipt means fsync, "
            "Kafka's means page cache."
        ),
        (
            f"* {'Faster' if sooner else 'Slower'} than Kafka for one send to its ack: "
            f"{latencies[0]:.2f} ms against {latencies[1]:.2f} ms (median)."
        ),
    ]


def _chinese(
    totals: Totals, rates: tuple[float, float], latencies: tuple[float, float]
) -> list[str]:
    faster, sooner = rates[0] > rates[1], latencies[0] < latencies[1]
    return [
        (
            f"* 仿真：{totals.seeds:,} 次仿真运行加上真实程序的运行，共 {totals.faults:,} 个故障，"
            f"{totals.bad:,} 次违规。"
        ),
        (
            f"* 真实进程：{totals.acked:,} 条已确认的消息，{totals.wrong:,} 条丢失或乱序。"
            "每次运行的历史由两个互相独立的程序判定。"
        ),
        (
            f"* 检验测试本身：我们故意用 {totals.bugs:,} 种方式改坏自己的代码，每次一种（变异体）；"
            f"测试发现了其中 {totals.caught:,} 种。"
        ),
        (
            f"* 逐条等待回执的发送比 Kafka {'快' if faster else '慢'}：{rates[0] / 1e6:.2f} M/s 对 "
            f"{rates[1] / 1e6:.2f} M/s；keylane 的回执表示已经 fsync，Kafka 的只表示在页缓存里。"
        ),
        (
            f"* 单条发送到确认比 Kafka {'快' if sooner else '慢'}：{latencies[0]:.2f} ms 对 "
            f"{latencies[1]:.2f} ms（中位数）。"
        ),
    ]


def _none_or(count: int, none: str = "none") -> str:
    return f"{count:,}" if count else none


def main() -> None:
    """Write the lines into both pages."""
    shares, peers = SHARES.read_text(encoding="utf-8"), PEERS.read_text(encoding="utf-8")
    for page in SECTIONS:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        path.write_text(with_lines(page, text, lines_of(page, shares, peers)), encoding="utf-8")


if __name__ == "__main__":
    main()
