"""The row of a subject. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.control import Retention
from ...protocol.ids import Subject
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.routing import OrderStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRow:
    """A subject as stored; with `route_version` 0 it is planned and not open yet."""

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
    """Why its creation failed, or ""; after a failure the name can be used again."""
    deleting: bool = False
    """True while brokers drop its partitions; afterwards its name is free."""
    tokens_above: int = 0
    """Upper bound of the tokens of its deleted groups."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    hidden_for: str = ""
    """Subject in which its messages will be published; "" if it is not hidden."""
    filled_by: str = ""
    """Job that fills it while it is hidden; "" if unknown."""

    @property
    def hosted_name(self) -> str:
        """Subject name under which brokers host its partitions; it does not change when
        published.
        """
        return self.hidden_for or self.name
