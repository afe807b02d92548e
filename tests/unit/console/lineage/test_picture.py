"""The picture of a lineage: an SVG document that is valid, small, the same for the same facts, and
harmless whatever names and problems say.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane.console.lineage import STYLE, draw_lineage
from keylane.console.lineage.sheet import HEIGHT, LEFT, RIGHT, TOP
from keylane.protocol.operations import (
    OperationKind,
    OperationState,
    OperationView,
    StepAction,
    StepView,
)
from keylane.protocol.routing import Partition, PartitionState
from support.lineages import MINUTE_MS, SubjectStory
from support.running.examples import examples

GOLDEN = Path(__file__).parents[3] / "golden" / "lineage.svg"
SVG = "{http://www.w3.org/2000/svg}"
BAND_CLASSES = {"kl-open", "kl-sealed", "kl-expired", "kl-lost"}
SIZE_MAX = 400_000
DRAWN_MS_MAX = 100
"""Twice what it may take on a machine that does nothing else."""


def full_story() -> SubjectStory:
    """A subject that has had everything that can happen to it."""
    story = SubjectStory()
    story.resize(4)
    story.at_ms += 300 * MINUTE_MS
    story.resize(6)
    story.at_ms += MINUTE_MS
    story.move(6, "g3")
    story.at_ms += 60 * MINUTE_MS
    story.resize(3)
    story.at_ms += 40 * MINUTE_MS
    story.set_state(1, PartitionState.EXPIRED)
    story.set_state(2, PartitionState.EXPIRED, lost=True)
    return story


def waiting_operation(story: SubjectStory, problem: str = "") -> OperationView:
    """A resize that has sealed the first open partition."""
    planned = Partition(
        partition_id=900,
        name="orders.p899",
        queue=0,
        range_start=0,
        range_end=1024,
        broker_group="g2",
        state=PartitionState.PLANNED,
        parents=tuple(story.open_ids),
    )
    return OperationView(
        operation_id=7,
        subject=story.subject,
        kind=OperationKind.RESIZE,
        state=OperationState.SEAL,
        sealed=tuple(story.open_ids),
        children=(planned,),
        steps=tuple(
            StepView(
                action=StepAction.SEAL,
                partition_id=number,
                broker_group="g1",
                done=number == story.open_ids[0],
            )
            for number in story.open_ids
        ),
        problem=problem,
    )


def bands_of(picture: str) -> Iterator[tuple[float, float, float, float]]:
    """The left, top, right and bottom edge of each band with all its messages."""
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        if group.get("class") in BAND_CLASSES:
            for rect in group.findall(f"{SVG}rect"):
                x, y, width, height = (
                    float(rect.get(name, "")) for name in ("x", "y", "width", "height")
                )
                assert rect.findtext(f"{SVG}title")
                yield x, y, x + width, y + height


def test_picture_is_the_one_that_was_looked_at():
    """A difference is a decision: look at the new picture, then write it to the golden file."""
    story = full_story()
    facts = story.facts(
        {"billing": {}, "search": {3: 75, 6: 100, 11: 300, 12: 900}},
        first_offsets={4: 120},
        silent=[story.open_ids[-1]],
        operations=[waiting_operation(story, "broker group 'g1' is silent")],
    )
    assert draw_lineage(facts) == GOLDEN.read_text()


def test_group_that_is_known_in_part_has_not_acked_everything():
    story = SubjectStory()
    story.resize(4)
    all_but_one = "billing has acked everything on 3 of 4 partitions; of the other it is not known"
    assert all_but_one in draw_lineage(story.facts({"billing": {}}, silent=[1]))
    behind = "billing is at least 5 messages behind, in 1 partition; of the others it is not known"
    assert behind in draw_lineage(story.facts({"billing": {3: 5}}, silent=[1, 2]))
    none = "how far billing has read is not known"
    assert none in draw_lineage(story.facts({"billing": {}}, silent=[1, 2, 3, 4]))


changes = st.lists(
    st.one_of(
        st.tuples(st.just("resize"), st.integers(1, 200)),
        st.tuples(st.just("move"), st.integers(0, 1_000)),
    ),
    max_size=8,
)


@given(
    changes,
    st.booleans(),
    st.dictionaries(st.integers(1, 60), st.integers(0, 100), max_size=20),
)
def test_bands_are_inside_the_plot_and_apart(changes, timed, lag):
    """Whatever a subject has been through."""
    story = SubjectStory()
    story.resize(4, timed=timed)
    for kind, number in changes:
        story.at_ms += MINUTE_MS * (1 + number)
        if kind == "resize":
            story.resize(number, timed=timed, groups=30)
        else:
            story.move(story.open_ids[number % len(story.open_ids)], "g9", timed=timed)
    bands = list(bands_of(draw_lineage(story.facts({"billing": lag}))))
    assert len(bands) == len(story.entries)
    for left, top, right, bottom in bands:
        assert LEFT - 0.1 <= left < right <= RIGHT + 0.1
        assert TOP - 0.1 <= top < bottom <= TOP + HEIGHT + 0.1
    for one, other in combinations(bands, 2):
        across = min(one[2], other[2]) - max(one[0], other[0])
        down = min(one[3], other[3]) - max(one[1], other[1])
        assert across < 0.15 or down < 0.15, (one, other)


@given(st.text(max_size=80), st.text(min_size=1, max_size=80))
def test_picture_is_valid_and_inert_whatever_text_is_in_it(problem, name):
    story = SubjectStory(subject=name)
    story.resize(2)
    facts = story.facts({name: {1: 50}}, silent=[2], operations=[waiting_operation(story, problem)])
    root = ET.fromstring(draw_lineage(facts))
    allowed = {"svg", "title", "desc", "style", "defs", "pattern", "linearGradient", "stop"}
    allowed |= {"g", "path", "rect", "circle", "text"}
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= allowed
    text = "".join(root.itertext()).replace("\n", "")
    assert not re.search("[\0-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", text)


def test_markup_in_a_problem_is_shown_as_text():
    story = full_story()
    problem = "</text><script>alert('x')</script> \u202egnp.\x1b[31m"
    picture = draw_lineage(story.facts(operations=[waiting_operation(story, problem)]))
    assert "<script" not in picture
    assert r"&lt;script&gt;alert('x')&lt;/script&gt; \u202egnp.\x1b[31m" in picture


def test_picture_says_what_a_screen_reader_needs():
    """The changes, what is open, the groups and the operations, as text."""
    story = full_story()
    facts = story.facts(
        {"billing": {}, "search": {3: 75}}, operations=[waiting_operation(story, "g1 is silent")]
    )
    root = ET.fromstring(draw_lineage(facts))
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Lineage of orders"
    assert root.findtext(f"{SVG}desc") == (
        "30 Nov, 12:00: 4 partitions; 17:00: 4 → 6; 17:01: p10 to g3; 18:01: 6 → 3. "
        "Now 3 open partitions on g1, g2, g3. billing has acked everything. "
        "search is 75 messages behind, in 1 partition. There is operation 7 (resize) in state seal, "
        "1 of 3 partitions sealed; it waits: g1 is silent."
    )


def test_band_has_a_title_with_what_is_known_of_it():
    story = full_story()
    picture = draw_lineage(story.facts({"search": {3: 75}}))
    assert (
        "<title>p2 (id 3) on g1, sealed, 300 messages; logical partitions 512 to 767, "
        "from 30 Nov, 12:00 to 17:00; search has acked 75 %</title>"
    ) in picture
    assert "p0 (id 1) on g2, expired, its messages are removed" in picture
    assert "p1 (id 2) on g3, lost with its disk" in picture


def test_page_with_its_own_style_gets_a_picture_without():
    """A strict content security policy then allows everything in it."""
    facts = full_story().facts({"billing": {}})
    picture = draw_lineage(facts, with_style=False)
    assert STYLE not in picture
    assert "style=" not in picture
    assert "<style" not in picture


def test_thousand_partitions_are_drawn_in_time_and_small():
    """With two groups, three broker groups, and bands too thin for words."""
    story = SubjectStory()
    for count in (401, 307, 353, 97):
        story.resize(count)
        story.at_ms += 10 * MINUTE_MS
    assert 1_000 <= len(story.entries) <= 1_150
    lag = {number: number % 90 for number in story.entries}
    facts = story.facts({"billing": {}, "search": lag})
    drawn_ms = []
    for _ in range(7):
        start = time.process_time()
        picture = draw_lineage(facts)
        drawn_ms.append(1_000 * (time.process_time() - start))
    assert len(picture.encode()) < SIZE_MAX
    assert min(drawn_ms) < DRAWN_MS_MAX


@pytest.mark.parametrize("count", [1, examples(1_024)])
def test_subject_without_changes_is_drawn(count):
    story = SubjectStory()
    story.resize(count)
    assert len(list(bands_of(draw_lineage(story.facts())))) == count
