"""The advice on an option that there is not."""

from __future__ import annotations

import pytest

from keylane.spark.shared_options import advice

NAMES = ("meta", "subject", "partitions", "timeoutMs")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("TIMEOUT", "unknown; did you mean timeoutMs?"),
        ("kafka.bootstrap.servers", "unknown; did you mean meta?"),
        ("topic", "unknown; did you mean subject?"),
        ("startingOffsets", "unknown; there are meta, subject, partitions, timeoutMs"),
        ("zzz", "unknown; there are meta, subject, partitions, timeoutMs"),
    ],
)
def test_advice_is_the_name_that_was_meant_or_all_names(name: str, told: str):
    """Names of other sources are known, and told only where there is such an option."""
    assert advice(name, NAMES) == told


def test_token_is_no_option():
    assert "tokenFile" in advice("Token", NAMES)
