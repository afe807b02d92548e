"""Where everything lies in the picture of one subject. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...admin.views import PartitionDescription
from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.operations import OperationView
from ...protocol.routing import Partition, PartitionState
from .axis import Axis, place_moments, say_span, say_times, spans_between
from .bands import Band, Bands, lay_out_bands
from .facts import LineageFacts
from .look import COLOURS, PATTERNS
from .markup import path_data

WIDTH = 1200.0
LEFT, RIGHT, TOP, HEIGHT = 64.0, 1176.0, 104.0, 512.0
"""The edges of the plot, and its height."""
TO_COME = 104.0
"""The width of the column for partitions that are to be opened."""
SPAN_MIN = 120.0
"""The width below which the words of a moment do not fit."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """What all parts of a picture share: the facts, and where everything lies."""

    facts: LineageFacts
    bands: Bands
    axis: Axis
    times: Sequence[str]
    """The words for each moment, and for now."""
    spans: Sequence[str]
    """The words for the time after each moment."""
    colours: Mapping[str, int]
    """The number of each broker group's colour, in the order of their first bands."""
    descriptions: Mapping[int, PartitionDescription]
    right: float
    """The place of now."""

    def left_of(self, band: Band) -> float:
        """Return where a band begins; the space before it shows what it continues."""
        start = self.axis.places[band.start]
        return LEFT + start + (self.gap_after(band.start) if band.start else 0)

    def right_of(self, band: Band) -> float:
        """Return where a band ends: a hairline before those that continue it."""
        if band.end is None:
            return self.right
        return LEFT + self.axis.places[band.end] - min(1.5, self.gap_after(band.end))

    def gap_after(self, moment: int) -> float:
        """Return the width of the space in which the bands of a moment grow out of others."""
        places = self.axis.places
        return min(12.0, 0.3 * (places[moment + 1] - places[moment]))

    def rect_of(self, band: Band) -> tuple[float, float, float, float]:
        """Return x, y, width and height of a band."""
        left = self.left_of(band)
        y, height = inset(band.partition.range_start, band.partition.range_end)
        return left, y, self.right_of(band) - left, height

    def colour_of(self, broker_group: str) -> str:
        """Return the colour of a broker group."""
        return COLOURS[self.colours[broker_group] % len(COLOURS)]

    def pattern_of(self, broker_group: str) -> str:
        """Return the pattern on a broker group's bands; "" for none."""
        return PATTERNS[self.colours[broker_group] // len(COLOURS) % len(PATTERNS)]

    def messages_in(self, band: Band) -> int | None:
        """Return the number of messages that a partition has had; None if it is not known."""
        if band.entry.end_offset is not None:
            return band.entry.end_offset
        description = self.descriptions.get(band.partition.partition_id)
        return None if description is None else description.next_offset


def lay_out(facts: LineageFacts) -> Sheet:
    """Place everything that is known of a subject."""
    bands = lay_out_bands(facts.history.partitions)
    to_come = any(is_waiting(operation) for operation in facts.operations)
    right = RIGHT - TO_COME if to_come else RIGHT
    now_ms = max([facts.now_ms, *(time_ms for time_ms in bands.times_ms if time_ms is not None)])
    moved_to = [child.broker_group for each in facts.operations for child in each.children]
    names = [*(str(band.partition.broker_group) for band in bands.bands), *moved_to]
    return Sheet(
        facts=facts,
        bands=bands,
        axis=place_moments(bands.times_ms, now_ms, right - LEFT, SPAN_MIN),
        times=say_times([*bands.times_ms, now_ms]),
        spans=[say_span(span_ms) for span_ms in spans_between(bands.times_ms, now_ms)],
        colours={name: number for number, name in enumerate(dict.fromkeys(names))},
        descriptions={each.partition_id: each for each in facts.description.partitions},
        right=right,
    )


def is_waiting(operation: OperationView) -> bool:
    """Return True if the children of an operation are not open yet."""
    return any(child.state is PartitionState.PLANNED for child in operation.children)


def y_of(logical: int) -> float:
    """Return the place of a logical partition."""
    return TOP + HEIGHT * logical / LOGICAL_PARTITIONS


def short_name(partition: Partition) -> str:
    """Return the part of a partition's name that is its own: "p3" of "orders.p3"."""
    return partition.name.rpartition(".")[2]


def inset(range_start: int, range_end: int) -> tuple[float, float]:
    """Return y and height of a range of logical partitions, with a hairline around it."""
    top, bottom = y_of(range_start), y_of(range_end)
    inset = 1.0 if bottom - top >= 6 else 0.0
    return top + inset, bottom - top - 2 * inset


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a rectangle as a part of a path."""
    return path_data("M", x, y, "h", width, "v", height, "h", -width, "z")
