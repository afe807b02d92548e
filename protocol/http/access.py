"""The bodies of the control calls for access control: tokens, grants, capabilities, quotas and the
audit log. Pure.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from ..access.quota import Quota
from ..access.rights import AccessGrant, Rights

LABEL_CHARS_MAX = 200
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Instant = Annotated[int, Meta(ge=0, le=1 << 53)]
HOLDER_BYTES = 32


class CreateToken(Struct, frozen=True, kw_only=True):
    """Create a token for a principal. A principal exists once it has a token or a grant."""

    principal: str
    label: Label = ""
    """The description of the token, for display."""
    begins_at_ms: Instant = 0
    """The wall-clock time from which the token is valid, in milliseconds since 1970; 0 means
    now.
    """
    ends_at_ms: Instant = 0
    """The wall-clock time at which the token expires, in milliseconds since 1970; 0 means never."""


class TokenView(Struct, frozen=True, kw_only=True):
    """The stored data about a token, which never includes the token itself."""

    token_id: int
    principal: str
    label: str
    made_at_ms: int
    begins_at_ms: int
    ends_at_ms: int
    revoked_at_ms: int = 0
    state: str
    """The state of the token: valid, revoked, ended, or not yet valid."""


class MadeToken(Struct, frozen=True, kw_only=True):
    """A new token; `token` is never shown again."""

    token: str
    view: TokenView


class TokenList(Struct, frozen=True, kw_only=True):
    """Tokens, ordered by id, the newest last."""

    tokens: list[TokenView]


class ChangeGrant(Struct, frozen=True, kw_only=True):
    """Grant a right to a principal, or revoke exactly this right with these patterns."""

    principal: str
    grant: AccessGrant


class GrantRow(Struct, frozen=True, order=True):
    """A right of a principal."""

    principal: str
    grant: AccessGrant


class GrantList(Struct, frozen=True, kw_only=True):
    """Rights ordered by principal."""

    grants: list[GrantRow]


class CheckAccess(Struct, frozen=True, kw_only=True):
    """Ask whether a principal has a right."""

    principal: str
    right: Rights
    subject: str = ""
    group: str = ""


class Decision(Struct, frozen=True, kw_only=True):
    """The answer to CheckAccess, with the grant that allows it."""

    allowed: bool
    by: AccessGrant | None = None


class AskCapability(Struct, frozen=True, kw_only=True):
    """Request capabilities for the caller."""

    holder: bytes = b""
    """The caller's Ed25519 public key of 32 bytes, for the data plane; b"" if none is needed."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """Signed capabilities with the caller's rights, which expire after `ends_in_ms`."""

    principal: str
    bearer: str
    """The capability for HTTP, for the header Authorization: Bearer …"""
    held: str = ""
    """The capability for the data plane, which is bound to the holder's key in the request."""
    ends_in_ms: int


TEXT_CHARS_MAX: Final = 200
EVENTS_MAX: Final = 500
"""The maximum number of events in a call and on a page."""
_Text = Annotated[str, Meta(max_length=TEXT_CHARS_MAX)]
_Number = Annotated[int, Meta(ge=0, le=1 << 53)]


class AuditEvent(Struct, frozen=True, kw_only=True):
    """An action of a caller, or its refusal. It never contains keys, values, tokens or
    capabilities.
    """

    at_ms: _Number
    """The time of the server's wall clock, in milliseconds since 1970."""
    who: _Text
    """The principal that acted; "" if it is unknown."""
    remote: _Text
    """The address of the caller's host."""
    did: _Text
    """The name of the call, with the names of its parameters but not their values."""
    subject: _Text
    group: _Text
    outcome: _Text
    """The outcome of the call: done or refused."""
    code: _Number = 0
    """The code of the error; 0 if there was none."""
    detail: _Text = ""
    times: _Number = 1
    """The number of occurrences. Equal refusals at one server within about a second are combined
    into one event.
    """
    server: _Text = ""
    """The server that recorded the event: its broker group, or `metaserver` and its address."""


class NoteAudit(Struct, frozen=True, kw_only=True):
    """Events that a broker reports."""

    events: Annotated[list[AuditEvent], Meta(max_length=EVENTS_MAX)]


class AuditRow(Struct, frozen=True, kw_only=True):
    """An event with the id under which it is stored."""

    audit_id: int
    event: AuditEvent


class AuditPage(Struct, frozen=True, kw_only=True):
    """Events, the newest first."""

    rows: list[AuditRow]
    before: int | None = None
    """The value of `before` for the call that returns older events; None if there are none."""


PRINCIPAL: Final = "principal"
SUBJECT: Final = "subject"
QuotaKind = Literal["principal", "subject"]


class SetQuota(Struct, frozen=True, kw_only=True):
    """Limit a principal, or each subject that matches a pattern. This replaces earlier limits."""

    kind: QuotaKind
    name: str
    """A principal, `*` for all principals without a quota of their own, or a subject or pattern."""
    quota: Quota
    """The rates of a principal. For subjects, only bytes_per_s is used, for the messages stored at
    each broker.
    """
    subjects: int = 0
    """The number of subjects that may match the pattern; 0 means no limit."""
    scheduled_bytes: int = 0
    """The size of scheduled messages at each broker, in bytes, for all subjects that match the name
    or pattern together; 0 means no limit.
    """
    sessions: int = 0
    """The number of concurrent consumers of a principal in all groups; 0 means no limit."""


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
