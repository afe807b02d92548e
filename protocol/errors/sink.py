"""What a fenced effect is refused for: tables that cannot be used, an owner of before, a message
done already.  Pure.
"""

from __future__ import annotations

from .base import Detail
from .refusals import LeaseLostError, RefusedError


class SinkMissingError(RefusedError):
    """A database without the tables of fenced effects."""

    code = 1270
    summary = "the database has no tables of fenced effects"
    hint = (
        "Create them with await keylane.sink.create_tables(engine), or with keylane.sink.alembic "
        "in your migrations."
    )
    table = Detail(str)


class SinkOlderError(RefusedError):
    """The tables of fenced effects were made by an older keylane."""

    code = 1271
    summary = "the tables of fenced effects are older than this keylane"
    hint = (
        "Upgrade them with await keylane.sink.create_tables(engine), or with keylane.sink.alembic "
        "in your migrations."
    )
    table = Detail(str)
    version = Detail(int)
    """Of the tables."""
    wanted = Detail(int)


class SinkNewerError(RefusedError):
    """The tables of fenced effects were made by a newer keylane."""

    code = 1272
    summary = "the tables of fenced effects are newer than this keylane"
    hint = "Install the version of keylane that created them."
    table = Detail(str)
    version = Detail(int)
    """Of the tables."""
    wanted = Detail(int)


class EffectFencedError(LeaseLostError):
    """An owner with a higher token has committed effects of the partition; this transaction must
    not commit.
    """

    code = 1273
    summary = "a newer owner of the partition has committed effects"
    hint = "Roll back and stop handling the message: its newer owner handles it."
    token = Detail(int)
    """Of the message."""
    current_token = Detail(int)
    """The highest one in the user's database."""


class EffectDoneError(RefusedError):
    """Another transaction has committed the effect of this message meanwhile; this one must not
    commit.
    """

    code = 1274
    summary = "another transaction has committed the effect of this message meanwhile"
    hint = "Roll back.  When the message is retried, it is skipped."
    partition_id = Detail(int)
    offset = Detail(int)
