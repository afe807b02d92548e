"""Operations for the user's own migrations: `import keylane.outbox.alembic`, then
`op.keylane_outbox_upgrade()`.
"""

from __future__ import annotations

from alembic.operations import MigrateOperation, Operations

from .tables import DEFAULT_PREFIX, FIRST_LEASE, OutboxTables


@Operations.register_operation("keylane_outbox_upgrade")
class OutboxUpgrade(MigrateOperation):
    """Create the tables of an outbox, or upgrade older ones."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @classmethod
    def keylane_outbox_upgrade(cls, operations: Operations, prefix: str = DEFAULT_PREFIX) -> None:
        """Create the tables of an outbox, or upgrade older ones."""
        operations.invoke(cls(prefix))

    def reverse(self) -> MigrateOperation:
        """Return the operation that reverses this one."""
        return OutboxDrop(self.prefix)


@Operations.register_operation("keylane_outbox_drop")
class OutboxDrop(MigrateOperation):
    """Drop the tables of an outbox, including unsent rows."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @classmethod
    def keylane_outbox_drop(cls, operations: Operations, prefix: str = DEFAULT_PREFIX) -> None:
        """Drop the tables of an outbox, including unsent rows."""
        operations.invoke(cls(prefix))


@Operations.implementation_for(OutboxUpgrade)
def _upgrade(operations: Operations, operation: OutboxUpgrade) -> None:
    tables = OutboxTables(operation.prefix)
    context = operations.get_context()
    if context.as_sql:
        for table in tables.metadata.sorted_tables:
            operations.impl.create_table(table)
        operations.bulk_insert(tables.lease, [FIRST_LEASE])
    else:
        tables.create(operations.get_bind())


@Operations.implementation_for(OutboxDrop)
def _drop(operations: Operations, operation: OutboxDrop) -> None:
    for table in reversed(OutboxTables(operation.prefix).metadata.sorted_tables):
        operations.impl.drop_table(table)
