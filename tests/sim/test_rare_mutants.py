"""Mutants that few seeds show: a test of the rule fails with each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sim.mutants.rare import CAUGHT_BY
from support.with_mutant import NAME

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", CAUGHT_BY)
def test_rule_is_tested_when_few_seeds_show_its_mutant(mutant: str):
    test = f"tests/{CAUGHT_BY[mutant]}"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "support.with_mutant", test],
        cwd=ROOT,
        env=os.environ | {NAME: mutant, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout
    assert "assert" in ran.stdout or "DID NOT RAISE" in ran.stdout, ran.stdout
