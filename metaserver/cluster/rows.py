"""A subject's row. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.control import Retention
from ...protocol.ids import Subject
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.routing import OrderStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRow:
    """A subject as stored; `route_version` 0: it is planned and not open yet."""

    subject_id: int
    name: Subject
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    """Number of partition names that the subject has used so far."""
    route_version: int
    retention: Retention = Retention.ACKED
    static: bool = False
    problem: str = ""
    """Reason why its creation failed; "": it did not. After a failure the name can be used again.
    """
    deleting: bool = False
    """True while brokers drop its partitions; its name is free afterwards."""
    tokens_above: int = 0
    """Token that no token of its deleted groups exceeds."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    hidden_for: str = ""
    """Subject in which its messages are to be published; "": it is not hidden."""
    filled_by: str = ""
    """Job that fills it while it is hidden; "": not stated."""

    @property
    def hosted_name(self) -> str:
        """Subject under which brokers host its partitions; publishing changes nothing at them."""
        return self.hidden_for or self.name
