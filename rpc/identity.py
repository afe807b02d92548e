"""Draws the ids of producers and of consumer sessions.

Two clients with the same id would count as one. So ids come from the operating system when they
are needed, and never from a generator that a user may seed, copy or fork.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

DrawBits = Callable[[int], int]
"""Function that returns a number with the given count of random bits."""
from_system: DrawBits = secrets.randbits
