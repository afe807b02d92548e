"""The condition for unfinished operations, for which brokers have something to do. SQL."""

from __future__ import annotations

import sqlalchemy as sa

from ...protocol.operations import OperationState
from ..sql.schema import operations, steps

UNDER_WAY = tuple(state for state in OperationState if state is not OperationState.DONE)
"""States in which brokers may have something to do; the index finds operations by them, because
ended ones become many.
"""
_steps_left = sa.select(steps.c.operation_id).where(
    steps.c.operation_id == operations.c.operation_id, sa.not_(steps.c.done)
)
UNFINISHED = sa.and_(
    operations.c.state.in_(UNDER_WAY),
    # A canceled operation without steps left is over. Its row stays for ever and is not read again.
    sa.or_(
        operations.c.state != OperationState.CANCELED,
        sa.exists(_steps_left.correlate(operations)),
    ),
)
"""Condition that brokers have something to do for a row of `operations`; a driver may be working on
it.
"""
