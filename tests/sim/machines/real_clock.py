"""The clock of the machine that tests run on: what a simulated program reads of it differs at each
replay of the seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from keylane.protocol.clock import SystemClock

READINGS = ("boot_ns", "boot_ms", "wall_ns", "wall_ms")


def _refuse() -> NoReturn:
    raise AssertionError("a simulated program reads the clock of the real machine")


@contextmanager
def no_real_clock() -> Iterator[None]:
    """A program that reads it meanwhile fails."""
    real = {name: vars(SystemClock)[name] for name in READINGS}
    for name in READINGS:
        setattr(SystemClock, name, staticmethod(_refuse))
    try:
        yield
    finally:
        for name, reading in real.items():
            setattr(SystemClock, name, reading)
