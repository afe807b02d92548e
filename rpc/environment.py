"""What a client takes from its process: a network, a clock, random numbers, ids.  Tests pass others.

`Producer` and `Consumer` take one as `_environment`; programs leave it out.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass, field

from ..protocol.clock import Clock, SystemClock
from .identity import DrawBits, from_system
from .network import Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The process itself, in every field that is not given."""

    network: Network | None = None
    """None: each opening makes a real one, and closes it."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random | None = None
    """For pauses and for messages without a key.  None: each opening seeds one of its own."""
    draw_identity: DrawBits = from_system

    def new_rng(self) -> random.Random:
        """The random generator of one opening."""
        return self.rng or random.Random(secrets.randbits(64))
