"""A backoff refuses what is no number."""

from __future__ import annotations

from typing import Any

import pytest

from keylane.protocol.backoff import Backoff
from keylane.protocol.errors import ConfigError


@pytest.mark.parametrize("factor", [True, False, "2", None, 0.5, float("nan"), float("inf"), 1_001])
def test_backoff_refuses_a_factor_that_is_no_number_in_its_range(factor: Any):
    with pytest.raises(ConfigError, match="factor must be a number from 1 to 1000"):
        Backoff(factor=factor)
