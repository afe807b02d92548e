"""Bodies of the control calls about access: tokens, grants, capabilities. Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..access.rights import AccessGrant, Rights

LABEL_CHARS_MAX = 200
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Instant = Annotated[int, Meta(ge=0, le=1 << 53)]
HOLDER_BYTES = 32


class CreateToken(Struct, frozen=True, kw_only=True):
    """Create a token for a principal; a principal exists from its first token or grant on."""

    principal: str
    label: Label = ""
    """Description for people."""
    begins_at_ms: Instant = 0
    """Time of the calendar from which it is valid, in milliseconds since 1970; 0: at once."""
    ends_at_ms: Instant = 0
    """Wall-clock time of its expiry, in milliseconds since 1970; 0: it does not expire.
    """


class TokenView(Struct, frozen=True, kw_only=True):
    """What is stored about a token; never the token itself."""

    token_id: int
    principal: str
    label: str
    made_at_ms: int
    begins_at_ms: int
    ends_at_ms: int
    revoked_at_ms: int = 0
    state: str
    """State of the token: valid, revoked, ended, or not yet valid."""


class MadeToken(Struct, frozen=True, kw_only=True):
    """A new token; `token` is never shown again."""

    token: str
    view: TokenView


class TokenList(Struct, frozen=True, kw_only=True):
    """Tokens ordered by id, the newest last."""

    tokens: list[TokenView]


class ChangeGrant(Struct, frozen=True, kw_only=True):
    """Grant a right to a principal, or revoke it: exactly this right, with its patterns."""

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
    """Ask for capabilities of the caller."""

    holder: bytes = b""
    """The caller's Ed25519 public key of 32 bytes, for the data plane; b"": none is needed."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """Signed texts with the rights of the caller; they end after `ends_in_ms`."""

    principal: str
    bearer: str
    """Capability for HTTP, for the header Authorization: Bearer …"""
    held: str = ""
    """Capability for the data plane, bound to the holder's key of the request."""
    ends_in_ms: int
