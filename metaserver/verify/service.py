"""Reads the database, asks every broker, reads the database again, and runs the checks. Shell
around `checks.py`.
"""

from __future__ import annotations

import asyncio

from ...protocol.errors import KeylaneError
from ...protocol.verification import Verification
from ...rpc.client import BrokerClient
from ...rpc.network import Network
from ..sql.database import Database
from .checks import verify
from .reader import read_sql_view
from .views import BrokerAnswer, BrokerRow, Views

ASKED_AT_ONCE_MAX = 16


class VerifyService:
    """Compares the database with the brokers."""

    def __init__(self, database: Database, network: Network) -> None:
        self._database = database
        self._network = network

    async def verify(self) -> Verification:
        """Run every check; a broker that does not answer is a violation and not an error. Raises
        StorageError.
        """
        before = await self._database.read(read_sql_view)
        limit = asyncio.Semaphore(ASKED_AT_ONCE_MAX)
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(self._ask(broker, limit)) for broker in before.brokers]
        after = await self._database.read(read_sql_view)
        answers = [task.result() for task in asked]
        return await asyncio.to_thread(verify, Views(before=before, answers=answers, after=after))

    async def _ask(self, broker: BrokerRow, limit: asyncio.Semaphore) -> BrokerAnswer:
        hosted, problem = None, ""
        async with limit:
            try:
                hosted = await BrokerClient(self._network, broker.address).partitions()
            except KeylaneError as error:
                problem = error.message
        return BrokerAnswer(
            broker_group=broker.broker_group, address=broker.address, hosted=hosted, problem=problem
        )
