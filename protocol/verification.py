"""What a look at the whole cluster found: named checks between the metaserver's database and the brokers.  Pure.

GET  /v1/verify     –     → Verification      (to the metaserver)
"""

from __future__ import annotations

from msgspec import Struct


class CheckView(Struct, frozen=True, kw_only=True):
    """One check."""

    code: str
    """V01 to V13; never changes its meaning."""
    name: str
    claim: str
    """What has to be so."""
    violations: list[str] = []
    """Where it is not so; the first hundred."""
    violations_total: int = 0


class Verification(Struct, frozen=True, kw_only=True):
    """Every check, in the order of their codes."""

    ok: bool
    checks: list[CheckView]
