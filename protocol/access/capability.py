"""A capability is a statement, signed by a metaserver, of what a principal may do for some minutes.
Pure.

    kc_ + base64url(signature of 64 bytes, msgpack of the Capability)

    holder = b""       anybody who presents it may use it: HTTP requests
    holder = a key     only a caller that signs the broker's challenge with this key may use it:
                       the data plane

Times are those of the metaserver's calendar. A broker receives that time with every heartbeat, so
the clocks of hosts may differ.
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
"""Most characters of the text, so that it fits into an HTTP header."""
GRANTS_MAX: Final = 50
GRANT_BYTES_MAX: Final = 3_500
"""Most bytes of names and patterns in all grants of a principal, so that its capability fits into
an HTTP header.
"""
CONTEXT: Final = b"keylane capability 1\0"
PROOF_CONTEXT: Final = b"keylane connection 1\0"
NO_CAPABILITY: Final = "no capability"
"""Reason of the error when a text is something else, such as a token."""
_PREFIX = "kc_"


class Capability(Struct, frozen=True, array_like=True):
    """The rights of a principal at the brokers of one cluster."""

    cluster: str
    key: str
    """Id of the key that signed it."""
    principal: str
    version: int
    """Version of the cluster's access rules; a later change of the principal ends the capability.
    """
    ends_at_ms: int
    grants: tuple[AccessGrant, ...]
    holder: bytes = b""
    groups: tuple[str, ...] = ()
    """Principals of groups whose rights are among the grants; a change of one ends the capability
    too.
    """
    quota: Quota = NO_QUOTA


class AccessNews(Struct, frozen=True, kw_only=True):
    """The facts by which a broker judges capabilities; every answer to a heartbeat carries them."""

    cluster: str
    now_ms: int
    """Current time of the metaserver's calendar."""
    keys: dict[str, bytes]
    """Public key by key id, for each key that signs now or whose capabilities have not all ended.
    """
    changed: dict[str, int] = {}
    """Version below which a principal's capabilities have ended, by principal. Only changes that
    some valid capability may predate are listed.
    """
    floor: int = 0
    """The version below which every capability has ended."""
    subject_bytes: dict[str, int] = {}
    """Bytes a second that each subject takes at each broker, by subject or pattern."""
    scheduled_bytes: dict[str, int] = {}
    """Bytes of scheduled messages that all such subjects together may have at each broker, by
    subject or pattern.
    """
    version: int = 0
    """Version of the access rules in the database; it rises with each change."""
    operators: dict[str, str] = {}
    """Principal by hash of its token, for the tokens in the metaserver's settings. A broker
    accepts these tokens themselves, so that a lost database can be rebuilt while no metaserver
    issues capabilities.
    """


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Capability).decode


def pack(capability: Capability) -> bytes:
    """Return the bytes that are signed, after CONTEXT."""
    return _encode(capability)


def text_of(packed: bytes, signature: bytes) -> str:
    """Return the text that callers send."""
    return _PREFIX + urlsafe_b64encode(signature + packed).decode().rstrip("=")


def parts_of(text: str) -> tuple[Capability, bytes, bytes]:
    """
    Return the capability in a text, which is not verified yet, its packed bytes, and the signature.

    Raises:
        UnauthenticatedError: the text is not a capability.
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
        UnauthenticatedError: it belongs to another cluster.
        CapabilityEndedError: its time is over, or the rights of its principal have changed.
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
    """Return what a holder signs: the broker's challenge on this connection, and its address."""
    return PROOF_CONTEXT + nonce + b"\0" + address.encode()
