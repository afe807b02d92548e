"""Defines the row of a subject. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.control import Retention
from ...protocol.ids import Subject
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.routing import OrderStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRow:
    """A subject as stored in the database. If `route_version` is 0, it is planned but not open
    yet.
    """

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
    """The reason why its creation failed, or ""; after a failure, the name can be used again."""
    deleting: bool = False
    """True while brokers are dropping its partitions; its name is free afterwards."""
    tokens_above: int = 0
    """Upper bound of the tokens of its deleted groups."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    hidden_for: str = ""
    """Subject in which its messages will be published; "" if it is not hidden."""
    filled_by: str = ""
    """The job that fills it while it is hidden; "" if unknown."""

    @property
    def hosted_name(self) -> str:
        """The subject name under which brokers host its partitions; publishing does not change
        it.
        """
        return self.hidden_for or self.name
