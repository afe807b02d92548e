"""Control calls that do for many at once what others do for one.  Pure."""

from __future__ import annotations

from ..progress import TellGroups, ToldGroups
from .endpoint import Endpoint, Rights

TELL_GROUPS = Endpoint(
    "POST",
    "/v1/partitions/groups",
    TellGroups,
    ToldGroups,
    Rights.CLUSTER,
    "Have retention of several partitions wait for groups that have not read them yet.",
    idempotent=True,
)
