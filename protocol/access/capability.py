"""Capabilities: a principal's rights, signed by a metaserver and valid for a few minutes. Pure.

    kc_ + base64url(signature of 64 bytes, msgpack of the Capability)

    holder = b""       a bearer capability, for HTTP requests
    holder = a key     only a caller that signs the broker's challenge with this key may use it:
                       the data plane

Times are those of the metaserver's wall clock. A broker receives the metaserver's time with every
heartbeat, so the clocks of hosts may differ.
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
"""The maximum length of the text in characters. It must fit into an HTTP header."""
GRANTS_MAX: Final = 50
GRANT_BYTES_MAX: Final = 3_500
"""The maximum total size, in bytes, of the names and patterns in all grants of a principal, whose
capability must fit into an HTTP header.
"""
CONTEXT: Final = b"keylane capability 1\0"
PROOF_CONTEXT: Final = b"keylane connection 1\0"
NO_CAPABILITY: Final = "no capability"
"""The `problem` of the error for a text that is not a capability, for example a token."""
_PREFIX = "kc_"


class Capability(Struct, frozen=True, array_like=True):
    """A principal's rights at the brokers of one cluster."""

    cluster: str
    key: str
    """The id of the key that signed it."""
    principal: str
    version: int
    """The version of the cluster's access rules. A later change to the principal's rights
    invalidates the capability.
    """
    ends_at_ms: int
    grants: tuple[AccessGrant, ...]
    holder: bytes = b""
    groups: tuple[str, ...] = ()
    """The principals of the groups whose rights are included. A change to the rights of one of them
    invalidates the capability, too.
    """
    quota: Quota = NO_QUOTA


class AccessNews(Struct, frozen=True, kw_only=True):
    """The keys and versions that a broker needs to check capabilities. Sent with every reply to a
    heartbeat.
    """

    cluster: str
    now_ms: int
    """The current time by the metaserver's wall clock, in milliseconds since 1970."""
    keys: dict[str, bytes]
    """Maps key ids to public keys, for the keys in use and for earlier ones whose capabilities may
    still be valid.
    """
    changed: dict[str, int] = {}
    """Maps principals to the version below which their capabilities are invalid. Only changes are
    listed that are newer than some capability that is still valid.
    """
    floor: int = 0
    """The version below which all capabilities are invalid."""
    subject_bytes: dict[str, int] = {}
    """Maps subjects or patterns to their limit in bytes per second at each broker."""
    scheduled_bytes: dict[str, int] = {}
    """Maps subjects or patterns to their limit for scheduled messages at each broker, in bytes. All
    subjects that match a pattern share its limit.
    """
    version: int = 0
    """The version of the access rules in the database, which increases with each change."""
    operators: dict[str, str] = {}
    """Maps token hashes to principals, for the tokens in the metaserver's settings. Brokers accept
    these tokens directly, because no metaserver issues capabilities while a lost database is being
    rebuilt.
    """


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Capability).decode


def encode_capability(capability: Capability) -> bytes:
    """Encode a capability; the signature covers CONTEXT and these bytes."""
    return _encode(capability)


def capability_text(packed: bytes, signature: bytes) -> str:
    """Return the capability as the text that callers send."""
    return _PREFIX + urlsafe_b64encode(signature + packed).decode().rstrip("=")


def parse_capability(text: str) -> tuple[Capability, bytes, bytes]:
    """
    Parse a text into the capability, its packed bytes and the signature, without verifying it.

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
            "this is not a capability of keylane", problem=NO_CAPABILITY
        ) from None


def check_current(
    capability: Capability,
    *,
    cluster: str,
    now_ms: int,
    changed_versions: Mapping[str, int],
    version_floor: int,
) -> None:
    """
    Check that a capability whose signature has been verified is still valid.

    Raises:
        UnauthenticatedError: the capability belongs to another cluster.
        CapabilityEndedError: the capability has expired, or the rights of its principal have
            changed.
    """
    if capability.cluster != cluster:
        raise UnauthenticatedError("the capability is of another cluster", problem="other cluster")
    principal = capability.principal
    if now_ms >= capability.ends_at_ms:
        raise CapabilityEndedError(
            f"the capability of {principal!r} has ended", principal=principal
        )
    latest = max(changed_versions.get(name, 0) for name in (principal, *capability.groups))
    if capability.version < max(version_floor, latest):
        raise CapabilityEndedError(
            f"the rights of {principal!r} have changed since the capability was made",
            principal=principal,
        )


def proof_bytes(nonce: bytes, address: str) -> bytes:
    """Return the bytes that a holder signs: the broker's challenge on this connection, and its
    address.
    """
    return PROOF_CONTEXT + nonce + b"\0" + address.encode()
