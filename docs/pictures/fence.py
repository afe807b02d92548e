"""Draws `docs/pictures/fence.svg` from a real run. A consumer that owns a partition is paused, and
its lease expires. Another consumer gets the partition with a higher token. When the first one wakes
up, its own client sees that the lease has ended, and refuses the ack. No broker is asked:
`Message.ack` waits for none.

    .venv/bin/python docs/pictures/fence.py
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draw import animate, draw_text, fade
from run import Cluster, wait_until_available

from keylane import Admin, Consumer, ConsumerSettings, LeaseLostError, Producer

SUBJECT, GROUP, KEY = "orders", "billing", b"customer-7"
MESSAGES = 3
TTL_MS = 2_000
HANDLING_S = 0.8
LEAD_S = 0.8
"""The number of seconds shown before the first message is sent."""
PAUSE_AFTER_S = 0.4
"""The number of seconds from the arrival of the message at consumer A until A is paused."""
SLOWDOWN = 2.4
"""How many seconds of animation show one second of the run."""
RESULT_S = 4.0
"""The number of seconds that the result stays visible before the animation restarts."""
WIDTH, HEIGHT = 960, 420
BOXES = {
    "A": (40, 60, 250, 100, "consumer A"),
    "B": (40, 230, 250, 100, "consumer B"),
    "broker": (400, 145, 230, 100, "broker"),
    "other broker": (400, 258, 230, 38, "broker"),
    "metaserver": (700, 60, 220, 100, "metaserver"),
}
"""The left edge, top edge, width, height and title of each program's box. A broker's name is added
from the run.
"""
COLOURS = {"A": "#2f6fb3", "B": "#2e8b57"}
GREY, RED = "#8a93a3", "#b3261e"


@dataclass(slots=True, frozen=True)
class Event:
    """Something that happened during the run: when, what, and to which program, with the observed
    facts.
    """

    at_s: float
    what: str
    who: str
    token: int = 0
    number: int = 0
    text: str = ""


async def run_scenario(folder: Path, stack: ExitStack) -> list[Event]:
    """Run the scenario once, which takes about 8 seconds."""
    cluster = Cluster(folder, stack)
    rows = folder / "rows.jsonl"
    rows.touch()
    events: list[Event] = []
    async with Admin(cluster.meta) as admin, Producer(cluster.meta) as producer:
        await wait_until_available(admin, 2)
        await admin.create_subject(SUBJECT, partitions=1)
        await admin.create_group(SUBJECT, GROUP)
        began_at = time.monotonic()

        def note(what: str, who: str, **facts: Any) -> None:
            events.append(Event(time.monotonic() - began_at, what, who, **facts))

        first = _start_consumer(cluster, stack, "A", rows)
        await _until_token(admin, 1)
        _start_consumer(cluster, stack, "B", rows)
        sessions = 1
        while sessions < 2:
            await asyncio.sleep(0.02)
            sessions = (await admin.describe_group(SUBJECT, GROUP)).sessions
        began_at = time.monotonic()
        (partition,) = (await admin.describe_subject(SUBJECT)).partitions
        for broker in (await admin.list_brokers()).brokers:
            hosts = broker.broker_group == partition.broker_group
            note("is", "broker" if hosts else "other broker", text=broker.broker_group)
        await asyncio.sleep(LEAD_S)
        for number in range(MESSAGES):
            await producer.send(SUBJECT, b"%d" % number, key=KEY)
        await _until(lambda: _has(rows, "A", "has"))
        await asyncio.sleep(PAUSE_AFTER_S)
        note("paused", "A")
        first.send_signal(signal.SIGSTOP)
        (partition,) = (await admin.describe_group(SUBJECT, GROUP)).partitions
        note("expires", "metaserver", number=partition.expires_in_ms)
        note("granted", "B", token=await _until_token(admin, partition.token + 1))
        await _until(lambda: sum(_has(rows, "B", "acked")) == MESSAGES)
        await asyncio.sleep(0.5)
        note("resumed", "A")
        first.send_signal(signal.SIGCONT)
        await _until(lambda: _has(rows, "A", "refused"))
        (partition,) = (await admin.describe_group(SUBJECT, GROUP)).partitions
        note("cursor", "broker", number=partition.offset)
    for row in _rows(rows):
        at_s = row["at"] - began_at
        facts = (row["token"], row["number"], row["text"])
        events.append(Event(at_s, row["what"], row["who"], *facts))
    return sorted(events, key=lambda event: event.at_s)


def _start_consumer(
    cluster: Cluster, stack: ExitStack, name: str, rows: Path
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, __file__, cluster.meta, name, str(rows)])
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


async def _until_token(admin: Admin, token: int) -> int:
    """Wait until the partition has an owner with at least this token, and return its token."""
    async with asyncio.timeout(60):
        found = 0
        while found < token:
            await asyncio.sleep(0.02)
            (partition,) = (await admin.describe_group(SUBJECT, GROUP)).partitions
            found = int(partition.token)
        return found


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        is_met = False
        while not is_met:
            await asyncio.sleep(0.02)
            is_met = bool(condition())


def _rows(rows: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in rows.read_text().splitlines()]


def _has(rows: Path, who: str, what: str) -> list[bool]:
    return [True for row in _rows(rows) if (row["who"], row["what"]) == (who, what)]


async def consume(meta: str, name: str, rows: Path) -> None:
    """Handle messages until the process is killed, and log what happens."""
    with rows.open("a", buffering=1) as lines:

        def write(what: str, message: Any, text: str = "") -> None:
            row = {"at": time.monotonic(), "who": name, "what": what, "text": text}
            row |= {"token": message.lease.token, "number": message.offset}
            lines.write(json.dumps(row) + "\n")

        settings = ConsumerSettings(ttl_ms=TTL_MS, name=name)
        async with Consumer(meta, subject=SUBJECT, group=GROUP, settings=settings) as consumer:
            async for message in consumer:
                write("has", message)
                await asyncio.sleep(HANDLING_S)
                try:
                    await message.ack()
                except LeaseLostError as error:
                    write("refused", message, error.message)
                else:
                    write("acked", message)


class Timeline:
    """The events of a run, with times in seconds of the animation."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.total_s = events[-1].at_s * SLOWDOWN + RESULT_S

    def at(self, who: str, what: str, number: int | None = None) -> float:
        """Return the time of the first such event, optionally for the message with this number."""
        return self.event(who, what, number).at_s * SLOWDOWN

    def event(self, who: str, what: str, number: int | None = None) -> Event:
        """Return the first such event, optionally for the message with this number."""
        return next(
            event
            for event in self._events
            if (event.who, event.what) == (who, what) and number in {None, event.number}
        )

    @property
    def lease_ends_s(self) -> float:
        """The time at which the paused consumer's lease expires, as reported by the metaserver."""
        told = self.event("metaserver", "expires")
        return (told.at_s + told.number / 1_000) * SLOWDOWN


def draw_box(line: Timeline, name: str) -> Iterator[str]:
    """Yield the box of a program."""
    left, top, width, height, title = BOXES[name]
    if title == "broker":
        title = f"broker {line.event(name, 'is').text}"
    colour = COLOURS.get(name, "#55606e")
    yield (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="10" fill="#f6f8fa" '
        f'stroke="{colour}" stroke-width="2"/>'
    )
    yield draw_text(left + 14, top + 24, title, font_size=15, font_weight=600, fill=colour)


def draw_states(
    line: Timeline, name: str, row: int, states: Sequence[tuple[float, str]], **style: object
) -> Iterator[str]:
    """Yield the successive texts in one row of a program's box."""
    left, top, *_ = BOXES[name]
    ends = [at_s for at_s, _ in states[1:]] + [line.total_s]
    for (from_s, words), to_s in zip(states, ends, strict=True):
        if words:
            yield draw_text(
                left + 14,
                top + 50 + 22 * row,
                words,
                inside=fade(line.total_s, from_s, to_s - 0.3),
                opacity=0,
                font_size=14,
                **style,
            )


def draw_link(
    line: Timeline, who: str, spans: Sequence[tuple[float, float]], words: str
) -> Iterator[str]:
    """Yield the link from a consumer to the metaserver while it sends heartbeats."""
    left, top, width, height, _ = BOXES[who]
    start = (left + width, top + (16 if who == "A" else height - 16))
    end_left, end_top, end_width, end_height, _ = BOXES["metaserver"]
    end = (
        (end_left, end_top + 16) if who == "A" else (end_left + end_width / 2, end_top + end_height)
    )
    corner = "" if who == "A" else f" H {end[0]:.0f}"
    path = f"M {start[0]} {start[1]}{corner} L {end[0]:.0f} {end[1]:.0f}"
    for from_s, to_s in spans:
        yield (
            f'<g opacity="0">{fade(line.total_s, from_s, to_s)}<path d="{path}" fill="none" '
            f'stroke="{COLOURS[who]}" stroke-width="2" stroke-dasharray="5 5">'
            '<animate attributeName="stroke-dashoffset" dur="1s" values="10;0" '
            'repeatCount="indefinite"/></path>'
            f"{draw_text(start[0] + 12, start[1] - 6, words, font_size=12, fill=COLOURS[who])}</g>"
        )


def draw_lease(line: Timeline) -> Iterator[str]:
    """Yield the lease's progress bar, which shrinks while no heartbeat arrives."""
    left, top, width, height, _ = BOXES["metaserver"]
    full, total_s = width - 28, line.total_s
    spans = (
        ("A", 0, line.at("A", "paused"), line.at("B", "granted")),
        ("B", line.at("B", "granted"), total_s, total_s),
    )
    for who, from_s, stops_s, to_s in spans:
        points = [(from_s, f"{full}"), (stops_s, f"{full}")]
        if who == "A":
            points.append((line.lease_ends_s, "0"))
        yield (
            f'<rect x="{left + 14}" y="{top + height - 16}" width="{full}" height="6" rx="3" '
            f'opacity="0" fill="{COLOURS[who]}">{animate(total_s, points, "width")}'
            f"{fade(total_s, from_s, to_s - 0.3)}</rect>"
        )


def draw_messages(line: Timeline) -> Iterator[str]:
    """Yield the messages, which travel from the broker to a consumer and stay there until acked."""
    left, top, width, *_ = BOXES["broker"]
    for number in range(MESSAGES):
        home = (left + width - 24, top + 26 + 26 * number)
        yield draw_circle(home, number, GREY)
        acked = fade(line.total_s, line.at("B", "acked", number), line.total_s)
        yield f'<g opacity="0">{acked}{draw_circle(home, number, COLOURS["B"])}</g>'
        for who in ("A", "B"):
            if who == "A" and number:
                continue
            box_left, box_top, box_width, *_ = BOXES[who]
            there = (box_left + box_width - 24, box_top + 50)
            from_s = line.at(who, "has", number)
            to_s = line.at(who, "acked", number) if who == "B" else line.at("A", "refused") + 1.2
            path = [
                (from_s - 0.4, f"{home[0]} {home[1]}"),
                (from_s, f"{there[0]} {there[1]}"),
            ]
            move = animate(line.total_s, path, "transform")
            shown = fade(line.total_s, from_s - 0.4, to_s)
            yield f'<g opacity="0">{move}{shown}{draw_circle((0, 0), number, COLOURS[who])}</g>'


def draw_circle(place: tuple[float, float], number: int, colour: str) -> str:
    """Return the circle of a message, with its number."""
    x, y = place
    words = draw_text(x, y + 4, str(number), font_size=11, fill="#fff", text_anchor="middle")
    return f'<circle cx="{x}" cy="{y}" r="10" fill="{colour}"/>{words}'


def draw_refusal(line: Timeline) -> Iterator[str]:
    """Yield the late ack, which does not leave consumer A."""
    left, top, width, height, _ = BOXES["A"]
    edge, y = left + width, top + height - 14
    from_s = line.at("A", "refused")
    yield (
        f'<g opacity="0">{fade(line.total_s, from_s, line.total_s)}'
        f'<line x1="{edge - 60}" y1="{y}" x2="{edge - 12}" y2="{y}" stroke="{RED}" '
        'stroke-width="2"/>'
        f"{draw_text(edge - 13, y + 9, '✗', font_size=26, fill=RED)}"
        f"{draw_text(edge - 90, y + 4, 'ack', font_size=13, fill=RED)}</g>"
    )


def captions_of(line: Timeline) -> list[tuple[float, str]]:
    """Return the captions below the picture, with their times."""
    first, second = line.event("A", "has"), line.event("B", "granted")
    waited_s = second.at_s - line.event("A", "paused").at_s
    late_s = line.event("A", "resumed").at_s - line.event("A", "paused").at_s
    cursor = line.event("broker", "cursor").number
    return [
        (0, f"A has the partition, with token {first.token}; B waits"),
        (line.at("A", "paused"), "kill -STOP A: it sends no heartbeats, and does not know it"),
        (
            line.at("B", "granted"),
            f"after {waited_s:.1f} s its lease has ended: B gets token {second.token}",
        ),
        (line.at("B", "acked", 0), "B handles the same messages, in order, and acks them"),
        (
            line.at("A", "resumed"),
            f"kill -CONT A, after {late_s:.1f} s: its handler acks message 0",
        ),
        (
            line.at("A", "refused") + 1.6,
            f"its own client refuses, as the lease has ended: the cursor stays at {cursor}",
        ),
    ]


def draw_picture(events: Sequence[Event]) -> str:
    """Return the picture as an SVG document."""
    line = Timeline(events)
    first, second = line.event("A", "has"), line.event("B", "granted")
    acked = [line.at("B", "acked", number) for number in range(MESSAGES)]
    wakes_s = line.at("A", "resumed")
    captions = captions_of(line)
    ends = [at_s for at_s, _ in captions[1:]] + [line.total_s]
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="system-ui,sans-serif" fill="#223">'
        ),
        "<title>A paused owner wakes up after its lease has ended, and its ack is refused</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#fff" stroke="#dde"/>',
        *(part for name in BOXES for part in draw_box(line, name)),
        *draw_link(
            line,
            "A",
            [(0, line.at("A", "paused")), (wakes_s, line.total_s)],
            "heartbeats",
        ),
        *draw_link(line, "B", [(0, line.total_s)], "heartbeats"),
        *draw_states(
            line,
            "metaserver",
            0,
            [
                (0, f"partition 1: A, token {first.token}"),
                (line.lease_ends_s, "partition 1: lease ended"),
                (line.at("B", "granted"), f"partition 1: B, token {second.token}"),
            ],
        ),
        *draw_lease(line),
        draw_text(508, 282, "has no partition", font_size=14),
        *draw_states(
            line,
            "broker",
            0,
            [
                (0, f"fence: token {first.token}"),
                (line.at("B", "granted"), f"fence: token {second.token}"),
            ],
        ),
        *draw_states(
            line,
            "broker",
            1,
            [(0, "cursor: 0"), *((at_s, f"cursor: {n + 1}") for n, at_s in enumerate(acked))],
        ),
        *draw_states(
            line,
            "A",
            0,
            [
                (0, f"has the partition, token {first.token}"),
                (line.at("A", "has"), f"handles message 0, token {first.token}"),
                (line.at("A", "paused"), "paused"),
                (wakes_s, f"acks message 0, token {first.token}"),
            ],
        ),
        *draw_states(line, "A", 1, [(line.at("A", "refused"), "its client refuses")], fill=RED),
        *draw_states(
            line,
            "B",
            0,
            [
                (0, "waits for a partition"),
                *(
                    (line.at("B", "has", n), f"handles message {n}, token {second.token}")
                    for n in range(MESSAGES)
                ),
                (acked[-1], f"has acked {MESSAGES} messages"),
            ],
        ),
        *draw_messages(line),
        *draw_refusal(line),
        *(
            draw_text(
                WIDTH / 2,
                HEIGHT - 28,
                words,
                inside=fade(line.total_s, from_s, to_s - 0.3),
                opacity=0,
                font_size=17,
                font_weight=600,
                text_anchor="middle",
            )
            for (from_s, words), to_s in zip(captions, ends, strict=True)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Run the scenario and write the picture."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        events = asyncio.run(run_scenario(Path(folder), stack))
    Path(__file__).with_name("fence.svg").write_text(draw_picture(events))
    sys.stderr.write("".join(f"{event}\n" for event in events))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        asyncio.run(consume(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    else:
        main()
