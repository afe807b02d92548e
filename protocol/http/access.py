"""Bodies of the control calls about access: tokens, grants, capabilities.  Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..access.rights import AccessGrant, Rights

LABEL_CHARS_MAX = 200
Label = Annotated[str, Meta(max_length=LABEL_CHARS_MAX)]
Instant = Annotated[int, Meta(ge=0, le=1 << 53)]
HOLDER_BYTES = 32


class CreateToken(Struct, frozen=True, kw_only=True):
    """Make a token of a principal; the principal begins with its first token or grant."""

    principal: str
    label: Label = ""
    """For people."""
    begins_at_ms: Instant = 0
    """By the calendar, in milliseconds since 1970; 0: at once."""
    ends_at_ms: Instant = 0
    """0: it does not end by itself."""


class TokenView(Struct, frozen=True, kw_only=True):
    """A token as it is stored; the token itself is not."""

    token_id: int
    principal: str
    label: str
    made_at_ms: int
    begins_at_ms: int
    ends_at_ms: int
    revoked_at_ms: int = 0
    state: str
    """valid, revoked, ended, or not yet valid."""


class MadeToken(Struct, frozen=True, kw_only=True):
    """A new token; `token` is never shown again."""

    token: str
    view: TokenView


class TokenList(Struct, frozen=True, kw_only=True):
    """Tokens by id; the newest last."""

    tokens: list[TokenView]


class ChangeGrant(Struct, frozen=True, kw_only=True):
    """Grant a right to a principal, or take it back: exactly this one, with its patterns."""

    principal: str
    grant: AccessGrant


class GrantRow(Struct, frozen=True, order=True):
    """A right of a principal."""

    principal: str
    grant: AccessGrant


class GrantList(Struct, frozen=True, kw_only=True):
    """Rights by principal."""

    grants: list[GrantRow]


class CheckAccess(Struct, frozen=True, kw_only=True):
    """Whether a principal has a right."""

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
    """The Ed25519 public key of the caller, for the data plane: 32 bytes; b"": none is needed."""


class Capabilities(Struct, frozen=True, kw_only=True):
    """Signed texts with the rights of the caller; they end after `ends_in_ms`."""

    principal: str
    bearer: str
    """For HTTP: Authorization: Bearer …"""
    held: str = ""
    """For the data plane, with the key that was asked for."""
    ends_in_ms: int
