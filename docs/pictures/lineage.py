"""Draws `docs/pictures/lineage.svg` from a run in virtual time. A subject is resized, one of its
partitions moves, and it is resized again, while messages are sent and handled.

    .venv/bin/python docs/pictures/lineage.py

Each bar is a partition, as wide as its range of logical partitions. Each circle is a message of one
of two keys, in the partition in which it is stored, labelled with its number within the key.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draw import draw_text

from keylane import Admin, Consumer, Message, Producer
from keylane.admin import Partition, PartitionHistory
from keylane.protocol.limits import LOGICAL_PARTITIONS
from keylane.protocol.routing import logical_partition
from keylane.testing import VirtualCluster, run

SUBJECT, GROUP = "orders", "billing"
KEYS = {"customer-2": "#2e8b57", "customer-7": "#7d4fb0"}
"""The keys that are shown, and their colours."""
CUSTOMERS = 60
ROUNDS = 2
"""The number of messages of each customer before the next command."""
COMMANDS = (
    ("subject create orders", "--partitions 4"),
    ("subject resize orders", "--partitions 6"),
    ("subject move 8", "--broker-group g1"),
    ("subject resize orders", "--partitions 3"),
)
WIDTH, ROW, TOP, LEFT, RIGHT = 960, 100, 58, 190, 944
BROKER_COLOURS = {"g0": "#dce9f7", "g1": "#f8e8d0"}


@dataclass(slots=True)
class Lineage:
    """The result of a run: after each command, the subject's partitions; and where the messages of
    `KEYS` were stored and in which order they were handled.
    """

    histories: list[list[PartitionHistory]] = field(default_factory=list)
    stored: list[tuple[int, str, int, int]] = field(default_factory=list)
    """The command before it, the key, the number and the partition of each message."""
    handled: dict[str, list[int]] = field(default_factory=lambda: {key: [] for key in KEYS})

    def first_row(self, partition_id: int) -> int:
        """Return the command that made a partition."""
        return next(
            row
            for row, history in enumerate(self.histories)
            if any(each.partition.partition_id == partition_id for each in history)
        )

    def end_row(self, partition_id: int) -> int:
        """Return the command that sealed a partition; `len(COMMANDS)` for an open one."""
        children = [
            self.first_row(each.partition.partition_id)
            for each in self.histories[-1]
            if partition_id in each.partition.parents
        ]
        return min(children, default=len(COMMANDS))


async def run_story(cluster: VirtualCluster) -> Lineage:
    """Make the subject, change it, and send messages after each command."""
    lineage = Lineage()
    async with Admin(cluster.address) as admin, Producer(cluster.address) as producer:
        await admin.create_subject(SUBJECT, partitions=4)
        handling = asyncio.create_task(_handle(cluster, lineage))
        for row in range(len(COMMANDS)):
            if row == 1:
                await admin.wait(await admin.resize(SUBJECT, 6))
            elif row == 2:
                await admin.wait(await admin.move([8], to="g1"))
            elif row == 3:
                await admin.wait(await admin.resize(SUBJECT, 3))
            lineage.histories.append((await admin.history(SUBJECT)).partitions)
            for number in range(row * ROUNDS + 1, (row + 1) * ROUNDS + 1):
                for customer in range(1, CUSTOMERS + 1):
                    key = f"customer-{customer}"
                    receipt = await producer.send(SUBJECT, b"%d" % number, key=key)
                    if key in KEYS:
                        lineage.stored.append((row, key, number, receipt.partition_id))
        sent = len(COMMANDS) * ROUNDS
        await cluster.until(lambda: all(len(lineage.handled[key]) == sent for key in KEYS))
        lineage.histories[-1] = (await admin.history(SUBJECT)).partitions
        handling.cancel()
    return lineage


async def _handle(cluster: VirtualCluster, lineage: Lineage) -> None:
    async def handle(message: Message) -> None:
        if message.key_text in KEYS:
            lineage.handled[message.key_text].append(int(message.value))

    await Consumer(cluster.address, subject=SUBJECT, group=GROUP, handler=handle).run()


def x_of(logical: float) -> float:
    """Return the place of a logical partition."""
    return LEFT + (RIGHT - LEFT) * logical / LOGICAL_PARTITIONS


def draw_rows() -> Iterator[str]:
    """Yield the commands, and a line above each."""
    for row, command in enumerate(COMMANDS):
        y = TOP + ROW * row
        yield f'<line x1="16" y1="{y}" x2="{RIGHT}" y2="{y}" stroke="#dde"/>'
        for line, words in enumerate((f"$ keylane {command[0]}", f"  {command[1]}")):
            yield draw_text(
                16, y + 26 + 16 * line, words, font_size=10, font_family="ui-monospace,monospace"
            )


def draw_partition(lineage: Lineage, each: PartitionHistory) -> Iterator[str]:
    """Yield the bar of a partition, from the command that made it to the one that sealed it."""
    partition: Partition = each.partition
    left, right = x_of(partition.range_start), x_of(partition.range_end)
    top = TOP + ROW * lineage.first_row(partition.partition_id)
    bottom = TOP + ROW * lineage.end_row(partition.partition_id)
    colour = BROKER_COLOURS[partition.broker_group]
    yield (
        f'<rect x="{left + 2:.1f}" y="{top + 5}" width="{right - left - 4:.1f}" '
        f'height="{bottom - top - 10}" rx="6" fill="{colour}"/>'
    )
    name = partition.name.rpartition(".")[2]
    yield draw_text(
        left + 8, top + 20, f"{name} on {partition.broker_group}", font_size=11, font_weight=600
    )
    is_open = each.end_offset is None
    state = "open" if is_open else f"ends at {each.end_offset}"
    yield draw_text(left + 8, top + 34, state, font_size=10, fill="#1d6b3a" if is_open else "#667")


def draw_key(lineage: Lineage, key: str) -> Iterator[str]:
    """Yield the messages of a key, on a line at its logical partition."""
    x = x_of(logical_partition(key.encode()) + 0.5)
    colour = KEYS[key]
    yield draw_text(x, TOP - 12, key, font_size=12, fill=colour, text_anchor="middle")
    for row in range(len(COMMANDS)):
        y = TOP + ROW * row
        yield (
            f'<line x1="{x:.1f}" y1="{y + 40}" x2="{x:.1f}" y2="{y + ROW}" stroke="{colour}" '
            'stroke-dasharray="2 4"/>'
        )
    for row, its_key, number, _ in lineage.stored:
        if its_key == key:
            y = TOP + ROW * row + 54 + 26 * ((number - 1) % ROUNDS)
            yield f'<circle cx="{x:.1f}" cy="{y}" r="10" fill="{colour}"/>'
            yield draw_text(x, y + 4, str(number), font_size=11, fill="#fff", text_anchor="middle")


def draw_picture(lineage: Lineage) -> str:
    """Return the picture as an SVG document."""
    bottom = TOP + ROW * len(COMMANDS)
    height = bottom + 24 + 22 * len(KEYS)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui,sans-serif" fill="#223">'
        ),
        "<title>The partitions of a subject, and the messages of two keys in them</title>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fff" stroke="#dde"/>',
        draw_text(LEFT, 20, "logical partition 0", font_size=11, fill="#667"),
        draw_text(RIGHT, 20, "1023", font_size=11, fill="#667", text_anchor="end"),
        *draw_rows(),
        *(part for each in lineage.histories[-1] for part in draw_partition(lineage, each)),
        *(part for key in KEYS for part in draw_key(lineage, key)),
        *(
            draw_text(
                LEFT, bottom + 24 + 22 * line, order_of(key, lineage.handled[key]), font_size=14
            )
            for line, key in enumerate(KEYS)
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def order_of(key: str, numbers: Sequence[int]) -> str:
    """Return the order in which the messages of a key were handled."""
    return f"{key} was handled in the order {' '.join(map(str, numbers))}"


def main() -> None:
    """Run the story and write the picture."""
    lineage = run(run_story, brokers=2)
    Path(__file__).with_name("lineage.svg").write_text(draw_picture(lineage))
    sys.stderr.write(f"lineage.svg: handled {lineage.handled}\n")


if __name__ == "__main__":
    main()
