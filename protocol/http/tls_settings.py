"""How a client secures its connections.  Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """
    TLS of a client: every connection uses it, and the server's certificate must have the name that is connected to.

    The values are paths of PEM files.  Source: RFC 8446; host names as of RFC 9525.
    """

    ca: str
    """The certificate authority that the servers' certificates are of."""
    cert: str = ""
    """A client certificate, where servers want one."""
    key: str = ""
    """Its private key."""
