"""A capability: what a metaserver has signed that a principal may do, for a few minutes; and its
text.  Pure.

    kc_ + base64url(signature of 64 bytes, msgpack of the Capability)

    holder = b""       a bearer of it is believed: HTTP requests
    holder = a key     a caller that signs the broker's challenge with that key is believed: the data plane

Times are those of the metaserver's calendar; a broker hears them with every heartbeat, so clocks of
hosts may differ.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Struct

from ..errors import CapabilityEndedError, UnauthenticatedError
from .quota import NO_QUOTA, Quota
from .rights import AccessGrant

CAPABILITY_MS: Final = 300_000
SIGNATURE_BYTES: Final = 64
TEXT_CHARS_MAX: Final = 8_000
"""A header of HTTP holds it."""
GRANTS_MAX: Final = 50
GRANT_BYTES_MAX: Final = 3_500
"""Names and patterns of all grants of a principal: its capability fits in a header of HTTP."""
CONTEXT: Final = b"keylane capability 1\0"
PROOF_CONTEXT: Final = b"keylane connection 1\0"
NO_CAPABILITY: Final = "no capability"
"""Why text that is another thing, as a token, is refused."""
_PREFIX = "kc_"


class Capability(Struct, frozen=True, array_like=True):
    """What a principal may do at the brokers of one cluster."""

    cluster: str
    key: str
    """The id of the key that signed it."""
    principal: str
    version: int
    """Of the cluster's access: a later change of the principal ends it."""
    ends_at_ms: int
    grants: tuple[AccessGrant, ...]
    holder: bytes = b""
    groups: tuple[str, ...] = ()
    """Principals of groups, whose rights are among the grants: their changes end it too."""
    quota: Quota = NO_QUOTA


class AccessNews(Struct, frozen=True, kw_only=True):
    """What a broker has to know to judge capabilities; it comes with every answer to a
    heartbeat.
    """

    cluster: str
    now_ms: int
    """The metaserver's calendar."""
    keys: dict[str, bytes]
    """Id → public key of those that sign now, or signed what has not ended."""
    changed: dict[str, int] = {}
    """Principal → the version below which its capabilities have ended; of changes that old
    capabilities may predate.
    """
    floor: int = 0
    """The version below which every capability has ended."""
    subject_bytes: dict[str, int] = {}
    """Subject or pattern → bytes a second that each such subject takes at each broker."""
    scheduled_bytes: dict[str, int] = {}
    """Subject or pattern → bytes of scheduled messages that all such subjects have together at each
    broker.
    """
    version: int = 0
    """Of access, in the database; rises with each change."""
    operators: dict[str, str] = {}
    """Hash of a token → its principal, of the tokens in the metaserver's settings: a broker takes
    these tokens themselves, so that a lost database can be rebuilt while no metaserver gives
    capabilities.
    """


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Capability).decode


def pack(capability: Capability) -> bytes:
    """The bytes that are signed, behind CONTEXT."""
    return _encode(capability)


def text_of(packed: bytes, signature: bytes) -> str:
    """The text that callers send."""
    return _PREFIX + urlsafe_b64encode(signature + packed).decode().rstrip("=")


def parts_of(text: str) -> tuple[Capability, bytes, bytes]:
    """
    The capability in a text, not verified yet, its packed bytes, and the signature.

    Raises:
        UnauthenticatedError: it is none.
    """
    try:
        if not text.startswith(_PREFIX) or len(text) > TEXT_CHARS_MAX:
            raise ValueError("not a capability")
        data = urlsafe_b64decode(text[3:] + "=" * (-len(text[3:]) % 4))
        packed = data[SIGNATURE_BYTES:]
        return _decode(packed), packed, data[:SIGNATURE_BYTES]
    except (ValueError, msgspec.MsgspecError, RecursionError):
        raise UnauthenticatedError(
            "what was given is no capability of keylane", problem=NO_CAPABILITY
        ) from None


def check_current(
    capability: Capability,
    *,
    cluster: str,
    now_ms: int,
    changed: Mapping[str, int],
    floor: int,
) -> None:
    """
    Check a capability whose signature is right.

    Raises:
        UnauthenticatedError: it is of another cluster.
        CapabilityEndedError
    """
    if capability.cluster != cluster:
        raise UnauthenticatedError("the capability is of another cluster", problem="other cluster")
    principal = capability.principal
    if now_ms >= capability.ends_at_ms:
        raise CapabilityEndedError(
            f"the capability of {principal!r} has ended", principal=principal
        )
    latest = max(changed.get(name, 0) for name in (principal, *capability.groups))
    if capability.version < max(floor, latest):
        raise CapabilityEndedError(
            f"the rights of {principal!r} have changed since the capability was made",
            principal=principal,
        )


def proof_of(nonce: bytes, address: str) -> bytes:
    """What a holder signs: the challenge of this connection to this broker."""
    return PROOF_CONTEXT + nonce + b"\0" + address.encode()
