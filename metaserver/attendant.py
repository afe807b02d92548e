"""What happens in time and not on a call: expired sessions, changes of other metaservers, repairs, data that is gone.

It looks every `poll_ms`, and earlier when a session is about to expire: so a silent consumer is replaced at
its ttl, whoever else is calling.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from ..protocol.errors import KeylaneError, StorageError
from .catalogue.service import Catalogue
from .groups.service import Members
from .groups.views import due_groups
from .operations.driver import OperationDriver
from .settings import MetaserverSettings
from .sql.database import Database

log = logging.getLogger("keylane.metaserver")


class Attendant:
    """
    The periodic work of one metaserver.  Any number of them may do it at once: each step is a transaction.

    `duties` are done every `expire_ms`, and `quick_duties` every `poll_ms`: what hangs on retention.
    """

    def __init__(
        self,
        database: Database,
        members: Members,
        catalogue: Catalogue,
        settings: MetaserverSettings,
        operations: OperationDriver,
        duties: Sequence[Callable[[], Awaitable[object]]] = (),
        *,
        quick_duties: Sequence[Callable[[], Awaitable[object]]] = (),
    ) -> None:
        self._database = database
        self._members = members
        self._catalogue = catalogue
        self._settings = settings
        self._operations = operations
        self._duties = [
            *((duty, settings.expire_ms) for duty in duties),
            *((duty, settings.poll_ms) for duty in quick_duties),
        ]

    async def run(self) -> None:
        """Until cancelled.  What failed with an error of ours is done again; only a fault of ours ends it."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._look_again_and_again())
                group.create_task(self._repair_again_and_again())
                for duty, pause_ms in self._duties:
                    group.create_task(self._do_again_and_again(duty, pause_ms))
        except Exception:
            log.exception("the periodic work met a fault of ours and has ended")
            raise

    async def look(self) -> int:
        """One round; milliseconds until the next one is due."""
        poll_ms = self._settings.poll_ms
        try:
            due = await self._database.read(due_groups)
            for group_id in due.groups:
                await self._members.settle(group_id)
            await self._members.look_around()
            await self._catalogue.look_around()
            await self._operations.resume()
        except KeylaneError as error:
            _warn(error)
            return poll_ms
        next_ms = poll_ms if due.next_expiry_ms is None else due.next_expiry_ms + 1
        return max(1, min(poll_ms, next_ms))

    async def _look_again_and_again(self) -> None:
        while True:
            pause_ms = await self.look()
            await asyncio.sleep(pause_ms / 1000)

    async def _repair_again_and_again(self) -> None:
        while True:
            await asyncio.sleep(self._settings.repair_ms / 1000)
            try:
                await self._catalogue.repair()
            except KeylaneError as error:
                _warn(error)

    async def _do_again_and_again(
        self, duty: Callable[[], Awaitable[object]], pause_ms: int
    ) -> None:
        while True:
            await asyncio.sleep(pause_ms / 1000)
            try:
                await duty()
            except KeylaneError as error:
                _warn(error)


def _warn(error: KeylaneError) -> None:
    what = "the database does not answer" if isinstance(error, StorageError) else "will try again"
    log.warning("%s: %s", what, error.message)
