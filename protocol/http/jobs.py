"""The control calls of jobs that read and write whole ranges: to brokers and to metaservers.  Pure."""

from __future__ import annotations

from ..control import SubjectView
from ..operations import HideSubject, Publication, PublishSubject
from ..reading.bounds import AskBounds, BoundsList
from ..reprocess.holds import Held, SetHold
from .endpoint import Endpoint, Rights

PARTITION_BOUNDS = Endpoint(
    "POST",
    "/v1/partitions/bounds",
    AskBounds,
    BoundsList,
    Rights.ANY,
    "Where partitions begin and end, and where times and consumer groups are in them.",
    idempotent=True,
)
HOLD = Endpoint(
    "POST",
    "/v1/partitions/{id}/holds",
    SetHold,
    Held,
    Rights.READ,
    "Hold messages of a partition against retention for a job, renew that, or end it.",
    idempotent=True,
)
HIDE_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/hidden",
    HideSubject,
    SubjectView,
    Rights.ADMINISTER,
    "Create a hidden subject, to be published in this one; a repeat changes nothing.",
    idempotent=True,
)
PUBLISH_SUBJECT = Endpoint(
    "POST",
    "/v1/subjects/{subject}/publish",
    PublishSubject,
    Publication,
    Rights.ADMINISTER,
    "Publish a hidden subject; the metaserver completes it, and a repeat tells how far it is.",
    idempotent=True,
)
