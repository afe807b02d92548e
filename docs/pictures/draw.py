"""Draws `docs/pictures/order.svg` from a real run. It sends the same messages through keylane, and
through a log to which partitions are added in the usual way.

    .venv/bin/python docs/pictures/draw.py

Each circle is a message of a key, labelled with its number. It moves from the sender to its
partition, waits there, and moves on when a handler is called with it. A red ring marks a message
that was handled after a later message of its key.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from xml.sax.saxutils import escape

from run import KEYS, Journey, Run, find_out_of_order, run_scenario

SLOWDOWN = 2.0
"""How many seconds of animation show one second of the run."""
RESULT_S = 3.0
"""The number of seconds that the result stays visible before the animation restarts."""
WIDTH, HEIGHT, MIDDLE = 960, 470, 480
SENDER_X, LANE_X, LANE_END_X, HANDLER_X = 40, 120, 340, 430
LANES_Y, LANE_STEP, KEY_STEP = 92, 30, 38
RADIUS = 10
COLOURS = ("#2f6fb3", "#2e8b57", "#c8811a", "#7d4fb0", "#b0436a", "#1d8a99", "#7a6a2f", "#55606e")
TITLES = {"orders": "keylane", "plain": "a log, hash of the key modulo partitions"}


def duration_s(run: Run) -> float:
    """Return the length of the animation in seconds."""
    last = max(row.handler_calls[-1][0] for rows in run.journeys.values() for row in rows)
    return last * SLOWDOWN + RESULT_S


def animate(total_s: float, points: Sequence[tuple[float, str]], attribute: str) -> str:
    """Return a repeating animation of `attribute` through the points `(second, value)`."""
    times = [min(max(at / total_s, 0), 1) for at, _ in points]
    values = [value for _, value in points]
    if times[0] > 0:
        times, values = [0.0, *times], [values[0], *values]
    if times[-1] < 1:
        times, values = [*times, 1.0], [*values, values[-1]]
    kind = 'animateTransform type="translate"' if attribute == "transform" else "animate"
    return (
        f'<{kind} attributeName="{attribute}" dur="{total_s:.2f}s" repeatCount="indefinite" '
        f'keyTimes="{";".join(f"{at:.4f}" for at in times)}" values="{";".join(values)}"/>'
    )


def fade(total_s: float, from_s: float, to_s: float) -> str:
    """Return an animation that makes an element visible from `from_s` to `to_s`."""
    before = [(0.0, "0"), (from_s - 0.01, "0")] if from_s > 0.01 else []
    events = [*before, (max(from_s, 0), "1"), (to_s, "1"), (to_s + 0.3, "0")]
    return animate(total_s, events, "opacity")


def draw_text(x: float, y: float, words: str, *, inside: str = "", **style: object) -> str:
    """Return a text element; `font_size=14` becomes `font-size="14"`."""
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{attributes}>{escape(words)}{inside}</text>'


def draw_panel(run: Run, subject: str, left: int, total_s: float) -> Iterator[str]:
    """Yield the elements of the half of the picture that shows one subject."""
    rows = run.journeys[subject]
    lanes = {part: row for row, (part, _, _) in enumerate(run.partitions[subject])}
    late_messages = find_out_of_order(rows)
    yield draw_text(left + 16, 34, TITLES[subject], font_size=17, font_weight=600)
    yield draw_text(left + SENDER_X - 24, 62, "sent", font_size=12, fill="#667")
    yield draw_text(left + LANE_X, 62, "partitions", font_size=12, fill="#667")
    yield draw_text(left + HANDLER_X - 26, 62, "handled", font_size=12, fill="#667")
    for partition, first_s, last_s in run.partitions[subject]:
        lane_y, name = LANES_Y + LANE_STEP * lanes[partition], f"p{lanes[partition]}"
        yield (
            f'<g opacity="0">{fade(total_s, first_s * SLOWDOWN - 0.5, last_s * SLOWDOWN)}'
            f'<rect x="{left + LANE_X - 16}" y="{lane_y - 13}" width="{LANE_END_X - LANE_X + 32}" '
            f'height="26" rx="13" fill="#eef1f5"/>'
            f"{draw_text(left + LANE_X - 32, lane_y + 4, name, font_size=10, fill='#9aa')}"
            "</g>"
        )
    for place, key in enumerate(KEYS):
        key_y = LANES_Y + KEY_STEP * place + 4
        yield draw_text(left + 8, key_y, key, font_size=11, fill=COLOURS[place])
        yield draw_text(left + HANDLER_X + 18, key_y, key, font_size=11, fill=COLOURS[place])
    for row in rows:
        yield draw_message(
            row, left, LANES_Y + LANE_STEP * lanes[row.partition], late_messages, total_s
        )
    lost_count = sum(not row.handler_calls for row in rows)
    result = f"lost {lost_count} · out of order {len(late_messages)}"
    ends_s = total_s - RESULT_S
    yield draw_text(
        left + 16,
        HEIGHT - 56,
        result,
        inside=fade(total_s, ends_s, total_s),
        opacity=0,
        font_size=17,
        font_weight=600,
        fill="#b3261e" if late_messages else "#1d6b3a",
    )


def draw_message(
    row: Journey, left: int, lane_y: float, late: set[tuple[str, int]], total_s: float
) -> str:
    """Return the animated circle of a message."""
    key = KEYS.index(row.key)
    handled_s = row.handler_calls[0][0] * SLOWDOWN
    sent_s, stored_s = row.sent_s * SLOWDOWN, max(row.stored_s, row.sent_s + 0.1) * SLOWDOWN
    key_y = LANES_Y + KEY_STEP * key
    is_late = (row.key, row.number) in late
    path = [
        (sent_s, f"{left + SENDER_X} {key_y}"),
        (stored_s, f"{left + LANE_X} {lane_y}"),
        (max(handled_s, stored_s + 0.1), f"{left + LANE_END_X} {lane_y}"),
        (handled_s + 0.5, f"{left + HANDLER_X} {key_y}"),
    ]
    ring = ' stroke="#d11" stroke-width="4"' if is_late else ""
    stays_s = 2.5 if is_late else 0.2
    return (
        f'<g opacity="0">{animate(total_s, path, "transform")}'
        f"{fade(total_s, sent_s, handled_s + 0.5 + stays_s)}"
        f'<circle r="{RADIUS}" fill="{COLOURS[key]}"{ring}/>'
        f"{draw_text(0, 4, str(row.number), font_size=11, fill='#fff', text_anchor='middle')}</g>"
    )


def draw_captions(run: Run, total_s: float) -> Iterator[str]:
    """Yield a caption for each event in the cluster, visible from the time of the event."""
    ends = [at for at, _ in run.events[1:]] + [(total_s - RESULT_S) / SLOWDOWN]
    for (at_s, words), next_s in zip(run.events, ends, strict=True):
        until_s = min(next_s, at_s + 3) * SLOWDOWN - 0.4
        yield draw_text(
            WIDTH / 2,
            HEIGHT - 24,
            f"$ {words}",
            inside=fade(total_s, at_s * SLOWDOWN, until_s),
            opacity=0,
            font_size=15,
            text_anchor="middle",
            font_family="ui-monospace,monospace",
        )


def draw_picture(run: Run) -> str:
    """Return the picture as an SVG document."""
    total_s = duration_s(run)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="system-ui,sans-serif" fill="#223">'
        ),
        "<title>The same messages through keylane, and through a log that takes the hash</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff" stroke="#dde"/>',
        f'<line x1="{MIDDLE}" y1="16" x2="{MIDDLE}" y2="{HEIGHT - 50}" stroke="#dde"/>',
        *draw_panel(run, "orders", 0, total_s),
        *draw_panel(run, "plain", MIDDLE, total_s),
        *draw_captions(run, total_s),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Run the scenario and write the picture."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = asyncio.run(run_scenario(Path(folder), stack))
    late = {subject: len(find_out_of_order(rows)) for subject, rows in run.journeys.items()}
    Path(__file__).with_name("order.svg").write_text(draw_picture(run))
    sys.stderr.write(f"order.svg: out of order {late}\n")


if __name__ == "__main__":
    main()
