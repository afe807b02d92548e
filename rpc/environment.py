"""A client's environment: network, clock, random numbers, ids, and stop signals.

    argument `_environment`  ─▶  AMBIENT of the running program  ─▶  the operating system

Tests pass environments to clients; `keylane.testing` sets AMBIENT for the programs of its clusters,
which therefore need no changes to create their clients.

Ids of producers and consumer sessions must be unique: two clients with the same id would count as
one. So they come from the operating system when they are needed, and never from a generator that a
user may seed, copy or fork.
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
"""Function that returns a random number with the given number of bits."""
from_system: DrawBits = secrets.randbits


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A client's environment; by default it uses the operating system."""

    network: Network | None = None
    """The client's network; None: each opening creates a real one, and closes it."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random | None = None
    """Generator for pauses, and for partitions of messages without a key; None: each opening seeds
    its own.
    """
    draw_identity: DrawBits = from_system
    stop_signals: Callable[[], Stopping] = StopSignals
    in_place: bool = False
    """True if blocking handlers run in the event loop instead of threads."""

    def new_rng(self) -> random.Random:
        """Return the random generator for one opening of a client."""
        return self.rng or random.Random(secrets.randbits(64))


AMBIENT: ContextVar[Environment | None] = ContextVar("keylane environment", default=None)
"""The environment of the running program, if it has its own."""


def environment_of(given: Environment | None) -> Environment:
    """Return the environment for a client that is opened now; `given` was passed to its
    constructor.
    """
    return given or AMBIENT.get() or Environment()
