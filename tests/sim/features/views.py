"""A history seen from one subject: what does not concern it is masked, so that each event keeps its
instant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from keylane.checker.events import (
    Event,
    Granted,
    LeaseReleased,
    LeasesReported,
    Replaced,
    Routed,
    Sent,
    Settled,
)
from keylane.checker.findings import Findings
from keylane.checker.judge import check_history


def host_of(name: bytes | str) -> str:
    """The host of a producer's session, or of a value: `p0.2:17` is of p0, `u1/3` of an outbox of
    u1.
    """
    text = name.decode() if isinstance(name, bytes) else name
    return text.partition(".")[0].partition("/")[0]


def seen_from(
    history: Sequence[Event], *, partitions: Collection[int], hosts: Collection[str]
) -> list[Any]:
    """
    The events of a subject, with None in place of all others.

    Args:
        partitions: the subject's partitions.
        hosts: the names of the hosts that send to it.
    """
    sessions = {
        event.session
        for event in history
        if isinstance(event, Granted) and event.partition_id in partitions
    }

    def concerns(event: Any) -> bool:
        match event:
            case Sent() | Settled():
                return host_of(event.value) in hosts  # type: ignore[arg-type]
            case Routed():
                return host_of(event.producer) in hosts
            case LeaseReleased() | LeasesReported() | Replaced():
                return event.session in sessions
            case _:
                return event.partition_id in partitions

    return [event if concerns(event) else None for event in history]


def check_view(events: Sequence[Any], findings: Findings, *, drained: bool = True) -> None:
    """Judge a view, and add what it shows to the findings."""
    seen = check_history(events, drained=drained)
    for anomaly, count in seen.counts.items():
        findings.counts[anomaly] += count
    findings.examples += seen.examples
