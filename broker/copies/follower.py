"""Keeps a copy of a broker's data folder: follows its log, over restarts of both.

    look up the broker ─▶ Follow from the end of the copy ─▶ append, sync ─▶ Follow …
         ▲                     │ cut off, the broker is silent or moves
         ╰──── a pause ◀───────╯
    the log of the broker begins after the copy ends ─▶ the copy starts over
    the broker has lost what was not durable     ─▶ the copy is cut to what both have
    the log of the broker is another one         ─▶ ends, and changes nothing

Invariants
    A segment is removed here once the broker has removed it, and the copy has what the broker had
    stored by then, in commits that are never cut: retention repeats what is still needed of a
    segment before it removes it.
    What was durable at the broker and at the copies that acks waited for is never cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from typing import NamedTuple

import msgspec

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.copies import TakeOver
from ...protocol.endpoints import TAKE_OVER
from ...protocol.errors import (
    ConflictError,
    DataFolderError,
    FolderRefusedError,
    KeylaneError,
    NotSentError,
    Reason,
    WrongBrokerError,
)
from ...protocol.frames import Follow, Followed
from ...protocol.log_filter import LogFilter
from ...rpc.client import BrokerClient, MetaClient
from ...rpc.network import Network
from ...rpc.race import start_task
from ..storage.copy_file import (
    COPY_PATH,
    Candidate,
    CopyFile,
    read_copy_file,
    write_copy_file,
)
from ..storage.data_folder import copy_origin, is_claimed, read_identity, read_opening
from ..storage.files import Files
from ..store.group_commit import RunBlocking
from .copied_log import CopiedLog, Tail
from .folding import Folding
from .follow_service import FOLLOW_BYTES_MAX
from .placement import NOWHERE, Site

log = logging.getLogger("keylane.broker")

WAITS = Backoff(first_ms=20, max_ms=2_000)
WAIT_MS = 1_000
"""How long a broker waits for a commit before it answers without bytes, in milliseconds."""
CALL_TIMEOUT_MS = 10_000
TAKE_OVER_CALL_TIMEOUT_MS = 1_000
"""As CALL_TIMEOUT_MS, of a copy that may take the place of a broker that hangs."""
REACH_MS = 200
"""How long it waits for a connection, in milliseconds, before it looks whether the place is free or
another copy has it; the attempt continues meanwhile.
"""
TAKE_OVER_MS = 100
"""The longest pause between two requests for the broker's place, in milliseconds."""
MOVING_MS = 20
"""The longest pause of a copy whose broker has said that another one serves: acks of that one wait
for the copy.
"""
MOVES_MAX = 25
"""How often it looks for that one before it asks for the place itself."""
NOTED_EVERY_MS = 10_000
"""How often the follower notes in its folder what is durable, in milliseconds."""


_COMPARED = Tail(-1, -1, 0)
"""Says that the log was compared with that of the broker's present opening."""


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
        takes_over: True if the copy asks for the place of its broker when it cannot reach it.
        folding: keeps the copy ready to serve.
        site: where the follower runs.
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
        takes_over: bool = False,
        folding: Folding | None = None,
        site: Site = NOWHERE,
    ) -> None:
        self._site = site
        self._files = files
        self._broker_group = broker_group
        self._meta = meta
        self._network = network
        self._run_blocking = run_blocking
        self._boot_ms = clock.boot_ms
        self._takes_over = takes_over
        self._folding = folding
        self._new_id = f"{rng.getrandbits(128):032x}"
        self._name = f"{rng.getrandbits(64):016x}"
        """The name of this follower: another one may have a folder with the same id."""
        self._rng = rng
        self._failures = LogFilter()
        self._copy: CopyFile | None = None
        self._log: CopiedLog | None = None
        self.reads_at = ""
        """The address at which the copy answers reads; "" if it answers none."""
        self._origin = "", ""
        """The broker's id and opening, as they are written in the folder; "" if they are not."""
        self._broker_first = -1
        """The first position of the broker's log, as it has said last."""
        self._durable_end = -1
        """The end of what the copy has and a broker has called durable."""
        self.bytes_cut = 0
        """How many bytes of its log the copy has cut since the follower's start."""
        self._noted_ms = 0
        self._removals: deque[_Removal] = deque()
        self._was_told_complete = False
        self._no_place = ""
        """Why this copy has not taken the place of its broker, as it was logged last."""
        self._address = ""
        """Where the broker was last; it is asked there while no metaserver says where it is."""
        self._broker: BrokerClient | None = None
        """The broker that is followed; None while it is looked up."""
        self._reached: tuple[BrokerClient, asyncio.Task[object]] | None = None
        """A broker that may hang, and the attempt to connect to it."""
        self._ahead: asyncio.Task[tuple[Followed, memoryview]] | None = None
        """Asks for what follows the answer that is being stored."""
        self._tail = _COMPARED
        """What the next request lets the broker compare."""

    @property
    def _opened_log(self) -> CopiedLog:
        assert self._log is not None
        return self._log

    @property
    def end(self) -> int:
        """The end of the copy's log; -1 while it has none."""
        return -1 if self._log is None else self._log.end

    @property
    def durable(self) -> tuple[tuple[int, ...], int]:
        """Where the segments of the copy begin, and the end of what no promotion cuts away."""
        copied = self._log
        return ((), -1) if copied is None else (copied.bases, min(self._durable_end, copied.end))

    @property
    def copy_id(self) -> str:
        """The id of the copy."""
        return self._new_id if self._copy is None else self._copy.copy_id

    @property
    def is_complete(self) -> bool:
        """True if the copy can take the place of the broker's folder."""
        copy = self._copy
        return copy is not None and self.end >= max(copy.complete_at, copy.durable_end)

    async def run(self) -> None:
        """
        Follow the broker until cancelled, or a metaserver has given its place to this copy, whose
        folder is ready for a promotion then.

        Raises:
            DataFolderError: the folder is not a copy, or one of another broker group.
            FolderRefusedError: the log of the broker is not the one that was copied.
            StorageError: the folder cannot be written to.
        """
        await self._run_blocking(self._open)
        pauses = WAITS.pauses(self._rng)
        folding = None
        if self._folding is not None:
            folding = start_task(self._folding.run(lambda: self.durable), name="folding")
        try:
            while True:
                try:
                    next_answer = await self._next_answer()
                except FolderRefusedError:
                    raise
                except KeylaneError as error:
                    self._log_failure(error)
                    await self._disconnect()
                    pause_ms = pauses.next_pause_ms()
                    is_moving = isinstance(error, WrongBrokerError) and pauses.failures < MOVES_MAX
                    if self._takes_over:
                        pause_ms = min(pause_ms, MOVING_MS if is_moving else TAKE_OVER_MS)
                    if not is_moving and await self._has_taken_over():
                        return
                    await asyncio.sleep(pause_ms / 1000)
                    continue
                pauses.reset()
                if next_answer is None:
                    continue
                await self._take(*next_answer)
                if next_answer[0].is_offered:
                    if await self._has_taken_over():
                        return
                    await asyncio.sleep(TAKE_OVER_MS / 1000)
        finally:
            if folding is not None:
                folding.cancel()
            await self._stop_reaching()
            await self._disconnect()
            await self._run_blocking(self._opened_log.close)  # after a call that was left running

    async def _next_answer(self) -> tuple[Followed, memoryview] | None:
        """
        Return what the broker has after the end of the copy; None if more of the copy must be
        compared first.

        Raises:
            KeylaneError: the broker cannot be found or asked.
            FolderRefusedError: the log of the broker is not the one that was copied.
        """
        if self._broker is None:
            self._broker = await self._find_broker()
            await self._compare_next()
        tail = self._tail
        asked, self._ahead = self._ahead, None
        try:
            answer, payload = await (asked or self._ask(self._broker, self._request(tail)))
        except FolderRefusedError as refused:
            # The broker was restarted, if the tail was not to be compared.
            if refused.reason is Reason.COPY_TAKEN:
                await self._run_blocking(self._take_new_id)
            elif tail is not _COMPARED:
                await self._cut_back(self._broker, refused)
            await self._compare_next()
            return None
        self._check_broker(answer)
        was_restarted = tail is _COMPARED and answer.opening != self._origin[1]
        began = self._broker_first
        self._broker_first = answer.first_position
        if self.end >= 0 and (was_restarted or began < answer.position < self.end):
            # The broker may be on another copy of its folder, or has removed the beginning of what
            # was to be compared.
            await self._compare_next()
            return None
        return answer, payload

    async def _take(self, answer: Followed, payload: memoryview) -> None:
        """Store what the broker has answered, and ask for what follows meanwhile."""
        begins = answer.position != self.end
        if not begins:  # what it has was compared
            if answer.is_durable:
                self._durable_end = max(self._durable_end, min(answer.end, self.end))
            self._tail = _COMPARED
            if self._broker is not None and self._has_more(answer, len(payload)):
                following = self._request(_COMPARED, wait_ms=0, unsynced_bytes=len(payload))
                self._ahead = asyncio.ensure_future(self._ask(self._broker, following))
        await self._run_blocking(self._store, answer, payload)
        if begins:
            await self._compare_next()
        elif answer.is_durable:
            self._durable_end = max(self._durable_end, min(answer.end, self.end))
        self._log_progress()

    async def _compare_next(self) -> None:
        """Let the broker compare the end of the copy with its own log at the next request."""
        self._tail = await self._run_blocking(self._tail_at, self.end)

    async def _disconnect(self) -> None:
        """Close the connection to the broker, which is looked up again."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.close()

    async def _has_taken_over(self) -> bool:
        """Ask a metaserver for the broker's place. Return True if this copy has it."""
        if not self._takes_over:
            return False
        if not self.is_complete:
            self._log_no_place("it is not complete")
            return False
        request = TakeOver(
            copy_id=self.copy_id,
            broker_id=self._origin[0],
            log_end=self._opened_log.whole_end,
        )
        try:
            await self._meta.call(TAKE_OVER, request, group=self._broker_group)
            await self._tell_broker()
        except ConflictError as error:
            if error.reason is not Reason.BROKER_SERVES:
                self._log_no_place(error.message)
            return False
        except FolderRefusedError:
            raise
        except KeylaneError as error:
            self._log_failure(error)
            return False
        return True

    async def _tell_broker(self) -> None:
        """Tell the broker that this copy has its place, unless it cannot be reached."""
        if self._broker is not None:
            request = self._request(_COMPARED, wait_ms=0)
            with contextlib.suppress(KeylaneError):
                await self._broker.call(msgspec.structs.replace(request, has_taken_over=True))

    @property
    def candidate(self) -> Candidate:
        """The copy to which a metaserver has given the broker's place, once `run` has returned."""
        assert self._copy is not None
        return Candidate(self._copy, self._origin[0], self._opened_log.whole_end)

    def _open(self) -> None:
        """Read what the folder has, and cut what a crash has left unfinished."""
        self._copy = read_copy_file(self._files)
        if self._copy is None:
            names = set(self._files.list()) - {"lock", "lost+found", f"{COPY_PATH}.tmp"}
            if names:
                raise DataFolderError(
                    Reason.NOT_A_COPY,
                    f"{self._files.name()} is not a copy: it has {', '.join(sorted(names)[:5])}; "
                    "follow with an empty folder",
                    path=self._files.name(),
                )
        elif self._copy.broker_group != self._broker_group:
            raise DataFolderError(
                Reason.NOT_A_COPY,
                f"{self._files.name()} is a copy of broker group {self._copy.broker_group}, not of "
                f"{self._broker_group}",
                path=self._files.name(),
                broker_group=self._copy.broker_group,
            )
        if is_claimed(self._files):
            identity, opening = read_identity(self._files), read_opening(self._files)
            self._origin = identity.broker_id, opening.opening
        if self._copy is not None:
            self._durable_end = self._copy.durable_end
        self._log = CopiedLog(self._files)
        if self._log.has_lost_bytes:
            raise DataFolderError(
                Reason.COPY_UNUSABLE,
                f"{self._files.name()} has lost bytes of the log that it had synced: follow with "
                "an empty folder",
                path=self._files.name(),
            )

    async def _find_broker(self) -> BrokerClient:
        """Ask a metaserver where the broker is. Raises KeylaneError if none has ever said."""
        try:
            brokers = (await self._meta.health()).details.get("brokers", [])
        except KeylaneError:
            if not self._address:
                raise
            brokers = []
        for view in brokers:
            if view["broker_group"] == self._broker_group:
                self._address = view["address"]
        if not self._address:
            raise NotSentError(f"broker group {self._broker_group} is not known yet")
        if self._takes_over:
            return await self._reach(self._address)
        return BrokerClient(self._network, self._address, timeout_ms=CALL_TIMEOUT_MS)

    async def _reach(self, address: str) -> BrokerClient:
        """Return the broker at an address once it is connected. Raises NotSentError."""
        if self._reached is not None and self._reached[0].address != address:
            await self._stop_reaching()
        if self._reached is None:
            broker = BrokerClient(self._network, address, timeout_ms=TAKE_OVER_CALL_TIMEOUT_MS)
            self._reached = broker, start_task(broker.channel(), name="reaching")
        broker, connecting = self._reached
        await asyncio.wait((connecting,), timeout=REACH_MS / 1000)
        if not connecting.done():
            raise NotSentError(f"no connection to the broker at {address} yet")
        self._reached = None
        await connecting
        return broker

    async def _stop_reaching(self) -> None:
        reached, self._reached = self._reached, None
        if reached is not None:
            broker, connecting = reached
            connecting.cancel()
            await asyncio.wait((connecting,))
            await broker.close()

    def _check_broker(self, answer: Followed) -> None:
        """Raise FolderRefusedError if the group has another folder than the one that is copied."""
        if self._origin[0] and answer.broker_id != self._origin[0]:
            raise FolderRefusedError(
                Reason.COPY_DIFFERS,
                f"broker group {self._broker_group} has another data folder now than the one that "
                "was copied",
                broker_group=self._broker_group,
            )

    def _tail_at(self, position: int) -> Tail:
        """Return what must be compared when the broker was restarted."""
        copied = self._opened_log
        return copied.tail(position, self._broker_first) if position >= 0 else _COMPARED

    def _has_more(self, answer: Followed, length: int) -> bool:
        """Return True if the broker has more of the log than an answer of `length` bytes."""
        return length == FOLLOW_BYTES_MAX or (length > 0 and answer.end > self.end + length)

    def _request(self, tail: Tail, *, wait_ms: int = WAIT_MS, unsynced_bytes: int = 0) -> Follow:
        """
        Return a request for what follows the end of a tail.

        Args:
            unsynced_bytes: how many bytes follow the tail that are about to be stored.
        """
        return Follow(
            self._broker_group,
            self.copy_id,
            (self.end if tail is _COMPARED else tail.position) + unsynced_bytes,
            FOLLOW_BYTES_MAX,
            wait_ms,
            tail.start,
            tail.crc,
            self._name,
            unsynced_bytes,
            takes_over=self._takes_over and self.is_complete,
            machine=self._site.machine,
            zone=self._site.zone,
            reads_at=self.reads_at,
        )

    async def _ask(self, broker: BrokerClient, request: Follow) -> tuple[Followed, memoryview]:
        """Return the answer of a broker. Raises KeylaneError."""
        answer, payload = await broker.call(request, wait_ms=request.wait_ms)
        assert isinstance(answer, Followed)
        return answer, payload

    async def _cut_back(self, broker: BrokerClient, refused: FolderRefusedError) -> None:
        """
        Cut the copy to what its broker has as well.

        Raises:
            FolderRefusedError: they differ before the last position that was durable at both.
            KeylaneError
        """
        copied = self._opened_log
        positions = await self._run_blocking(copied.last_positions)
        # Of these, the first `equal` are equal, and that at `different` is not.
        equal, different = 0, len(positions) - 1
        while equal < different:
            middle = (equal + different) // 2
            tail = await self._run_blocking(self._tail_at, positions[middle])
            try:
                answer, _ = await self._ask(broker, self._request(tail, wait_ms=0))
            except FolderRefusedError as error:
                if error.reason is Reason.COPY_TAKEN:
                    return  # the next request is refused for it as well
                different = middle
            else:
                self._check_broker(answer)
                equal = middle + 1
        if not equal:
            raise refused
        position = positions[equal - 1]
        if position < self._durable_end:
            raise refused
        log.warning(
            "broker group %s has lost what was not durable: the copy is cut from position %d to %d",
            self._broker_group,
            self.end,
            position,
        )
        cut_bytes = self.end - position
        await self._run_blocking(copied.cut, position)
        self.bytes_cut += cut_bytes

    def _take_new_id(self) -> None:
        """Give the copy another id: another follower has a folder with this one, of which this
        folder was made, or which was made of it. Raises StorageError.
        """
        before, self._new_id = self.copy_id, f"{self._rng.getrandbits(128):032x}"
        if self._copy is not None:
            self._copy = msgspec.structs.replace(self._copy, copy_id=self._new_id)
            write_copy_file(self._files, self._copy)
        log.warning(
            "another follower has a folder with the id of this copy, %s: this one is copy %s now",
            before,
            self.copy_id,
        )

    def _store(self, answer: Followed, payload: memoryview) -> None:
        """Store what a broker has answered. Raises StorageError, DataFolderError."""
        copied = self._opened_log
        if self._copy is not None and self._files.size(COPY_PATH) is None:
            raise DataFolderError(
                f"{self._files.name()} was removed while the follower used it",
                path=self._files.name(),
            )
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
        self._note_durable()
        first = self._removals[-1].first_position if self._removals else copied.first_position
        if answer.first_position > first >= 0:
            self._removals.append(_Removal(answer.first_position, answer.end))
        while self._removals and copied.barrier_position >= self._removals[0].needed_end:
            copied.remove_before(self._removals.popleft().first_position)

    def _note_durable(self) -> None:
        """Note what is durable, at most every NOTED_EVERY_MS. Raises StorageError."""
        now_ms = self._boot_ms()
        copy = self._copy
        assert copy is not None
        if self._durable_end > copy.durable_end and now_ms - self._noted_ms >= NOTED_EVERY_MS:
            self._noted_ms = now_ms
            self._copy = msgspec.structs.replace(copy, durable_end=self._durable_end)
            write_copy_file(self._files, self._copy)

    def _begin(self, answer: Followed) -> None:
        """Begin the copy, or start it over: the broker has removed what would come next."""
        copied = self._opened_log
        if copied.end >= 0:
            log.warning(
                "the broker has removed the log up to position %d, and this copy ends at %d: it "
                "starts over",
                answer.first_position,
                copied.end,
            )
        self._copy = CopyFile(
            copy_id=self.copy_id, broker_group=self._broker_group, complete_at=answer.end
        )
        write_copy_file(self._files, self._copy)
        self._removals.clear()
        self._durable_end = -1
        self._was_told_complete = False
        if self._folding is not None:
            self._folding.begin_anew()
        copied.clear()
        copied.begin(answer.position)

    # ── logging ───────────────────────────────────────────────────────────────────────────────────
    def _log_progress(self) -> None:
        self._no_place = ""
        if failures := self._failures.end_failures(self._boot_ms()):
            log.warning("follows broker group %s again, after %s", self._broker_group, failures)
        if not self._was_told_complete and self.is_complete:
            self._was_told_complete = True
            log.info(
                "the copy of broker group %s is complete up to position %d",
                self._broker_group,
                self.end,
            )

    def _log_no_place(self, problem: str) -> None:
        """Log once why this copy does not take the place of a broker that it cannot reach."""
        if problem != self._no_place:
            self._no_place = problem
            log.warning(
                "copy %s does not take the place of the broker of group %s: %s",
                self.copy_id,
                self._broker_group,
                problem,
            )

    def _log_failure(self, error: KeylaneError) -> None:
        if text := self._failures.count_failure(error.message, self._boot_ms()):
            log.warning("cannot follow broker group %s: %s", self._broker_group, text)
