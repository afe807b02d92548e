"""Finds the principal in a client certificate: its only URI or, if it has no URI, its only common
name.

subjectAltName URI spiffe://shop/eu ─▶ cert:spiffe://shop/eu          CN shop ─▶ cert:shop
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...protocol.access.principals import CERT, is_outside


class Peer(NamedTuple):
    """A client whose certificate has been verified by OpenSSL."""

    principal: str
    ends_at_ms: int
    """When the certificate expires, in milliseconds since 1970."""


def peer_of(certificate: Mapping[str, Any] | None) -> Peer | None:
    """
    Return the peer with this certificate, or None if there is no certificate or it names no valid
    principal.

    Args:
        certificate: the result of `SSLSocket.getpeercert`.
    """
    if not certificate or "notAfter" not in certificate:
        return None
    uris = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "URI"]
    names = [
        value
        for part in certificate.get("subject", ())
        for kind, value in part
        if kind == "commonName"
    ]
    candidates = uris or names
    if len(candidates) != 1:  # missing or ambiguous
        return None
    principal = f"{CERT}{candidates[0]}"
    if not is_outside(principal):
        return None
    return Peer(principal, int(ssl.cert_time_to_seconds(certificate["notAfter"])) * 1000)
