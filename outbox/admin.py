"""Functions for operators and migrations; each takes an engine or a database URL.

Only `purge_waiting` calls a metaserver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy.engine import Connection

from ..protocol.address import parse_addresses
from ..protocol.errors import ConflictError, Reason, SubjectDeletedError, SubjectUnknownError
from ..protocol.ids import check_name
from ..protocol.settings import check_no_call_problems, flag_problems
from ..rpc.client import MetaClient
from ..rpc.connections import Connections, clean_up
from ..rpc.environment import environment_of
from ..user_database.transactions import EngineOrUrl, create_missing_tables
from .database import OutboxDatabase
from .settings import OutboxSettings
from .tables import DEFAULT_PREFIX, OutboxTables
from .upkeep import (
    SETTLED,
    UNSENT,
    OutboxStatus,
    RowChange,
    change_rows,
    delete_rows,
    read_status,
    requeue_rows,
)

P = ParamSpec("P")
T = TypeVar("T")


async def create_tables(engine_or_url: EngineOrUrl, *, prefix: str = DEFAULT_PREFIX) -> None:
    """
    Create the tables of an outbox. This does nothing if they exist.

    Raises:
        SchemaError: the tables exist but belong to an older or newer version of keylane; nothing
            was changed.
        ConfigError: the engine, the URL or the prefix is invalid.
        StorageError: the database reported an error.
    """
    await create_missing_tables(
        lambda: _run_in_transaction(
            engine_or_url, prefix, lambda connection, tables: tables.create(connection)
        )
    )


async def outbox_status(
    engine_or_url: EngineOrUrl, *, subject: str | None = None, prefix: str = DEFAULT_PREFIX
) -> OutboxStatus:
    """
    Count the rows of an outbox, for all subjects or one, and report which process sends them.

    Raises:
        SchemaError, ConfigError, StorageError: as `create_tables`.
        InvalidRequestError: an argument is invalid; nothing was done.
    """
    _check_arguments(subject)
    now_ns = environment_of(None).clock.wall_ns()
    return await _run_in_transaction(
        engine_or_url, prefix, read_status, now_ns=now_ns, subject=subject
    )


async def redrive_failed(
    engine_or_url: EngineOrUrl,
    *,
    subject: str | None = None,
    dry_run: bool = False,
    prefix: str = DEFAULT_PREFIX,
) -> RowChange:
    """
    Send failed rows again, each before newer rows of its key. A failed row that had in fact been
    stored is then stored twice.

    Refused rows are sent again too, behind the rows of their keys that were sent in the meantime.

    Args:
        subject: restricts the call to rows of this subject.
        dry_run: only count the rows, without changing them.

    Returns:
        The numbers of failed and refused rows.

    Raises:
        As `outbox_status`.
    """
    _check_arguments(subject, dry_run=dry_run)
    return await _run_in_transaction(
        engine_or_url, prefix, change_rows, requeue_rows, SETTLED, subject=subject, dry_run=dry_run
    )


async def purge_failed(
    engine_or_url: EngineOrUrl,
    *,
    subject: str | None = None,
    dry_run: bool = False,
    prefix: str = DEFAULT_PREFIX,
) -> RowChange:
    """
    Delete failed and refused rows. Newer rows of the failed rows' keys are then sent.

    Args:
        subject: restricts the call to rows of this subject.
        dry_run: only count the rows, without changing them.

    Returns:
        The numbers of failed and refused rows.

    Raises:
        As `outbox_status`.
    """
    _check_arguments(subject, dry_run=dry_run)
    return await _run_in_transaction(
        engine_or_url, prefix, change_rows, delete_rows, SETTLED, subject=subject, dry_run=dry_run
    )


async def purge_waiting(
    meta: str | Iterable[str],
    engine_or_url: EngineOrUrl,
    *,
    subject: str,
    force: bool = False,
    dry_run: bool = False,
    prefix: str = DEFAULT_PREFIX,
) -> RowChange:
    """
    Delete rows that were never sent because their subject does not exist.

    Args:
        meta: `host:port` of a metaserver, which knows whether the subject exists; for several
            metaservers see `Outbox`.
        subject: the subject whose rows are deleted. Rows halted after a failed row are included;
            failed rows are not.
        force: delete the rows even if the subject exists, without calling a metaserver.
        dry_run: only count the rows, without changing them.

    Returns:
        The numbers of waiting and halted rows.

    Raises:
        ConflictError: the subject exists, so its rows will be sent; nothing was deleted.
        NotSentError, OutcomeUnknownError: no metaserver replied; nothing was deleted. As
            `outbox_status`.
    """
    check_name("subject", subject)
    check_no_call_problems(flag_problems(force=force, dry_run=dry_run))
    addresses = parse_addresses(meta)
    if not force:
        await _check_absent(addresses, subject)
    return await _run_in_transaction(
        engine_or_url, prefix, change_rows, delete_rows, UNSENT, subject=subject, dry_run=dry_run
    )


def _check_arguments(subject: str | None, **flags: bool) -> None:
    """Raise InvalidRequestError for an invalid argument."""
    if subject is not None:
        check_name("subject", subject)
    check_no_call_problems(flag_problems(**flags))


async def _check_absent(addresses: list[str], subject: str) -> None:
    """Raise ConflictError if a metaserver knows the subject, which means that it exists."""
    timeout_ms = OutboxSettings().call_timeout_ms
    connections = Connections(None, timeout_ms=timeout_ms, what="outbox")
    network = connections.open()
    try:
        # Fetch the route, because a metaserver whose database may have been lost answers this call
        # only if it is certain.
        await MetaClient(network, addresses, timeout_ms=timeout_ms).route(subject)
    except (SubjectUnknownError, SubjectDeletedError):
        return
    finally:
        await clean_up(connections.close)
    raise ConflictError(Reason.OUTBOX_SUBJECT_EXISTS, subject=subject)


async def _run_in_transaction(
    engine_or_url: EngineOrUrl,
    prefix: str,
    work: Callable[Concatenate[Connection, OutboxTables, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Run `work` in its own transaction."""
    tables = OutboxTables(prefix)
    database = OutboxDatabase(engine_or_url, tables)
    try:
        return await database.run(work, tables, *args, **kwargs)
    finally:
        await database.close()
