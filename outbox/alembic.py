"""Operations for the user's own migrations: `import keylane.outbox.alembic`, then
`op.keylane_outbox_upgrade()` creates the tables of an outbox, or upgrades older ones, and
`op.keylane_outbox_drop()` drops them, including unsent rows.
"""

from ..user_database.migrations import register_operations
from .tables import DEFAULT_PREFIX, OutboxTables

register_operations(DEFAULT_PREFIX, OutboxTables)
