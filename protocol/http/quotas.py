"""Bodies of the control calls about quotas of principals and limits of subjects. Pure."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from ..access.quota import Quota

PRINCIPAL: Final = "principal"
SUBJECT: Final = "subject"
QuotaKind = Literal["principal", "subject"]


class SetQuota(Struct, frozen=True, kw_only=True):
    """Limit a principal, or each subject that matches a pattern; this replaces earlier limits."""

    kind: QuotaKind
    name: str
    """A principal, or `*` for all without a quota of their own; or a subject or pattern."""
    quota: Quota
    """Rates of a principal; a subject has only bytes_per_s, of messages stored at each broker."""
    subjects: int = 0
    """Number of subjects that may match the pattern; 0: no limit."""
    scheduled_bytes: int = 0
    """Bytes of messages that wait for a later delivery, for all subjects of the name or pattern
    together, at each broker.
    """
    sessions: int = 0
    """Number of consumers that a principal may have at a time in all groups; 0: no limit."""


class UnsetQuota(Struct, frozen=True, kw_only=True):
    """Remove the limits of a principal or pattern."""

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
