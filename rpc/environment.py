"""The environment of a client: its network, clock, random numbers, ids, and stop signals.

    argument `_environment`  ─▶  that of the code that opens the client (AMBIENT)  ─▶  the machine's

Tests give some clients another one; `keylane.testing` sets AMBIENT in the programs of its clusters,
so that code under test makes its clients as always.

Draws the ids of producers and of consumer sessions.

Two clients with the same id would count as one. So ids come from the operating system when they
are needed, and never from a generator that a user may seed, copy or fork.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..protocol.clock import Clock, SystemClock
from .network import Network
from .stop_signals import Stopping, StopSignals

DrawBits = Callable[[int], int]
"""Function that returns a number with the given count of random bits."""
from_system: DrawBits = secrets.randbits


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """An environment, which uses the process itself for every field that is not given."""

    network: Network | None = None
    """Network of the client; None: each opening makes a real one, and closes it."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random | None = None
    """Generator for pauses and for messages without a key; None: each opening seeds its own."""
    draw_identity: DrawBits = from_system
    stop_signals: Callable[[], Stopping] = StopSignals
    in_place: bool = False
    """True if blocking handlers run in the event loop, one at a time, not in threads."""

    def new_rng(self) -> random.Random:
        """Return the random generator of one opening."""
        return self.rng or random.Random(secrets.randbits(64))


AMBIENT: ContextVar[Environment | None] = ContextVar("keylane environment", default=None)
"""Environment of the running program, if it has its own."""


def environment_of(given: Environment | None) -> Environment:
    """Return the environment of a client that opens now; `given` was passed when it was made."""
    return given or AMBIENT.get() or Environment()
