"""The environment of a client: network, clock, random numbers, ids, and stop signals.

    argument `_environment`  ─▶  AMBIENT of the running program  ─▶  the operating system

Tests pass environments to clients. `keylane.testing` sets AMBIENT for the programs of its clusters,
so that they create their clients as usual.

Ids of producers and consumer sessions must be unique, because two clients with the same id would
count as one. So the ids come from the operating system when they are needed, never from a generator
that a user may seed, copy or fork.
"""

from __future__ import annotations

import random
import secrets
import socket
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..protocol.clock import Clock, SystemClock
from .loop_binding import process_id
from .network import Network
from .stop_signals import Stopping, StopSignals

DrawBits = Callable[[int], int]
"""A function that returns a random number with the given number of bits."""
from_system: DrawBits = secrets.randbits


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A client's environment; by default it uses the operating system."""

    network: Network | None = None
    """The client's network. If None, each opening creates a real one and closes it later."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random | None = None
    """The generator for pauses, and for choosing partitions for messages without a key. If None,
    each opening seeds its own.
    """
    draw_identity: DrawBits = from_system
    stop_signals: Callable[[], Stopping] = StopSignals
    in_place: bool = False
    """True if blocking handlers run in the event loop instead of in threads."""

    def new_rng(self) -> random.Random:
        """Return the random number generator for one opening of a client."""
        return self.rng or random.Random(secrets.randbits(64))


AMBIENT: ContextVar[Environment | None] = ContextVar("keylane environment", default=None)
"""The environment of the running program, if it has its own."""


def process_name() -> str:
    """Return the host's name and the process id, by which operators know a client."""
    return f"{socket.gethostname()}:{process_id()}"


def environment_of(given: Environment | None) -> Environment:
    """Return the environment for a client that is being opened; `given` was passed to its
    constructor.
    """
    return given or AMBIENT.get() or Environment()
