"""Deletes hidden subjects that have been neither filled nor published for `hidden_expires_ms`.

Invariants
    A hidden subject's idle time restarts when the subject is created, requested again, or found
    with more messages than before.
    Idle times are measured with the database's clock, and start again when that clock restarts.

    idle for the whole time ─▶ count the messages at its brokers
        more than before ─▶ the idle time restarts
        as many as before ─▶ deleted, as `keylane subject delete` does

A subject is not deleted while one of its brokers does not respond.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...protocol import endpoints
from ...protocol.control import DeleteSubject
from ...protocol.errors import KeylaneError, NotSentError
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..catalogue.service import Catalogue
from ..settings import MetaserverSettings
from ..sql.database import Database
from ..sql.dialect import now_ms
from ..sql.duties import take_duty
from ..sql.schema import subjects


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleHiddenSubject:
    """A hidden subject, with its number of messages at the start of its idle time."""

    subject_id: int
    subject: str
    target: str
    messages: int


_is_hidden = sa.and_(subjects.c.hidden_for != "", sa.not_(subjects.c.deleting))


_start_idle_time = (
    sa.update(subjects)
    .where(_is_hidden, subjects.c.hidden_since.is_(None))
    .values(hidden_since=now_ms())
)
_idle = (
    sa.select(subjects)
    .where(_is_hidden, now_ms() - subjects.c.hidden_since >= sa.bindparam("at_least_ms"))
    .order_by(subjects.c.subject_id)
)


def start_hidden_idle_times(connection: Connection) -> None:
    """Start the idle times of those hidden subjects that have none yet."""
    connection.execute(_start_idle_time)


def list_idle_hidden(connection: Connection, *, at_least_ms: int) -> list[IdleHiddenSubject]:
    """Return the hidden subjects that have been idle for at least `at_least_ms` milliseconds."""
    return [
        IdleHiddenSubject(
            subject_id=row.subject_id,
            subject=row.name,
            target=row.hidden_for,
            messages=row.hidden_messages,
        )
        for row in connection.execute(_idle, {"at_least_ms": at_least_ms})
    ]


def restart_idle_time(connection: Connection, subject_id: int, messages: int) -> None:
    """Restart the idle time of a hidden subject whose number of messages has changed."""
    this_subject = sa.update(subjects).where(subjects.c.subject_id == subject_id)
    connection.execute(this_subject.values(hidden_since=now_ms(), hidden_messages=messages))


log = logging.getLogger("keylane.metaserver")
DUTY = "hidden expiry"
CALL_TIMEOUT_MS = 2_000


class HiddenExpirer:
    """
    Deletes hidden subjects that have been idle for `hidden_expires_ms`.

    Args:
        delete: deletes the subject with the given name.
        holder: this metaserver's unique id.
    """

    def __init__(
        self,
        database: Database,
        network: Network,
        settings: MetaserverSettings,
        delete: Callable[[str, DeleteSubject], Awaitable[object]],
        *,
        catalogue: Catalogue,
        holder: str,
    ) -> None:
        self._database = database
        self._network = network
        self._expires_ms = settings.hidden_expires_ms
        self._lease_ms = 2 * settings.expire_ms
        self._delete = delete
        self._catalogue = catalogue
        self._holder = holder

    async def run_once(self) -> int:
        """Delete expired subjects and return their number. Does nothing if `hidden_expires_ms` is
        0. Raises StorageError.
        """
        if not self._expires_ms:
            return 0
        has_duty = await self._database.renew(
            take_duty, DUTY, holder=self._holder, lease_ms=self._lease_ms
        )
        if not has_duty:
            return 0
        await self._database.write(start_hidden_idle_times)
        deleted_count = 0
        for idle_subject in await self._database.read(
            list_idle_hidden, at_least_ms=self._expires_ms
        ):
            try:
                deleted_count += await self._expire(idle_subject)
            except KeylaneError as error:
                log.warning(
                    "cannot delete hidden subject %s: %s", idle_subject.subject, error.message
                )
        return deleted_count

    async def _expire(self, idle_subject: IdleHiddenSubject) -> bool:
        message_count = await self._count_messages(idle_subject.subject)
        if message_count != idle_subject.messages:
            await self._database.write(restart_idle_time, idle_subject.subject_id, message_count)
            return False
        log.warning(
            "deleting hidden subject %s with %d messages: for %.0f s it was neither filled nor "
            "published in %s",
            idle_subject.subject,
            message_count,
            self._expires_ms / 1000,
            idle_subject.target,
        )
        await self._delete(
            idle_subject.subject, DeleteSubject(force=True, subject_id=idle_subject.subject_id)
        )
        return True

    async def _count_messages(self, subject: str) -> int:
        """Return the number of messages that a subject's brokers have stored. Raises NotSentError
        or UnreachableError unless all of them respond.
        """
        message_count = 0
        for partition in (await self._catalogue.read_subject(subject)).route.partitions:
            if partition.address is None:
                raise NotSentError(f"broker group {partition.broker_group} is not available")
            broker = BrokerClient(self._network, partition.address, timeout_ms=CALL_TIMEOUT_MS)
            message_count += (
                await broker.control(endpoints.PARTITION, id=partition.partition_id)
            ).next_offset
        return message_count
