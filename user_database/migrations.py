"""Operations for the user's own migrations with Alembic, which create and drop tables."""

from __future__ import annotations

from collections.abc import Callable

from alembic.operations import MigrateOperation, Operations

from .tables import VersionedTables


def register_operations(name: str, tables_of: Callable[[str], VersionedTables]) -> None:
    """
    Register `op.NAME_upgrade()` and `op.NAME_drop()` for the tables of a prefix, where NAME is
    `name`.

    Args:
        name: the operations' name, which is also the default prefix.
        tables_of: returns the tables for a prefix.
    """

    class TablesOperation(MigrateOperation):
        def __init__(self, prefix: str) -> None:
            self.prefix = prefix

        @classmethod
        def invoke(cls, operations: Operations, prefix: str = name) -> None:
            operations.invoke(cls(prefix))

    class Upgrade(TablesOperation):
        def reverse(self) -> MigrateOperation:
            return Drop(self.prefix)

    class Drop(TablesOperation):
        pass

    def upgrade(operations: Operations, operation: Upgrade) -> None:
        tables = tables_of(operation.prefix)
        if not operations.get_context().as_sql:
            tables.create(operations.get_bind())
            return
        for table in tables.metadata.sorted_tables:
            operations.impl.create_table(table)
        operations.bulk_insert(tables.version_table, [tables.first_row])

    def drop(operations: Operations, operation: Drop) -> None:
        for table in reversed(tables_of(operation.prefix).metadata.sorted_tables):
            operations.impl.drop_table(table)

    Operations.register_operation(f"{name}_upgrade", "invoke")(Upgrade)
    Operations.register_operation(f"{name}_drop", "invoke")(Drop)
    Operations.implementation_for(Upgrade)(upgrade)
    Operations.implementation_for(Drop)(drop)
