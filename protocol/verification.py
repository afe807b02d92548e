"""The result of `meta verify`: named checks of the metaserver's database against the brokers.
Pure.
"""

from __future__ import annotations

from msgspec import Struct


class CheckView(Struct, frozen=True, kw_only=True):
    """The result of one check."""

    code: str
    """The code of the check, from V01 to V13. The meaning of a code never changes."""
    name: str
    claim: str
    """The property that is checked, as a sentence."""
    violations: list[str] = []
    """The first hundred violations, as sentences."""
    violations_total: int = 0


class Verification(Struct, frozen=True, kw_only=True):
    """The results of all checks, ordered by code."""

    ok: bool
    checks: list[CheckView]
