"""A pooler in transaction mode is told from PostgreSQL by the processes of the server that two
connections get.
"""

from __future__ import annotations

import pytest

from keylane.metaserver.sql.postgres import shares_sessions


@pytest.mark.parametrize(
    "shown",
    [
        [(0, 71), (1, 71), (0, 71), (1, 71)],  # one session for both
        [(0, 71), (1, 72), (0, 72), (1, 71)],  # in turn
        [(0, 71), (1, 72), (0, 73), (1, 74)],  # a new one each time
        [(0, 71), (1, 72), (0, 71), (1, 71)],  # another client had it at first
    ],
)
def test_sessions_are_shared_when_a_process_has_several_connections_or_a_connection_several(shown):
    assert shares_sessions(shown)


def test_sessions_are_not_shared_when_each_connection_keeps_its_process():
    assert not shares_sessions([(0, 71), (1, 72), (0, 71), (1, 72)])
