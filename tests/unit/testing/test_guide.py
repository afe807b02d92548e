"""The examples of docs/TESTING.md are tests that pass, as a user's own pytest runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "TESTING.md"
EXAMPLES = 6
"""Tests on the page."""
pytest_plugins = ["pytester"]


def _examples() -> str:
    """The blocks of the page, as one file."""
    return "\n".join(re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))


def test_examples_pass_where_asyncio_has_its_default_mode(pytester: pytest.Pytester):
    """This project's own tests run in its other one."""
    pytester.makepyfile(test_guide=_examples())
    result = pytester.runpytest_subprocess("--keylane-seed=random", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=EXAMPLES, warnings=result.parseoutcomes().get("warnings", 0))


def test_failure_prints_the_seed_and_what_is_wrong_with_a_marker(pytester: pytest.Pytester):
    """Without any plugin for asyncio, too."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.keylane(seed=42)
        async def test_fails(keylane_cluster):
            assert keylane_cluster.seed == 0

        @pytest.mark.keylane(7)
        async def test_is_not_run(keylane_cluster): ...
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, errors=1)
    said = result.stdout.str()
    assert "keylane.testing: seed 42, after 0.0" in said
    assert "the options of pytest.mark.keylane have names" in said
