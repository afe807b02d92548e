"""A seed that catches each mutant, so that a test need not search; when it no longer does, the search goes on."""

from __future__ import annotations

CATCHES: dict[str, int] = {}
