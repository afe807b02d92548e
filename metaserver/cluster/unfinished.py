"""Defines the SQL condition for unfinished operations, which still have work for brokers."""

from __future__ import annotations

import sqlalchemy as sa

from ...protocol.operations import OperationState
from ..sql.schema import operations, steps

UNFINISHED_STATES = tuple(state for state in OperationState if state is not OperationState.DONE)
"""States in which brokers may have work. Thanks to the index on the state, the query does not slow
down with the growing number of finished operations.
"""
_remaining_steps = sa.select(steps.c.operation_id).where(
    steps.c.operation_id == operations.c.operation_id, sa.not_(steps.c.done)
)
UNFINISHED = sa.and_(
    operations.c.state.in_(UNFINISHED_STATES),
    # A canceled operation without remaining steps is finished, but its row is kept.
    sa.or_(
        operations.c.state != OperationState.CANCELED,
        sa.exists(_remaining_steps.correlate(operations)),
    ),
)
"""True for a row of `operations` if brokers still have work; a driver may already be running it."""
