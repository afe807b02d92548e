"""What an outbox refuses: tables that cannot be used, rows that may be stored or are wanted.
Pure.
"""

from __future__ import annotations

from .base import Detail, Fate
from .refusals import RefusedError


class OutboxMissingError(RefusedError):
    """A database without the tables of an outbox."""

    code = 1230
    summary = "the database has no tables of an outbox"
    hint = (
        "Create them with await keylane.outbox.create_tables(engine), or with "
        "keylane.outbox.alembic in your migrations."
    )
    table = Detail(str)


class OutboxOlderError(RefusedError):
    """The tables of an outbox were made by an older keylane."""

    code = 1231
    summary = "the tables of the outbox are older than this keylane"
    hint = (
        "Upgrade them with await keylane.outbox.create_tables(engine), or with "
        "keylane.outbox.alembic in your migrations."
    )
    table = Detail(str)
    version = Detail(int)
    """Of the tables."""
    wanted = Detail(int)


class OutboxNewerError(RefusedError):
    """The tables of an outbox were made by a newer keylane."""

    code = 1232
    summary = "the tables of the outbox are newer than this keylane"
    hint = "Install the version of keylane that created them."
    table = Detail(str)
    version = Detail(int)
    """Of the tables."""
    wanted = Detail(int)


class OutboxRowFailedError(RefusedError):
    """A row of an outbox may be stored, and no broker can tell."""

    code = 1233
    fate = Fate.UNKNOWN
    summary = "no broker can tell whether the row is stored"
    hint = "keylane outbox status shows failed rows; redrive sends them again, purge gives them up."
    row_id = Detail(int)


class OutboxSubjectExistsError(RefusedError):
    """Waiting rows are not deleted while their subject exists."""

    code = 1234
    summary = "the subject exists, so that its rows are sent"
    hint = (
        "Nothing was deleted.  --force (force=True) deletes messages that were never sent as well."
    )
    subject = Detail(str)
