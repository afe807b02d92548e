"""Operations for the user's own migrations: `import keylane.sink.alembic`, then
`op.keylane_sink_upgrade()` creates the tables of fenced effects, and `op.keylane_sink_drop()` drops
them; the effects of redelivered messages are then applied again.
"""

from ..user_database.migrations import register_operations
from .tables import DEFAULT_PREFIX, SinkTables

register_operations(DEFAULT_PREFIX, SinkTables)
