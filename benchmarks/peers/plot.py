"""The plot of docs/PEERS.md: how far keylane is ahead of each peer, as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from peers.figures import FIGURES, OURS, best_of

SHOWN = (
    "sent_per_s",
    "sent_all_per_s",
    "sent_arrow_per_s",
    "handled_per_s",
    "handled_batch_per_s",
    "handled_arrow_per_s",
    "both_per_s",
    "consumer_batch_cpu_us",
    "kib_sent_mb_s",
    "kib_handled_mb_s",
    "single_p50_ms",
    "steady_5000_p50_ms",
    "steady_5000_p99_ms",
    "steady_5000_cpu_us",
    "steady_500_p50_ms",
    "steady_500_cpu_us",
    "start_s",
)
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#888888")
"""For eyes that see few colours too."""
LABELS, NUMBERS, WIDTH, RIGHT = 360, 40, 560, 30
TOP, BAR, GAP = 104, 11, 14
LEAST, MOST = 0.1, 100.0
"""What is further away stands at the edge, with its number."""
TICKS = (0.1, 0.25, 0.5, 1, 2, 4, 10, 25, 100)


def x_of(ratio: float) -> float:
    """Return the position of a ratio on the logarithmic axis."""
    share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
    return LABELS + share * WIDTH


def rows_of(result: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Label → how far keylane is ahead of each peer, for the figures that both have."""
    medians = result["medians"]
    peers = [peer for peer in medians if not peer.startswith(OURS)]
    rows = []
    for name in SHOWN:
        bests = [best_of(name, OURS, medians, [peer]) for peer in peers]
        ahead = {best.peer: best.ratio for best in bests if best}
        if ahead:
            rows.append((label_of(name), ahead))
    return rows


def label_of(name: str) -> str:
    """Return the label of a row."""
    if name == "steady_5000_p99_ms":
        return "send to handler at 5,000/s, p99"
    if name == "consumer_batch_cpu_us":
        return "consumer's processor time, batch handler"
    if name.startswith("steady") and name.endswith("cpu_us"):
        return f"processor time a message, {int(name.split('_')[1]):,}/s"
    return (
        FIGURES[name]
        .what.replace("`", "")
        .replace(" (max_records=500)", "")
        .replace(" (send_arrow)", "")
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'


def svg_of(result: Mapping[str, Any]) -> str:
    """Bars from 1, to the right where keylane is ahead, to the left where a peer is."""
    rows = rows_of(result)
    peers = list(dict.fromkeys(peer for _, ahead in rows for peer in ahead))
    colors = {peer: COLORS[number % len(COLORS)] for number, peer in enumerate(peers)}
    height = TOP + sum(len(ahead) * BAR + GAP for _, ahead in rows) + 30
    width = LABELS + WIDTH + RIGHT + 40
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}"'
            ' font-family="sans-serif" font-size="12" fill="#222222">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, "keylane by each peer", extra='font-size="16" font-weight="bold"'),
        _text(x_of(1) + 8, 76, "keylane is ahead →", extra='font-size="11"'),
        _text(x_of(1) - 8, 76, "← the peer is ahead", anchor="end", extra='font-size="11"'),
    ]
    lines += _legend(peers, colors, result)
    for tick in TICKS:
        x = x_of(tick)
        color = "#222222" if tick == 1 else "#dddddd"
        lines.append(
            f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{height - 22}" stroke="{color}"/>'
        )
        for y in (TOP - 12, height - 8):
            lines.append(_text(x, y, f"{tick:g}", anchor="middle", extra='font-size="11"'))
    y = float(TOP)
    for label, ahead in rows:
        lines.append(_text(LABELS - NUMBERS, y + len(ahead) * BAR / 2 + 4, label, anchor="end"))
        for peer, ratio in ahead.items():
            lines += _bar(y, ratio, colors[peer], peer)
            y += BAR
        y += GAP
    return "\n".join([*lines, "</svg>", ""])


def _legend(peers: list[str], colors: Mapping[str, str], result: Mapping[str, Any]) -> list[str]:
    lines, x = [], 12.0
    for peer in peers:
        lines.append(f'<rect x="{x:.1f}" y="34" width="11" height="11" fill="{colors[peer]}"/>')
        lines.append(_text(x + 16, 44, peer))
        x += 16 + 8 * len(peer) + 14
    fsynced = [peer for peer in peers if result["systems"][peer]["durability"] > 1]
    if fsynced:
        note = f"fsynced acks: keylane, {', '.join(fsynced)}"
        lines.append(_text(x + 6, 44, note, extra='font-size="11" fill="#555555"'))
    return lines


def _bar(y: float, ratio: float, color: str, peer: str) -> list[str]:
    left, right = sorted((x_of(1), x_of(ratio)))
    title = f"<title>{escape(peer)}: {ratio:.2f}</title>"
    number = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"
    small = 'font-size="9"'
    return [
        (
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(right - left, 0.5):.1f}" '
            f'height="{BAR - 1}" fill="{color}">{title}</rect>'
        ),
        _text(right + 3, y + BAR - 2.5, number, extra=small)
        if ratio >= 1
        else _text(left - 3, y + BAR - 2.5, number, anchor="end", extra=small),
    ]
