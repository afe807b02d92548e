"""The control calls of a metaserver about access: tokens, grants, capabilities.  Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..access.capability import AccessNews
from ..access.rights import AccessGrant
from ..control import Done
from .audit import AUDIT_CALLS
from .endpoint import Endpoint, Rights
from .quotas import QUOTA_CALLS

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
    """AccessGrant a right to a principal, or take it back: exactly this one, with its patterns."""

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


CREATE_TOKEN = Endpoint(
    "POST", "/v1/access/tokens", CreateToken, MadeToken, Rights.ADMINISTER, "Make a token."
)
TOKENS = Endpoint(
    "GET",
    "/v1/access/tokens",
    None,
    TokenList,
    Rights.ADMINISTER,
    "All tokens, or those of a principal.",
    query=("principal",),
)
REVOKE_TOKEN = Endpoint(
    "POST",
    "/v1/access/tokens/{id}/revoke",
    None,
    TokenView,
    Rights.ADMINISTER,
    "Revoke a token; brokers know within seconds, and a repeat changes nothing.",
    idempotent=True,
)
GRANT = Endpoint(
    "POST",
    "/v1/access/grants",
    ChangeGrant,
    Done,
    Rights.ADMINISTER,
    "AccessGrant a right; a repeat changes nothing.",
    idempotent=True,
)
REVOKE_GRANT = Endpoint(
    "POST",
    "/v1/access/grants/revoke",
    ChangeGrant,
    Done,
    Rights.ADMINISTER,
    "Take a right back; a repeat changes nothing.",
    idempotent=True,
)
GRANTS = Endpoint(
    "GET",
    "/v1/access/grants",
    None,
    GrantList,
    Rights.ADMINISTER,
    "All rights, or those of a principal.",
    query=("principal",),
)
CHECK_ACCESS = Endpoint(
    "POST",
    "/v1/access/check",
    CheckAccess,
    Decision,
    Rights.ADMINISTER,
    "Whether a principal has a right.",
    idempotent=True,
)
CAPABILITY = Endpoint(
    "POST",
    "/v1/access/capability",
    AskCapability,
    Capabilities,
    Rights.KNOWN,
    "Signed rights of the caller, which brokers believe for a few minutes.",
    idempotent=True,
)
ACCESS_NEWS = Endpoint(
    "GET",
    "/v1/access/news",
    None,
    AccessNews,
    Rights.CLUSTER,
    "What a broker has to know to judge capabilities.",
)
ACCESS = (
    CREATE_TOKEN, TOKENS, REVOKE_TOKEN, GRANT, REVOKE_GRANT, GRANTS, CHECK_ACCESS, CAPABILITY, ACCESS_NEWS,
    *QUOTA_CALLS, *AUDIT_CALLS,
)  # fmt: skip
