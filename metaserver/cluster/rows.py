"""A subject's row, as the metaserver's own code sees it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.control import Retention
from ...protocol.ids import Subject
from ...protocol.limits import MESSAGE_BYTES_MAX
from ...protocol.routing import OrderStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRow:
    """A subject as stored; `route_version` 0 means it is planned and not open yet."""

    subject_id: int
    name: Subject
    order_strategy: OrderStrategy
    partitions_wanted: int
    partitions_named: int
    """How many names of partitions the subject has given so far."""
    route_version: int
    retention: Retention = Retention.ACKED
    static: bool = False
    problem: str = ""
    """Why its creation has failed; the name is free for another one."""
    deleting: bool = False
    """Brokers are dropping its partitions; then its name is free."""
    tokens_above: int = 0
    """Every token of its deleted groups is at most this."""
    message_bytes_max: int = MESSAGE_BYTES_MAX
    hidden_for: str = ""
    """The subject that its messages are to be published in; "": it is not hidden."""
    filled_by: str = ""
    """The job that fills it while it is hidden; "": not said."""

    @property
    def hosted_name(self) -> str:
        """The subject that brokers have its partitions for: publishing changes nothing at them."""
        return self.hidden_for or self.name
