"""Which operations on partitions are not finished: brokers have something to do for them.  SQL."""

from __future__ import annotations

import sqlalchemy as sa

from ...protocol.operations import OperationState
from ..sql.schema import operations, steps

UNDER_WAY = tuple(state for state in OperationState if state is not OperationState.DONE)
"""The states in which brokers may have something to do.  The index finds operations by them: ended
ones become many.
"""
_steps_left = sa.select(steps.c.operation_id).where(
    steps.c.operation_id == operations.c.operation_id, sa.not_(steps.c.done)
)
UNFINISHED = sa.and_(
    operations.c.state.in_(UNDER_WAY),
    # A canceled operation without steps to do is over.  Its row stays for ever and is not read
    # again.
    sa.or_(
        operations.c.state != OperationState.CANCELED,
        sa.exists(_steps_left.correlate(operations)),
    ),
)
"""Whether brokers have something to do for a row of `operations`; a driver may have it."""
