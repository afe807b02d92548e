"""Writes the figures of README's section "Why you can believe it", in both languages, out of
docs/proof.jsonl and docs/PEERS.md. Pure but for the paths.

    PYTHONPATH=tests .venv/bin/python -m proof.readme
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from proof.document import SHARES, Totals, all_or_count, totals_of

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
        if PEER not in cells:
            continue  # a table of systems with copies
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
            f"* Faults: we caused {totals.faults:,}, in {totals.seeds:,} simulated runs and in runs of "
            f"real programs; {_none_or(totals.bad)} of the simulated runs ended with a violation."
        ),
        (
            f"* Real programs: {totals.acked:,} acked messages, "
            f"{_none_or(totals.wrong)} of them lost or out of order. Two programs judge each of these "
            "runs: keylane's checker, which judges the simulated runs too, and one that shares no "
            "code with keylane and reads what is left on the disks."
        ),
        (
            f"* Tests of the tests: we broke our own code on purpose in {totals.bugs:,} ways, one at a "
            f"time (mutants). The tests noticed {all_or_count(totals.caught, totals.bugs)} of them."
        ),
        (
            f"* {'Faster' if faster else 'Slower'} than Kafka with many sends in flight, each of "
            f"which gets a receipt: {rates[0] / 1e6:.2f} million messages a second against "
            f"{rates[1] / 1e6:.2f} million. keylane's receipt means fsync, Kafka's means page cache."
        ),
        (
            f"* {'Faster' if sooner else 'Slower'} than Kafka with one send at a time: "
            f"{latencies[0]:.2f} ms from a send to its receipt against {latencies[1]:.2f} ms (median)."
        ),
    ]


def _chinese(
    totals: Totals, rates: tuple[float, float], latencies: tuple[float, float]
) -> list[str]:
    faster, sooner = rates[0] > rates[1], latencies[0] < latencies[1]
    return [
        (
            f"* 故障：在 {totals.seeds:,} 次仿真运行和真实程序的运行里，我们一共制造了 "
            f"{totals.faults:,} 个故障；{totals.bad:,} 次仿真运行以违规告终。"
        ),
        (
            f"* 真实程序：{totals.acked:,} 条已确认的消息，{totals.wrong:,} 条丢失或乱序。"
            "这些运行每次都由两个程序判定：keylane 的检查器（也判定仿真运行），"
            "以及一个与 keylane 没有共同代码、只看磁盘上剩下的内容的程序。"
        ),
        (
            f"* 检验测试本身：我们故意用 {totals.bugs:,} 种方式改坏自己的代码，每次一种（变异体）；"
            f"测试发现了{_all_or_count_in_chinese(totals)}。"
        ),
        (
            f"* 同时发送许多消息、每条都有回执时，比 Kafka {'快' if faster else '慢'}："
            f"每秒 {rates[0] / 1e6:.2f} 百万条对 {rates[1] / 1e6:.2f} 百万条；"
            "keylane 的回执表示已经 fsync，Kafka 的只表示在页缓存里。"
        ),
        (
            f"* 一次只发送一条时，比 Kafka {'快' if sooner else '慢'}：从发送到回执 "
            f"{latencies[0]:.2f} ms 对 {latencies[1]:.2f} ms（中位数）。"
        ),
    ]


def _all_or_count_in_chinese(totals: Totals) -> str:
    if totals.caught == totals.bugs:
        return f"全部 {totals.bugs:,} 种"
    return f"其中 {totals.caught:,} 种"


def _none_or(count: int) -> str:
    return f"{count:,}" if count else "none"


def main() -> None:
    """Write the lines into both pages."""
    shares, peers = SHARES.read_text(encoding="utf-8"), PEERS.read_text(encoding="utf-8")
    for page in SECTIONS:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        path.write_text(with_lines(page, text, lines_of(page, shares, peers)), encoding="utf-8")


if __name__ == "__main__":
    main()
