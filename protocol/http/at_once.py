"""Control calls that do for many at once what others do for one.  Pure."""

from __future__ import annotations

from ..control import HeartbeatAnswers, Heartbeats
from ..progress import TellGroups, ToldGroups
from .endpoint import Endpoint, Rights

HEARTBEATS = Endpoint(
    "POST",
    "/v1/consumers/heartbeats",
    Heartbeats,
    HeartbeatAnswers,
    Rights.CONSUME,
    "Renew several sessions; returns at once when the grants of one of them differ from its known_version.",
)
TELL_GROUPS = Endpoint(
    "POST",
    "/v1/partitions/groups",
    TellGroups,
    ToldGroups,
    Rights.CLUSTER,
    "Have retention of several partitions wait for groups that have not read them yet.",
    idempotent=True,
)
