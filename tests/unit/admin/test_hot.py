"""Which partitions of a subject are hot."""

import pytest

from keylane.admin.hot import HOT_BYTES_PER_S, HOT_MESSAGES_PER_S, find_hot

MESSAGES, BYTES = HOT_MESSAGES_PER_S, HOT_BYTES_PER_S


@pytest.mark.parametrize(
    ("rates", "hot"),
    [
        ({}, set()),
        ({1: (1e6, 1e9)}, set()),  # nothing to compare it with
        ({1: (10 * MESSAGES, 0), 2: (MESSAGES, 0)}, {1}),
        ({1: (3 * MESSAGES, 0), 2: (MESSAGES, 0)}, set()),  # not more than three times
        ({1: (0, 10 * BYTES), 2: (0, BYTES), 3: (0, BYTES)}, {1}),
        ({1: (MESSAGES, BYTES), 2: (0, 0), 3: (0, 0)}, set()),  # any broker can store that
        ({1: (MESSAGES + 1, 0), 2: (0, BYTES + 1), 3: (0, 0)}, {1, 2}),
        ({1: (9 * MESSAGES, 0), 2: (9 * MESSAGES, 0), 3: (0, 0)}, set()),
        (dict.fromkeys(range(8), (5 * MESSAGES, 5 * BYTES)), set()),
    ],
)
def test_partition_is_hot_when_it_stores_far_more_than_the_others(rates, hot):
    assert find_hot(rates) == hot
