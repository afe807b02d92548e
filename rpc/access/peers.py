"""The principal that a client's certificate is of: its one URI, else its common name.

subjectAltName URI spiffe://shop/eu ─▶ cert:spiffe://shop/eu          CN shop ─▶ cert:shop
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...protocol.access.principals import CERT, is_outside


class Peer(NamedTuple):
    """A certificate that OpenSSL has verified: its principal, and its end by the calendar in
    milliseconds.
    """

    principal: str
    ends_at_ms: int


def peer_of(certificate: Mapping[str, Any] | None) -> Peer | None:
    """
    Whose certificate it is; None: there is none, or it has no name that a principal may have.

    Args:
        certificate: as `SSLSocket.getpeercert` gives it.
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
    chosen = uris or names
    if len(chosen) != 1:  # which of them was meant?
        return None
    principal = f"{CERT}{chosen[0]}"
    if not is_outside(principal):
        return None
    return Peer(principal, int(ssl.cert_time_to_seconds(certificate["notAfter"])) * 1000)
