"""Asks the servers for the screen, all of its parts together, so that a server is asked once.

    metaservers       the brokers each second; metrics, waiting operations and subjects less often
    each broker       its metrics each second: one answer, however many partitions it has
    Admin.why         one group at a time, of those whose lag does not fall
    the opened group  its partitions

A server that takes long is asked less often: the screen takes at most a tenth of its time. One that
hangs holds up nothing but its own figures.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from ...admin import Admin
from ...protocol.address import parse_addresses
from ...protocol.clock import SystemClock
from ...protocol.endpoints import METRICS
from ...protocol.errors import ForeignServerError, KeylaneError
from ...rpc.http_network import HttpNetwork, client_network
from ...rpc.race import start_task
from .board import Board, GroupDetail
from .figures import Figures, read_figures

EVERY_S = 1.0
METASERVER_FIGURES_EVERY_S = 5.0
SUBJECTS_EVERY_S = 15.0
DETAIL_EVERY_S = 2.0
PROBE_EVERY_S = 5.0
"""How often it is tried which silent brokers hang: they accept only so many connections."""
TIMEOUT_MS = 2_000
EXPLAIN_TIMEOUT_S = 10.0
PAUSE_PER_WORK = 9
"""A loop rests this many times as long as its last round took."""


def pause_s(took_s: float, every_s: float) -> float:
    """Return how long to rest after a round that took `took_s`, of those that are due `every_s`."""
    return max(every_s - took_s, PAUSE_PER_WORK * took_s)


class Asker:
    """Asks a cluster and notes the answers on a board, until it is closed."""

    def __init__(
        self, admin: Admin, network: HttpNetwork, board: Board, *, now_s: Callable[[], float]
    ) -> None:
        """`now_s` is a clock in seconds that never goes back."""
        self.now_s = now_s
        self.board = board
        self._admin = admin
        self._network = network
        self._metaservers = parse_addresses(board.meta)
        self._broker_tasks: dict[str, asyncio.Task[None]] = {}
        self._detail_task: asyncio.Task[None] | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, meta: str, *, wait_s: float = 0) -> AsyncIterator[Asker]:
        """
        Open the connections for the block.

        Raises:
            ConfigError: an address, a TLS file or the token cannot be used.
        """
        network = client_network()
        try:
            network.add_metaservers(parse_addresses(meta))
            async with Admin(meta, call_timeout_ms=TIMEOUT_MS, wait_s=wait_s) as admin:
                board = Board(meta)
                yield cls(admin, network, board, now_s=lambda: SystemClock.boot_ms() / 1000)
        finally:
            await network.close()

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            await self._run()
        finally:
            self.close_group()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for work, every_s in (
                (self._ask_metaserver, EVERY_S),
                (self._ask_metaserver_figures, METASERVER_FIGURES_EVERY_S),
                (self._ask_operations, METASERVER_FIGURES_EVERY_S),
                (self._ask_subjects, SUBJECTS_EVERY_S),
                (self._explain, EVERY_S),
            ):
                tasks.create_task(self._repeat(work, every_s))
            tasks.create_task(self._follow_brokers(tasks))
            tasks.create_task(self._follow_silent())

    def open_group(self, subject: str, group: str) -> GroupDetail:
        """Ask for the partitions of a group from now on; return what the answers are noted in."""
        self.close_group()
        detail = GroupDetail(subject, group)
        work = self._repeat(partial(self._ask_detail, detail), DETAIL_EVERY_S)
        self._detail_task = start_task(work)
        return detail

    def close_group(self) -> None:
        """Ask no longer for the opened group."""
        if self._detail_task is not None:
            self._detail_task.cancel()
            self._detail_task = None

    async def _ask_metaserver(self) -> bool:
        try:
            self.board.note_brokers(await self._admin.list_brokers(), self.now_s())
        except KeylaneError as error:
            self.board.note_failure(None, error.message)
            return False
        return True

    async def _ask_subjects(self) -> bool:
        try:
            subjects = await self._admin.list_subjects()
        except KeylaneError:  # the screen says that the metaserver is gone
            return False
        self.board.note_subjects({each.subject: each.partitions for each in subjects})
        return True

    async def _ask_operations(self) -> bool:
        try:
            self.board.note_operations(await self._admin.list_waiting_operations())
        except KeylaneError:  # the screen says that the metaserver is gone
            return False
        return True

    async def _ask_metaserver_figures(self) -> bool:
        async def ask(address: str) -> Figures | str:
            try:
                return await self._figures(address)
            except KeylaneError as error:
                return error.message

        answers = await asyncio.gather(*map(ask, self._metaservers))
        self.board.note_metaservers(dict(zip(self._metaservers, answers, strict=True)))
        return not any(isinstance(answer, str) for answer in answers)

    async def _follow_brokers(self, tasks: asyncio.TaskGroup) -> None:
        """Keep a task for each broker."""
        while True:
            addresses = self.board.addresses
            for address in addresses:
                if address not in self._broker_tasks:
                    work = self._repeat(partial(self._ask_broker, address), EVERY_S)
                    self._broker_tasks[address] = tasks.create_task(work)
            for address in self._broker_tasks.keys() - set(addresses):
                self._broker_tasks.pop(address).cancel()
            await asyncio.sleep(EVERY_S / 4)

    async def _follow_silent(self) -> None:
        """Find out which of the silent brokers hang, as soon as one is silent."""
        known: set[str] = set()
        due_s = 0.0
        while True:
            silent = {each.address for each in self.board.listed.brokers if not each.available}
            if silent != known or (silent and self.now_s() >= due_s):
                known, due_s = silent, self.now_s() + PROBE_EVERY_S
                self.board.note_hanging(await self._admin.find_hanging(self.board.listed))
            await asyncio.sleep(EVERY_S / 4)

    async def _ask_broker(self, address: str) -> bool:
        try:
            self.board.note_figures(address, await self._figures(address))
        except KeylaneError as error:
            self.board.note_failure(address, error.message)
            return False
        return True

    async def _figures(self, address: str) -> Figures:
        """Fetch the metrics of a server. Raises KeylaneError."""
        text, _date = await self._network.get_text(address, METRICS.path, timeout_ms=TIMEOUT_MS)
        try:
            return read_figures(text, at_s=self.now_s())
        except ValueError as error:
            raise ForeignServerError(
                f"the metrics of {address} cannot be read: {error}", address=address
            ) from error

    async def _explain(self) -> bool:
        key = self.board.take_next_to_explain(self.now_s())
        if key is not None:
            with contextlib.suppress(KeylaneError, TimeoutError):  # it is asked again later
                async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                    self.board.note_explanation(key, await self._admin.why(*key))
        return True

    async def _ask_detail(self, detail: GroupDetail) -> bool:
        key = (detail.subject, detail.group)
        try:
            async with asyncio.timeout(EXPLAIN_TIMEOUT_S):
                detail.description = await self._admin.describe_group(*key)
                detail.explanation = await self._admin.why(*key)
            detail.heard_s, detail.problem = self.now_s(), ""
            return True
        except KeylaneError as error:
            detail.problem = error.message
        except TimeoutError:
            detail.problem = f"the brokers have not answered within {EXPLAIN_TIMEOUT_S:g} s"
        return False

    async def _repeat(self, work: Callable[[], Awaitable[bool]], every_s: float) -> None:
        """Repeat a round of questions, which returns True if they were answered."""
        while True:
            began_s = self.now_s()
            answered = await work()
            # A server that was not reached had no work, and is to be seen when it comes back.
            rest_s = pause_s(self.now_s() - began_s, every_s) if answered else every_s
            await asyncio.sleep(rest_s)
