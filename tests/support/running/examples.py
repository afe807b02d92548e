"""How many examples hypothesis tries of a property: a sixth in `make test`, all with `pytest
--whole`.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

EXAMPLES = 100
"""Where a test says no number."""
SHARE = 6
EXAMPLES_MIN = 3
WHOLE, SAMPLE = "whole", "sample"


def choose_examples(*, whole: bool) -> None:
    """Call it before the tests are imported, because their settings are made then."""
    # A deadline of an example measures the load of the machine.
    settings.register_profile(WHOLE, max_examples=EXAMPLES, deadline=None)
    settings.register_profile(SAMPLE, max_examples=-(-EXAMPLES // SHARE), deadline=None)
    settings.load_profile(WHOLE if whole else SAMPLE)


def examples(count: int) -> int:
    """`count` with `--whole`, else a sixth of it."""
    return (
        count
        if settings.get_current_profile_name() == WHOLE
        else max(EXAMPLES_MIN, -(-count // SHARE))
    )


def has_examples(item: pytest.Item) -> bool:
    """True of a test of hypothesis: `--whole` runs more of it."""
    test = getattr(item, "obj", None)
    if getattr(test, "is_hypothesis_test", False):
        return True
    code = getattr(test, "__code__", None)
    return code is not None and run_state_machine_as_test.__name__ in code.co_names
