"""The result of `meta verify`: named checks of the metaserver's database against the brokers.
Pure.
"""

from __future__ import annotations

from msgspec import Struct


class CheckView(Struct, frozen=True, kw_only=True):
    """One check."""

    code: str
    """V01 to V13; the meaning of a code never changes."""
    name: str
    claim: str
    """The property that is checked."""
    violations: list[str] = []
    """The first hundred violations, as sentences."""
    violations_total: int = 0


class Verification(Struct, frozen=True, kw_only=True):
    """Every check, in the order of their codes."""

    ok: bool
    checks: list[CheckView]
