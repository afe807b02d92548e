"""The principal in a client's certificate: its one URI, else its common name.

subjectAltName URI spiffe://shop/eu ─▶ cert:spiffe://shop/eu          CN shop ─▶ cert:shop
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...protocol.access.principals import CERT, is_outside


class Peer(NamedTuple):
    """A certificate that OpenSSL has verified: its principal, and its end in milliseconds since
    1970.
    """

    principal: str
    ends_at_ms: int


def peer_of(certificate: Mapping[str, Any] | None) -> Peer | None:
    """
    Return the peer with a certificate; None: there is none, or it has no name that a principal may
    have.

    Args:
        certificate: result of `SSLSocket.getpeercert`.
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
    if len(chosen) != 1:  # it is not clear which of them is meant
        return None
    principal = f"{CERT}{chosen[0]}"
    if not is_outside(principal):
        return None
    return Peer(principal, int(ssl.cert_time_to_seconds(certificate["notAfter"])) * 1000)
