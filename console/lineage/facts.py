"""What is known of a subject when its lineage is drawn. Pure."""

from __future__ import annotations

from msgspec import Struct

from ...admin.views import SubjectDescription
from ...protocol.operations import OperationView, SubjectHistory


class LineageFacts(Struct, frozen=True, kw_only=True):
    """A subject at one moment."""

    history: SubjectHistory
    description: SubjectDescription
    """The partitions that have data, with the progress of each group on each."""
    groups: tuple[str, ...] = ()
    """The consumer groups to draw, by name."""
    groups_omitted: int = 0
    """The number of other groups."""
    operations: tuple[OperationView, ...] = ()
    """The operations that have not ended, oldest first."""
    now_ms: int
    """The time, in milliseconds since 1970."""
