"""Bodies of the control calls about quotas of principals and limits of subjects.  Pure."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from ..access.quota import Quota

PRINCIPAL: Final = "principal"
SUBJECT: Final = "subject"
QuotaKind = Literal["principal", "subject"]


class SetQuota(Struct, frozen=True, kw_only=True):
    """Limit a principal, or each subject that a pattern means, in place of the limits before."""

    kind: QuotaKind
    name: str
    """A principal, `*` for all that have no quota of their own; or a subject or pattern."""
    quota: Quota
    """Of a subject it has bytes_per_s alone: of messages stored, at each broker."""
    subjects: int = 0
    """Of a pattern: how many subjects there may be of it; 0: no limit."""
    scheduled_bytes: int = 0
    """Of a subject or pattern: bytes of messages that wait for a later delivery, of all its
    subjects together, at each broker.
    """
    sessions: int = 0
    """Of a principal: its consumers at a time, of all groups together; 0: no limit."""


class UnsetQuota(Struct, frozen=True, kw_only=True):
    """End the limits of a principal or pattern."""

    kind: QuotaKind
    name: str


class QuotaRow(Struct, frozen=True, order=True):
    """The limits of a principal or pattern."""

    kind: QuotaKind
    name: str
    bytes_per_s: int
    requests_per_s: int
    connections: int
    subjects: int = 0
    scheduled_bytes: int = 0
    sessions: int = 0


class QuotaList(Struct, frozen=True, kw_only=True):
    """All limits, sorted."""

    quotas: list[QuotaRow]
