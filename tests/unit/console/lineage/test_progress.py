"""Where a consumer group is in the lineage."""

from __future__ import annotations

from keylane.console.lineage.bands import lay_out_bands
from keylane.console.lineage.progress import find_front
from keylane.protocol.routing import PartitionState
from support.lineages import SubjectStory


def front(
    story: SubjectStory, lag: dict[int, int], **known: object
) -> list[tuple[int, int, int, object]]:
    """The steps of the group's line: range, partition, share."""
    facts = story.facts({"billing": lag}, **known)
    bands = lay_out_bands(facts.history.partitions).bands
    descriptions = {each.partition_id: each for each in facts.description.partitions}
    return [
        (step.range_start, step.range_end, int(step.band.partition.partition_id), step.acked)
        for step in find_front(bands, descriptions, "billing")
    ]


def split() -> SubjectStory:
    """Partitions 1 and 2, then 3, 4, 5; 4 continues both."""
    story = SubjectStory()
    story.resize(2)
    story.resize(3)
    return story


def test_group_that_has_acked_everything_is_at_the_ends_of_the_open_partitions():
    assert front(split(), {}) == [(0, 341, 3, 1), (341, 682, 4, 1), (682, 1024, 5, 1)]


def test_group_is_in_the_first_partition_that_it_has_not_drained():
    """It is in partition 1 on the upper half, and at the begin of what waits for it there."""
    steps = front(split(), {1: 25, 4: 400, 5: 250})
    assert steps == [(0, 512, 1, 0.75), (512, 682, 4, 0), (682, 1024, 5, 0.5)]


def test_group_has_passed_partitions_whose_messages_are_gone():
    story = split()
    story.set_state(1, PartitionState.EXPIRED)
    story.set_state(2, PartitionState.EXPIRED, lost=True)
    assert [step[2] for step in front(story, {})] == [3, 4, 5]


def test_group_that_has_asked_for_nothing_is_at_the_begin():
    story = split()
    facts = story.facts({})
    bands = lay_out_bands(facts.history.partitions).bands
    descriptions = {each.partition_id: each for each in facts.description.partitions}
    steps = find_front(bands, descriptions, "new")
    assert [(step.band.partition.partition_id, step.acked) for step in steps] == [(1, 0), (2, 0)]


def test_share_is_unknown_when_the_broker_does_not_answer():
    assert front(split(), {}, silent=[1]) == [
        (0, 512, 1, None),
        (512, 682, 4, 1),
        (682, 1024, 5, 1),
    ]


def test_open_partition_without_messages_is_read_to_its_end():
    story = SubjectStory()
    story.resize(1)
    facts = story.facts({"billing": {}})
    (description,) = facts.description.partitions
    from msgspec.structs import replace

    empty = replace(description, next_offset=0)
    bands = lay_out_bands(facts.history.partitions).bands
    (step,) = find_front(bands, {1: empty}, "billing")
    assert step.acked == 1
