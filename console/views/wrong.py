"""Chooses and orders the sentences about what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ...admin.views import PartitionReport
from ...admin.why.servers import NOT_WRONG, UNHEARD, server_causes, waiting_operation
from ...protocol.operations import OperationView
from ...protocol.why import Cause, Explanation
from ..cluster import ClusterSample
from ..page import Sentence, href

BEHIND = "behind"
PASSING = frozenset({"hand_over", "no_owner", "not_granted", "not_read", "parent_unread"})
"""The codes of causes that healthy groups have for a moment, too: they are on the first page only
if the group is stuck.
"""
LESS_URGENT = ("retried", "parked", "removed_unread", "given_up", BEHIND)
"""The codes of causes that hold up only some keys, or that are over, least urgent last."""
CAUSES_SHOWN = 3
"""How many causes of each group are on the first page."""


def wrong_causes(
    explanation: Explanation, *, is_stuck: bool, heard: Collection[int] = ()
) -> list[Cause]:
    """
    Return the causes that an operator has to know; the lag of a group that is not stuck is none.

    Args:
        heard: the ids of partitions whose broker has described them since.
    """
    return [
        each
        for each in explanation.causes
        if each.code not in NOT_WRONG
        and (is_stuck or each.code != BEHIND)
        and not (each.code in UNHEARD and each.partitions and set(each.partitions) <= set(heard))
    ]


def to_sentence(cause: Cause, address: str, about: str) -> Sentence:
    """Return a cause as it is on a page. `address` is the page of what it is about."""
    return Sentence(cause.text, cause.step, address, about)


def sentences(
    explained: Iterable[tuple[Explanation, bool]],
    hosted: Mapping[str, list[PartitionReport] | str],
) -> list[Sentence]:
    """
    Return the most urgent causes of groups, without those that are over.

    A silent broker is left out: `server_sentences` names it once, for all groups.

    Args:
        explained: the explanations, each with whether the group is stuck.
        hosted: what each available broker says now; see `Admin.list_hosted`.
    """
    answers = [each for each in hosted.values() if not isinstance(each, str)]
    heard = {report.partition_id for answer in answers for report in answer}
    left_out = UNHEARD if len(answers) == len(hosted) else {"broker_silent"}
    found = [
        (LESS_URGENT.index(cause.code) + 1 if cause.code in LESS_URGENT else 0, explanation, cause)
        for explanation, is_stuck in explained
        for cause in [
            each
            for each in wrong_causes(explanation, is_stuck=is_stuck, heard=heard)
            if each.code not in left_out
        ][:CAUSES_SHOWN]
        if is_stuck or cause.code not in PASSING
    ]
    return [
        to_sentence(
            cause,
            href("subjects", explanation.subject, "groups", explanation.group),
            f"{explanation.group} on {explanation.subject}",
        )
        for _, explanation, cause in sorted(found, key=lambda each: each[0])
    ]


def server_sentences(sample: ClusterSample) -> list[Sentence]:
    """Return what is wrong with brokers."""
    return [
        to_sentence(cause, href("brokers", name), name)
        for name, cause in server_causes(sample.brokers, sample.hanging)
    ]


def operation_sentences(waiting: Iterable[OperationView]) -> list[Sentence]:
    """Return the operations that wait."""
    return [
        to_sentence(waiting_operation(each), href("subjects", each.subject), each.subject)
        for each in waiting
    ]
