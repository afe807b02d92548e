"""The result of `meta verify`: named checks of the metaserver's database against the brokers.  Pure."""

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
