"""Chooses and orders the sentences about what is wrong. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ...protocol.why import Cause, Explanation
from ..page import Sentence, href

FINE = frozenset({"all_acked", "nothing_stored"})
"""The codes of causes that are nothing wrong."""
BEHIND = "behind"
LESS_URGENT = ("retried", "parked", "removed_unread", "given_up", BEHIND)
"""The codes of causes that hold up only some keys, or that are over, least urgent last."""
CAUSES_SHOWN = 3
"""How many causes of each group are on the first page."""


def wrong_causes(explanation: Explanation, *, stands: bool) -> list[Cause]:
    """Return the causes that an operator has to know; a lag that falls is none."""
    return [
        each
        for each in explanation.causes
        if each.code not in FINE and (stands or each.code != BEHIND)
    ]


def sentences(explained: Iterable[tuple[Explanation, bool]]) -> list[Sentence]:
    """Return the most urgent causes of groups; each comes with whether its lag stands still."""
    found = [
        (LESS_URGENT.index(cause.code) + 1 if cause.code in LESS_URGENT else 0, explanation, cause)
        for explanation, stands in explained
        for cause in wrong_causes(explanation, stands=stands)[:CAUSES_SHOWN]
    ]
    return [
        Sentence(
            cause.text,
            cause.step,
            href("subjects", explanation.subject, "groups", explanation.group),
            f"{explanation.group} on {explanation.subject}",
        )
        for _, explanation, cause in sorted(found, key=lambda each: each[0])
    ]
