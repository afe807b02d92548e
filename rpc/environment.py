"""What a client takes from its process: a network, a clock, random numbers, ids, the signals to
stop.

    given as `_environment`  ─▶  that of the code that opens the client (AMBIENT)  ─▶  the machine's
        own

Tests give some clients another; `keylane.testing` sets AMBIENT in the programs of its clusters, so
that code under test makes its clients as always.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from ..protocol.clock import Clock, SystemClock
from .identity import DrawBits, from_system
from .network import Network
from .stop_signals import Stopping, StopSignals


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The process itself, in every field that is not given."""

    network: Network | None = None
    """None: each opening makes a real one, and closes it."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random | None = None
    """For pauses and for messages without a key.  None: each opening seeds one of its own."""
    draw_identity: DrawBits = from_system
    stop_signals: Callable[[], Stopping] = StopSignals
    in_place: bool = False
    """Handlers that block run in the event loop, one at a time, and in no threads."""

    def new_rng(self) -> random.Random:
        """The random generator of one opening."""
        return self.rng or random.Random(secrets.randbits(64))


AMBIENT: ContextVar[Environment | None] = ContextVar("keylane environment", default=None)
"""That of the program that runs now, if it has one of its own."""


def environment_of(given: Environment | None) -> Environment:
    """The environment of a client that opens now; `given` is what it was made with."""
    return given or AMBIENT.get() or Environment()
