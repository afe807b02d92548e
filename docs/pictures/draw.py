"""Draws `docs/pictures/order.svg` from a real run: the same messages through keylane, and through
a log whose partitions were added in the usual way.

    .venv/bin/python docs/pictures/draw.py

Each circle is one message of a key, with its number. It moves from the program that sends it to
its partition, waits there, and moves on when a handler is called with it. Red ones were handled
after a later message of their key.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from xml.sax.saxutils import escape

from run import KEYS, Journey, Run, out_of_order, take_run

SLOWER = 2.0
"""Seconds of the picture for a second of the run."""
REST_S = 3.0
"""Seconds for which the result is shown before the picture starts again."""
WIDTH, HEIGHT, MIDDLE = 960, 470, 480
SENDER_X, LANE_X, LANE_END_X, HANDLER_X = 40, 120, 340, 430
LANES_Y, LANE_STEP, KEY_STEP = 92, 30, 38
RADIUS = 10
COLOURS = ("#2f6fb3", "#2e8b57", "#c8811a", "#7d4fb0", "#b0436a", "#1d8a99", "#7a6a2f", "#55606e")
TITLES = {"orders": "keylane", "plain": "a log, hash of the key modulo partitions"}


def seconds_of(run: Run) -> float:
    """Return the length of the picture."""
    last = max(row.handled[-1][0] for rows in run.journeys.values() for row in rows)
    return last * SLOWER + REST_S


def stepped(total_s: float, points: Sequence[tuple[float, str]], attribute: str) -> str:
    """Return an animation of `attribute` through `(second of the picture, value)`, again and
    again.
    """
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


def shown(total_s: float, from_s: float, to_s: float) -> str:
    """Return the animation of something that is seen for a time only."""
    before = [(0.0, "0"), (from_s - 0.01, "0")] if from_s > 0.01 else []
    moments = [*before, (max(from_s, 0), "1"), (to_s, "1"), (to_s + 0.3, "0")]
    return stepped(total_s, moments, "opacity")


def text(x: float, y: float, words: str, *, inside: str = "", **style: object) -> str:
    """Return a text element; `font_size=14` becomes `font-size="14"`."""
    looks = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{looks}>{escape(words)}{inside}</text>'


def panel(run: Run, subject: str, left: int, total_s: float) -> Iterator[str]:
    """Yield the elements of one half of the picture."""
    rows = run.journeys[subject]
    lanes = {part: row for row, (part, _, _) in enumerate(run.partitions[subject])}
    late = out_of_order(rows)
    yield text(left + 16, 34, TITLES[subject], font_size=17, font_weight=600)
    yield text(left + SENDER_X - 24, 62, "sent", font_size=12, fill="#667")
    yield text(left + LANE_X, 62, "partitions", font_size=12, fill="#667")
    yield text(left + HANDLER_X - 26, 62, "handled", font_size=12, fill="#667")
    for partition, first_s, last_s in run.partitions[subject]:
        y = LANES_Y + LANE_STEP * lanes[partition]
        yield (
            f'<g opacity="0">{shown(total_s, first_s * SLOWER - 0.5, last_s * SLOWER)}'
            f'<rect x="{left + LANE_X - 16}" y="{y - 13}" width="{LANE_END_X - LANE_X + 32}" '
            f'height="26" rx="13" fill="#eef1f5"/>'
            f"{text(left + LANE_X - 32, y + 4, f'p{lanes[partition]}', font_size=10, fill='#9aa')}"
            "</g>"
        )
    for place, key in enumerate(KEYS):
        y = LANES_Y + KEY_STEP * place + 4
        yield text(left + 8, y, key, font_size=11, fill=COLOURS[place])
        yield text(left + HANDLER_X + 18, y, key, font_size=11, fill=COLOURS[place])
    for row in rows:
        yield message(row, left, LANES_Y + LANE_STEP * lanes[row.partition], late, total_s)
    result = f"lost {len(rows) - sum(bool(row.handled) for row in rows)} · out of order {len(late)}"
    ends_s = total_s - REST_S
    yield text(
        left + 16, HEIGHT - 56, result, inside=shown(total_s, ends_s, total_s), opacity=0,
        font_size=17, font_weight=600, fill="#b3261e" if late else "#1d6b3a",
    )  # fmt: skip


def message(
    row: Journey, left: int, lane_y: float, late: set[tuple[str, int]], total_s: float
) -> str:
    """Return one message on its way."""
    key = KEYS.index(row.key)
    handled_s = row.handled[0][0] * SLOWER
    sent_s, stored_s = row.sent_s * SLOWER, max(row.stored_s, row.sent_s + 0.1) * SLOWER
    home_y = LANES_Y + KEY_STEP * key
    is_late = (row.key, row.number) in late
    way = [
        (sent_s, f"{left + SENDER_X} {home_y}"),
        (stored_s, f"{left + LANE_X} {lane_y}"),
        (max(handled_s, stored_s + 0.1), f"{left + LANE_END_X} {lane_y}"),
        (handled_s + 0.5, f"{left + HANDLER_X} {home_y}"),
    ]
    ring = ' stroke="#d11" stroke-width="4"' if is_late else ""
    stays_s = 2.5 if is_late else 0.2
    return (
        f'<g opacity="0">{stepped(total_s, way, "transform")}'
        f"{shown(total_s, sent_s, handled_s + 0.5 + stays_s)}"
        f'<circle r="{RADIUS}" fill="{COLOURS[key]}"{ring}/>'
        f"{text(0, 4, str(row.number), font_size=11, fill='#fff', text_anchor='middle')}</g>"
    )


def captions(run: Run, total_s: float) -> Iterator[str]:
    """Yield what was done to the cluster, each when it was done."""
    ends = [at for at, _ in run.moments[1:]] + [(total_s - REST_S) / SLOWER]
    for (at_s, words), next_s in zip(run.moments, ends, strict=True):
        until_s = min(next_s, at_s + 3) * SLOWER - 0.4
        yield text(
            WIDTH / 2, HEIGHT - 24, f"$ {words}", inside=shown(total_s, at_s * SLOWER, until_s),
            opacity=0, font_size=15, text_anchor="middle", font_family="ui-monospace,monospace",
        )  # fmt: skip


def drawn(run: Run) -> str:
    """Return the picture."""
    total_s = seconds_of(run)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="system-ui,sans-serif" fill="#223">'
        ),
        "<title>The same messages through keylane, and through a log that takes the hash</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff" stroke="#dde"/>',
        f'<line x1="{MIDDLE}" y1="16" x2="{MIDDLE}" y2="{HEIGHT - 50}" stroke="#dde"/>',
        *panel(run, "orders", 0, total_s),
        *panel(run, "plain", MIDDLE, total_s),
        *captions(run, total_s),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Take a run, and write the picture."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = asyncio.run(take_run(Path(folder), stack))
    late = {subject: len(out_of_order(rows)) for subject, rows in run.journeys.items()}
    Path(__file__).with_name("order.svg").write_text(drawn(run))
    sys.stderr.write(f"order.svg: out of order {late}\n")


if __name__ == "__main__":
    main()
