"""Where clients take the ids from that others know them by: producers theirs, consumers those of their sessions.

Whoever uses an id a second time is taken for its first owner.  So they come from the operating system, when they are
needed, and never from a generator that a user may seed, copy or fork.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

DrawBits = Callable[[int], int]
"""So many random bits, as a number."""
from_system: DrawBits = secrets.randbits
