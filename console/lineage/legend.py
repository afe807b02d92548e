"""The explanations below the plot. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ...protocol.operations import StepAction
from ...protocol.text import counted
from .look import COLOURS, DASHES, state_class, style_of
from .markup import element, label, path_data, rectangle, shorten, title_of, width_of
from .sheet import LEFT, RIGHT, Sheet, is_waiting
from .words import say_group, say_operation

SAMPLE = 18.0, 14.0
"""The width and height of a sample."""
BROKER_GROUPS_MAX = 48
"""The largest number of broker groups that are explained."""


def draw_legend(sheet: Sheet, top: float) -> tuple[list[str], float]:
    """Return the explanations below the plot, and where the picture ends."""
    samples: list[tuple[str, list[dict[str, str]]]] = []
    in_order = sorted(sheet.colours, key=lambda name: (len(name), name))  # g2 before g10
    for name in in_order[:BROKER_GROUPS_MAX]:
        fills = [{"fill": sheet.colour_of(name)}]
        if pattern := sheet.pattern_of(name):
            fills.append({"fill": f"url(#{pattern})"})
        samples.append((shorten(name, 240, 12), fills))
    if len(sheet.colours) > len(samples):
        samples.append((f"… and {len(sheet.colours) - len(samples)} more", []))
    parts, y = _draw_samples(samples, top + 14)
    states = [
        (words, [{"class_": state, **style_of(state, COLOURS[0])}])
        for state, words in _states_shown(sheet)
    ]
    state_parts, y = _draw_samples(states, y + 24)
    parts += state_parts
    if sheet.facts.groups:
        y += 26
        words = (
            "A line is a consumer group: in each band it lies at the share of the messages that "
            "the group has acked. Everything to the left of the line is done."
        )
        parts.append(label(LEFT, y, words, "kl-soft"))
    for index, group in enumerate(sheet.facts.groups):
        y += 26
        line = path_data("M", LEFT, y - 4, "h", 64)
        dashes = {"stroke_dasharray": DASHES[index]} if DASHES[index] else {}
        parts.append(element("path", class_="kl-front", d=line, **dashes))
        words = shorten(say_group(sheet, group), RIGHT - LEFT - 80, 12)
        parts.append(label(LEFT + 78, y, words))
    if sheet.facts.groups_omitted:
        y += 22
        words = f"… and {counted(sheet.facts.groups_omitted, 'more group')}"
        parts.append(label(LEFT + 78, y, words, "kl-soft"))
    for operation in sheet.facts.operations:
        y += 26
        said = say_operation(operation)
        words = shorten(said, RIGHT - LEFT, 12)
        parts.append(label(LEFT, y, words, "kl-warn", title=title_of(said)))
    return parts, y + 24


def _draw_samples(
    samples: Sequence[tuple[str, Sequence[Mapping[str, str]]]], y: float
) -> tuple[list[str], float]:
    """Return samples with their words, in as many lines as they need, and the place of the last
    line. A sample is a list of the attributes of its rectangles.
    """
    parts: list[str] = []
    x = LEFT
    for words, rectangles in samples:
        width = 44 + width_of(words, 12)
        if x + width > RIGHT and x > LEFT:
            x, y = LEFT, y + 22
        parts += [rectangle(x, y - 11, *SAMPLE, **attributes) for attributes in rectangles]
        parts.append(label(x + 24, y, words))
        x += width
    return parts, y


def _states_shown(sheet: Sheet) -> Iterator[tuple[str, str]]:
    present = {state_class(band) for band in sheet.bands.bands}
    if "kl-expired" in present or any(each.first_offset for each in sheet.descriptions.values()):
        present.add("kl-removed")
    for operation in filter(is_waiting, sheet.facts.operations):
        present.add("kl-planned")
        if any(step.action is StepAction.SEAL and step.done for step in operation.steps):
            present.add("kl-seal")
    for state, words in (
        ("kl-open", "open: takes messages"),
        ("kl-sealed", "sealed: only read"),
        ("kl-removed", "hollow: messages removed by retention"),
        ("kl-lost", "lost with its disk"),
        ("kl-planned", "dashed: planned, opens when its parents are sealed"),
        ("kl-seal", "striped: sealed, its messages wait at the producers"),
    ):
        if state in present:
            yield state, words
