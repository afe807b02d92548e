"""The lineage of a subject as an SVG document. Pure.

Time goes from left to right, the logical partitions from top to bottom. A band is a partition, in
the colour of its broker group; a line is a consumer group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...protocol.limits import LOGICAL_PARTITIONS
from ...protocol.operations import StepAction
from ...protocol.routing import Partition, PartitionState
from ...protocol.text import counted
from .bands import Band
from .facts import LineageFacts
from .legend import draw_legend
from .look import DASHES, OPACITIES, PATTERN_DEFINITIONS, STYLE, state_class, style_of
from .markup import (
    element,
    label,
    number_of,
    path_data,
    rectangle,
    shorten,
    text_of,
    title_of,
    width_of,
)
from .progress import FrontStep, find_front
from .sheet import (
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Sheet,
    box,
    inset,
    is_waiting,
    lay_out,
    short_name,
    y_of,
)
from .words import say_band, say_changes, say_count, say_group, say_operation, summary_of

WORDS_MIN = 44.0
"""The width below which a moment has words only if the next one has none."""
NAMED_MIN = 36
"""The number of logical partitions below which a band has no room for a name."""
STEPS_THICK_MAX = 40
"""The number of steps above which a group's line is thinner."""


def draw_lineage(facts: LineageFacts, *, with_style: bool = True) -> str:
    """
    Draw the lineage of a subject. The same facts give the same text.

    Args:
        with_style: include STYLE; a page that has these rules itself sets it to False.
    """
    sheet = lay_out(facts)
    title = f"Lineage of {facts.history.subject}"
    legend, bottom = draw_legend(sheet, TOP + HEIGHT + 62)
    body = [
        title_of(title),
        element("desc", text_of(summary_of(sheet))),
        element("style", STYLE) if with_style else "",
        PATTERN_DEFINITIONS,
        rectangle(0, 0, WIDTH, bottom, class_="kl-paper"),
        *_draw_heading(sheet),
        *_draw_logical_axis(),
        *_draw_joints(sheet),
        *_draw_bands(sheet),
        *_draw_patterns(sheet),
        *_draw_names(sheet),
        *_draw_moments(sheet),
        *_draw_spans(sheet),
        *_draw_operations(sheet),
        *_draw_fronts(sheet),
        *legend,
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number_of(WIDTH)} '
        f'{number_of(bottom)}" class="kl" role="img" aria-label="{text_of(title)}">\n'
        + "\n".join(filter(None, body))
        + "\n</svg>\n"
    )


def _draw_heading(sheet: Sheet) -> Iterator[str]:
    history = sheet.facts.history
    open_count = sum(band.end is None for band in sheet.bands.bands)
    ever = len(sheet.bands.bands) + sheet.bands.earlier
    words = f"{counted(open_count, 'open partition')}, {ever} ever"
    if sheet.bands.earlier:
        words += f"; the {sheet.bands.earlier} oldest are left out"
    yield label(LEFT, 34, shorten(history.subject, 700, 22), "kl-title")
    yield label(RIGHT, 32, words, "kl-soft kl-end")


def _draw_logical_axis() -> Iterator[str]:
    for logical in (0, 256, 512, 768, 1024):
        y, number = y_of(logical), min(logical, LOGICAL_PARTITIONS - 1)
        yield element("path", class_="kl-rule", d=path_data("M", LEFT - 8, y, "h", 4))
        yield label(LEFT - 12, y + 4, str(number), "kl-soft kl-end kl-mono")
    middle = TOP + HEIGHT / 2
    yield element(
        "text",
        "logical partition",
        class_="kl-soft kl-middle",
        transform=f"translate(18 {number_of(middle)}) rotate(-90)",
    )


def _draw_bands(sheet: Sheet) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for band in sheet.bands.bands:
        kind = (state_class(band), sheet.colour_of(band.partition.broker_group))
        kinds.setdefault(kind, []).append(_draw_band(sheet, band))
    for (state, colour), parts in sorted(kinds.items()):
        yield element("g", "\n".join(parts), class_=state, **style_of(state, colour))


def _draw_band(sheet: Sheet, band: Band) -> str:
    x, y, width, height = sheet.rect_of(band)
    title = title_of(say_band(sheet, band))
    description = sheet.descriptions.get(band.partition.partition_id)
    removed = 0.0
    if description is not None and description.first_offset and description.next_offset:
        removed = width * description.first_offset / description.next_offset
    if removed < 1:
        return rectangle(x, y, width, height, title)
    removed = min(removed, width - 1)
    style = style_of("kl-removed", sheet.colour_of(band.partition.broker_group))
    hollow = rectangle(x, y, removed, height, class_="kl-removed", **style)
    full = rectangle(x + removed, y, width - removed, height)
    return element("g", title + hollow + full)


def _draw_joints(sheet: Sheet) -> Iterator[str]:
    """Yield the spaces in which bands grow out of those that they continue, in colours that change
    from those of the older to those of the newer ones.
    """
    gradients = set[_Gradient]()
    for moment, (started, ended) in enumerate(sheet.bands.by_moment()):
        x, gap = LEFT + sheet.axis.places[moment], sheet.gap_after(moment)
        paths: dict[_Gradient, list[str]] = {}
        older = sorted(ended, key=lambda band: band.partition.range_start)
        for parent, child, low, high in _overlaps(older, started):
            y, height = inset(low, high)
            gradient = (*_fill_of(sheet, parent), *_fill_of(sheet, child))
            paths.setdefault(gradient, []).append(box(x, y, gap, height))
        for gradient, parts in sorted(paths.items()):
            yield element("path", fill=f"url(#{_id_of(gradient)})", d="".join(parts))
        gradients |= paths.keys()
    if gradients:
        yield element("defs", "".join(map(_draw_gradient, sorted(gradients))))


_Gradient = tuple[str, str, str, str]
"""The colours of two bands, each with its opacity."""


def _fill_of(sheet: Sheet, band: Band) -> tuple[str, str]:
    return sheet.colour_of(band.partition.broker_group), OPACITIES[state_class(band)]


def _id_of(gradient: _Gradient) -> str:
    old, old_opacity, new, new_opacity = gradient
    return f"kl{old[1:]}{old_opacity}-{new[1:]}{new_opacity}".replace(".", "_")


def _draw_gradient(gradient: _Gradient) -> str:
    old, old_opacity, new, new_opacity = gradient
    stops = element("stop", stop_color=old, stop_opacity=old_opacity)
    stops += element("stop", offset=1, stop_color=new, stop_opacity=new_opacity)
    return element("linearGradient", stops, id=_id_of(gradient))


def _overlaps(
    older: Sequence[Band], newer: Sequence[Band]
) -> Iterator[tuple[Band, Band, int, int]]:
    """Yield the pairs of bands with a range in common, and this range. Both are sorted by range."""
    parents, children = iter(older), iter(newer)
    parent, child = next(parents, None), next(children, None)
    while parent is not None and child is not None:
        one, other = parent.partition, child.partition
        low, high = max(one.range_start, other.range_start), min(one.range_end, other.range_end)
        if low < high:
            yield parent, child, low, high
        if one.range_end <= other.range_end:
            parent = next(parents, None)
        else:
            child = next(children, None)


def _draw_patterns(sheet: Sheet) -> Iterator[str]:
    """Yield the patterns that distinguish broker groups whose colours are the same."""
    paths: dict[str, list[str]] = {}
    for band in sheet.bands.bands:
        pattern = sheet.pattern_of(band.partition.broker_group)
        if pattern and not band.entry.is_gone:
            paths.setdefault(pattern, []).append(box(*sheet.rect_of(band)))
    for pattern, parts in paths.items():
        yield element("path", fill=f"url(#{pattern})", d="".join(parts), pointer_events="none")


def _draw_names(sheet: Sheet) -> Iterator[str]:
    for band in sheet.bands.bands:
        partition = band.partition
        if partition.range_end - partition.range_start < NAMED_MIN:
            continue
        x, y, width, height = sheet.rect_of(band)
        if width < 40:
            continue
        ink = " kl-on" if state_class(band) == "kl-open" else ""
        room = width - 22
        name = _name_in(partition, room)
        count = sheet.messages_in(band)
        lower = "" if count is None else say_count(count, "message")
        if width_of(lower, 11) > room:
            lower = shorten(f"{count:,}", room, 11)
        is_tall = height >= 36 and bool(lower)
        middle = y + height / 2 + (-3 if is_tall else 4)
        if name:
            yield label(x + 8, middle, name, f"kl-name{ink}")
        if is_tall:
            yield label(x + 8, middle + 15, lower, f"kl-mono{ink}")


def _name_in(partition: Partition, room: float) -> str:
    """Return a partition's name, and its broker group if there is room for both."""
    name = short_name(partition)
    full = f"{name} on {partition.broker_group}"
    return full if width_of(full, 12.5) <= room else shorten(name, room, 12.5)


def _draw_moments(sheet: Sheet) -> Iterator[str]:
    """Yield what happened when, above the plot, as far as there is room for the words."""
    places = [LEFT + place for place in sheet.axis.places]
    bottom = TOP + HEIGHT
    now_left = sheet.right - width_of(sheet.times[-1], 12) - 8
    free_from = LEFT
    for moment, change in enumerate(say_changes(sheet.bands)):
        x, time = places[moment], sheet.times[moment]
        title = title_of(f"{time}: {change}" if time else change)
        ticks = path_data("M", x, TOP - 4, "v", -4, "M", x, bottom + 8, "v", 8)
        yield element("path", title, class_="kl-axis", d=ticks)
        width = max(width_of(change, 12), width_of(time, 11))
        room = min(places[moment + 1], now_left) - x - 6
        if room < WORDS_MIN and x + width < now_left - 6:
            room = width  # the words of later moments give way
        if x >= free_from and room >= WORDS_MIN:
            free_from = x + min(width, room) + 6
            yield label(x, TOP - 27, shorten(change, room, 12), "kl-name")
            yield label(x, TOP - 13, shorten(time, room, 11), "kl-soft kl-mono")
    now = path_data("M", sheet.right, TOP - 4, "V", bottom + 16)
    yield element("path", class_="kl-now", d=now)
    yield label(sheet.right, TOP - 27, "now", "kl-name kl-end")
    yield label(sheet.right, TOP - 13, sheet.times[-1], "kl-soft kl-end kl-mono")


def _draw_spans(sheet: Sheet) -> Iterator[str]:
    """Yield the axis of time below the plot, and how long it is from each moment to the next."""
    bottom = TOP + HEIGHT
    places = sheet.axis.places
    for moment, span in enumerate(sheet.spans):
        x, width = LEFT + places[moment], places[moment + 1] - places[moment]
        class_ = "kl-axis kl-widened" if moment in sheet.axis.widened else "kl-axis"
        yield element("path", class_=class_, d=path_data("M", x, bottom + 12, "h", width))
        if width_of(span, 11) < width - 4:
            yield label(x + width / 2, bottom + 27, span, "kl-soft kl-middle kl-mono")
    note = "Times are UTC."
    if sheet.axis.widened:
        note += " Dotted parts of the axis are drawn wider than their time."
    yield label(LEFT, bottom + 46, note, "kl-soft kl-mono")


def _draw_operations(sheet: Sheet) -> Iterator[str]:
    """Yield the partitions that operations have not opened yet, and those that they have sealed."""
    waiting = [each for each in sheet.facts.operations if is_waiting(each)]
    left = sheet.right + 12
    open_bands = {
        int(band.partition.partition_id): band for band in sheet.bands.bands if band.end is None
    }
    for operation in waiting:
        words = say_operation(operation)
        for step in operation.steps:
            band = open_bands.get(step.partition_id)
            if step.action is StepAction.SEAL and step.done and band is not None:
                x, y, width, height = sheet.rect_of(band)
                title = title_of(
                    f"{short_name(band.partition)} is sealed, and no child is open yet: "
                    "its messages wait at the producers"
                )
                yield rectangle(x + width - 14, y, 14, height, title, class_="kl-seal")
        for child in operation.children:
            if child.state is not PartitionState.PLANNED:
                continue
            top, bottom = y_of(child.range_start), y_of(child.range_end)
            colour = sheet.colour_of(child.broker_group)
            title = title_of(f"{short_name(child)} on {child.broker_group}, planned. {words}")
            style = style_of("kl-planned", colour)
            height = max(bottom - top - 2, 0.5)
            yield rectangle(
                left, top + 1, RIGHT - left, height, title, class_="kl-planned", rx=4, **style
            )
            name = _name_in(child, RIGHT - left - 12)
            if bottom - top >= 16 and name:
                yield label(left + 6, (top + bottom) / 2 + 4, name, "kl-name")
    if waiting:
        yield label(left, TOP - 27, waiting[0].kind, "kl-name kl-warn")
        yield label(left, TOP - 13, f"in state {waiting[0].state}", "kl-warn kl-mono")


def _draw_fronts(sheet: Sheet) -> Iterator[str]:
    """Yield the lines of all groups, and then their names, which no line crosses."""
    names = []
    for index, group in enumerate(sheet.facts.groups):
        steps = find_front(sheet.bands.bands, sheet.descriptions, group)
        if steps:
            line, name = _draw_front(sheet, index, steps)
            yield line
            names.append(name)
    yield from names


def _draw_front(sheet: Sheet, index: int, steps: Sequence[FrontStep]) -> tuple[str, str]:
    """Return the line of a group through all bands in which it is, and the name on it."""
    group = sheet.facts.groups[index]
    points = [(_place_of(sheet, step, index), step) for step in steps]
    path = path_data("M", points[0][0], y_of(points[0][1].range_start))
    unknown = ""
    for x, step in points:
        bottom = y_of(step.range_end)
        path += path_data("H", x, "V", bottom)
        if step.acked is None:
            unknown += path_data("M", x, y_of(step.range_start), "V", bottom)
    title = title_of(say_group(sheet, group))
    dashes = {"stroke_dasharray": DASHES[index]} if DASHES[index] else {}
    parts = element("path", class_="kl-case", stroke_linejoin="round", d=path)
    parts += element("path", title, class_="kl-front", stroke_linejoin="round", d=path, **dashes)
    if unknown:
        parts += element("path", class_="kl-case kl-unknown", d=unknown)
    line = element("g", parts, **({"class_": "kl-thin"} if len(steps) > STEPS_THICK_MAX else {}))
    logical = int((index + 0.5) / len(sheet.facts.groups) * LOGICAL_PARTITIONS)
    passed = [x for x, step in points if step.range_start <= logical]
    x = passed[-1] if passed else points[0][0]
    words = shorten(group, 120, 12)
    width = width_of(words, 12) + 16
    left = min(max(x - width / 2, LEFT), sheet.right - width)
    y = y_of(logical)
    name = rectangle(left, y - 10, width, 20, class_="kl-mark", rx=10)
    name += label(left + width / 2, y + 4, words, "kl-sign")
    return line, name


def _place_of(sheet: Sheet, step: FrontStep, index: int) -> float:
    """Return where the line of a group is in a band: at the share of the messages that it has
    acked. Groups that are at the same place are drawn beside each other.
    """
    left, right = sheet.left_of(step.band), sheet.right_of(step.band)
    margin = min(4.0 + 5 * index, (right - left) / 3)
    return left + margin + (right - left - 2 * margin) * (step.acked or 0)
