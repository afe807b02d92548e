"""Django's own transaction, as SQLAlchemy sees it.

keylane writes with SQLAlchemy. Here it writes on Django's connection, in the transaction that
`atomic` has begun, so both commit together.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from sqlalchemy import Connection, NullPool, create_engine


def _leave_it_to_django(_connection: Any) -> None:
    """Commit, roll back or close nothing: Django does."""


_engine = create_engine(
    settings.DATABASE_URL, creator=lambda: connection.connection, poolclass=NullPool
)
for _act in ("do_commit", "do_rollback", "do_close", "do_terminate"):
    setattr(_engine.dialect, _act, _leave_it_to_django)


@contextmanager
def borrowed_transaction() -> Iterator[Connection]:
    """Return SQLAlchemy's view of the transaction of the innermost `atomic`."""
    if not connection.in_atomic_block:
        raise transaction.TransactionManagementError("use it inside of transaction.atomic()")
    with _engine.begin() as borrowed:
        yield borrowed
