"""Keeps a copy of a broker's data folder: follows its log, over restarts of both.

    look up the broker ─▶ Follow from the end of the copy ─▶ append, sync ─▶ Follow …
         ▲                     │ cut off, the broker is silent or moves
         ╰──── a pause ◀───────╯
    the log of the broker begins behind the copy ─▶ the copy begins anew
    the log of the broker is another one         ─▶ ends, and changes nothing

Invariants
    A segment is removed here once the broker has removed it, and the copy has what the broker had
    stored by then: retention repeats what is still needed of a segment before it removes it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from typing import NamedTuple

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.errors import (
    DataFolderError,
    FolderRefusedError,
    KeylaneError,
    NotSentError,
    Reason,
)
from ...protocol.frames import Follow, Followed
from ...protocol.log_filter import LogFilter
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.network import Network
from ..storage.copy_file import COPY_PATH, CopyFile, read_copy_file, write_copy_file
from ..storage.data_folder import copy_origin, is_claimed, read_identity, read_opening
from ..storage.files import Files
from ..store.group_commit import RunBlocking
from .copied_log import CopiedLog
from .follow_service import FOLLOW_BYTES_MAX

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=100, max_ms=2_000)
WAIT_MS = 10_000
"""How long a broker waits for a commit before it answers without bytes, in milliseconds."""
CALL_TIMEOUT_MS = 10_000


class _Removal(NamedTuple):
    """Segments that the broker has removed."""

    first_position: int
    needed_end: int
    """The end of the broker's log by then."""


class Follower:
    """
    Keeps the copy in a locked folder.

    Args:
        run_blocking: runs calls that read and write the folder.
    """

    def __init__(
        self,
        files: Files,
        broker_group: str,
        *,
        meta: MetaClient,
        network: Network,
        run_blocking: RunBlocking,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._files = files
        self._broker_group = broker_group
        self._meta = meta
        self._network = network
        self._run_blocking = run_blocking
        self._boot_ms = clock.boot_ms
        self._new_id = f"{rng.getrandbits(128):032x}"
        self._rng = rng
        self._failures = LogFilter()
        self._copy: CopyFile | None = None
        self._log: CopiedLog | None = None
        self._origin = "", ""
        """The broker's id and opening, as they are written in the folder; "" if they are not."""
        self._removals: deque[_Removal] = deque()
        self._was_told_complete = False

    @property
    def end(self) -> int:
        """The end of the copy's log; -1 while it has none."""
        return -1 if self._log is None else self._log.end

    @property
    def _copy_id(self) -> str:
        return self._new_id if self._copy is None else self._copy.copy_id

    @property
    def is_complete(self) -> bool:
        """True if the copy can take the place of the broker's folder."""
        return self._copy is not None and self.end >= self._copy.complete_at

    async def run(self) -> None:
        """
        Follow the broker until cancelled.

        Raises:
            DataFolderError: the folder is not a copy, or one of another broker group.
            FolderRefusedError: the log of the broker is not the one that was copied.
            StorageError: the folder cannot be written to.
        """
        copied = await self._run_blocking(self._open)
        pauses = WAITS.pauses(self._rng)
        broker: BrokerClient | None = None
        tail_crc = -1
        try:
            while True:
                try:
                    if broker is None:
                        broker = await self._find_broker()
                        tail_crc = await self._run_blocking(copied.tail_crc)
                    answer, payload = await broker.call(self._request(tail_crc), wait_ms=WAIT_MS)
                    assert isinstance(answer, Followed)
                    self._check_broker(answer)
                except FolderRefusedError:
                    raise
                except KeylaneError as error:
                    self._log_failure(error)
                    if broker is not None:
                        await broker.close()
                        broker = None
                    await asyncio.sleep(pauses.next_pause_ms() / 1000)
                    continue
                pauses.reset()
                if tail_crc < 0 <= self.end and answer.opening != self._origin[1]:
                    # The broker was restarted, and may be on another copy of its folder.
                    tail_crc = await self._run_blocking(copied.tail_crc)
                    continue
                tail_crc = -1
                await self._run_blocking(self._store, answer, payload)
                self._log_progress()
        finally:
            if broker is not None:
                await broker.close()
            await self._run_blocking(copied.close)  # behind a call that was left running

    def _open(self) -> CopiedLog:
        """Read what the folder has, and cut what a crash has left unfinished."""
        self._copy = read_copy_file(self._files)
        if self._copy is None:
            names = set(self._files.list()) - {"lock", "lost+found", f"{COPY_PATH}.tmp"}
            if names:
                raise DataFolderError(
                    f"{self._files.name()} is not a copy: it has {', '.join(sorted(names)[:5])}; "
                    "follow with an empty folder",
                    path=self._files.name(),
                )
        elif self._copy.broker_group != self._broker_group:
            raise DataFolderError(
                f"{self._files.name()} is a copy of broker group {self._copy.broker_group}, not of "
                f"{self._broker_group}",
                path=self._files.name(),
                broker_group=self._copy.broker_group,
            )
        if is_claimed(self._files):
            identity, opening = read_identity(self._files), read_opening(self._files)
            self._origin = identity.broker_id, opening.opening
        self._log = CopiedLog(self._files)
        if self._log.has_lost_end:
            raise DataFolderError(
                f"{self._files.name()} has lost bytes of the log that it had synced: follow with "
                "an empty folder",
                path=self._files.name(),
            )
        return self._log

    async def _find_broker(self) -> BrokerClient:
        """Ask a metaserver where the broker is. Raises NotSentError if it does not say."""
        details = (await self._meta.health()).details
        for view in details.get("brokers", []):
            if view["broker_group"] == self._broker_group:
                return BrokerClient(self._network, view["address"], timeout_ms=CALL_TIMEOUT_MS)
        raise NotSentError(f"broker group {self._broker_group} is not known yet")

    def _check_broker(self, answer: Followed) -> None:
        """Raise FolderRefusedError if the group has another folder than the one that is copied."""
        if self._origin[0] and answer.broker_id != self._origin[0]:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"broker group {self._broker_group} has another data folder now than the one that "
                "was copied",
                broker_group=self._broker_group,
            )

    def _request(self, tail_crc: int) -> Follow:
        return Follow(
            self._broker_group, self._copy_id, self.end, FOLLOW_BYTES_MAX, WAIT_MS, tail_crc
        )

    def _store(self, answer: Followed, payload: memoryview) -> None:
        """Store what a broker has answered. Raises StorageError."""
        copied = self._log
        assert copied is not None
        if self._copy is None or answer.position != copied.end:
            self._begin(answer)
        if (answer.broker_id, answer.opening) != self._origin:
            copy_origin(
                self._files,
                broker_group=self._broker_group,
                broker_id=answer.broker_id,
                opening=answer.opening,
            )
            self._origin = answer.broker_id, answer.opening
        if payload:
            copied.append(answer.segment, payload)
        first = self._removals[-1].first_position if self._removals else copied.first_position
        if answer.first_position > first >= 0:
            self._removals.append(_Removal(answer.first_position, answer.end))
        while self._removals and copied.end >= self._removals[0].needed_end:
            copied.remove_before(self._removals.popleft().first_position)

    def _begin(self, answer: Followed) -> None:
        """Begin the copy, or begin it anew: the broker has removed what would come next."""
        copied = self._log
        assert copied is not None
        if copied.end >= 0:
            log.warning(
                "the broker has removed the log up to position %d, and this copy ends at %d: it "
                "begins anew",
                answer.first_position,
                copied.end,
            )
        self._copy = CopyFile(
            copy_id=self._copy_id, broker_group=self._broker_group, complete_at=answer.end
        )
        write_copy_file(self._files, self._copy)
        self._removals.clear()
        self._was_told_complete = False
        copied.clear()
        copied.begin(answer.position)

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    def _log_progress(self) -> None:
        if failures := self._failures.end_failures(self._boot_ms()):
            log.warning("follows broker group %s again, after %s", self._broker_group, failures)
        if not self._was_told_complete and self.is_complete:
            self._was_told_complete = True
            log.info(
                "the copy of broker group %s is complete up to position %d",
                self._broker_group,
                self.end,
            )

    def _log_failure(self, error: KeylaneError) -> None:
        if text := self._failures.count_failure(error.message, self._boot_ms()):
            log.warning("cannot follow broker group %s: %s", self._broker_group, text)
