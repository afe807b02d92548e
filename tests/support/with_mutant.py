"""A plugin for pytest: the tests of a run meet the mutant that KEYLANE_MUTANT names."""

from __future__ import annotations

import os

from sim.mutants.bank import MUTANTS
from sim.mutants.mutant import Patches

NAME = "KEYLANE_MUTANT"


def pytest_configure() -> None:
    """Apply it before any test is imported."""
    if name := os.environ.get(NAME):
        MUTANTS[name].breaks(Patches())
