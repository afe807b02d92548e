"""Operations for the user's own migrations: `import keylane.sink.alembic`, then
`op.keylane_sink_upgrade()`.
"""

from __future__ import annotations

from alembic.operations import MigrateOperation, Operations

from .tables import DEFAULT_PREFIX, VERSION_ROW, SinkTables


@Operations.register_operation("keylane_sink_upgrade")
class SinkUpgrade(MigrateOperation):
    """Create the tables of fenced effects."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @classmethod
    def keylane_sink_upgrade(cls, operations: Operations, prefix: str = DEFAULT_PREFIX) -> None:
        """Create the tables of fenced effects."""
        operations.invoke(cls(prefix))

    def reverse(self) -> MigrateOperation:
        """Return the operation that reverses this one."""
        return SinkDrop(self.prefix)


@Operations.register_operation("keylane_sink_drop")
class SinkDrop(MigrateOperation):
    """Drop the tables of fenced effects; redelivered messages then have their effects again."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    @classmethod
    def keylane_sink_drop(cls, operations: Operations, prefix: str = DEFAULT_PREFIX) -> None:
        """Drop the tables of fenced effects; redelivered messages then have their effects again."""
        operations.invoke(cls(prefix))


@Operations.implementation_for(SinkUpgrade)
def _upgrade(operations: Operations, operation: SinkUpgrade) -> None:
    tables = SinkTables(operation.prefix)
    context = operations.get_context()
    if context.as_sql:
        for table in tables.metadata.sorted_tables:
            operations.impl.create_table(table)
        operations.bulk_insert(tables.version, [VERSION_ROW])
    else:
        tables.create(operations.get_bind())


@Operations.implementation_for(SinkDrop)
def _drop(operations: Operations, operation: SinkDrop) -> None:
    for table in reversed(SinkTables(operation.prefix).metadata.sorted_tables):
        operations.impl.drop_table(table)
