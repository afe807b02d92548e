"""Hands over to a copy: this broker stores nothing more, and the copy takes its place.

    offered at a metaserver ─▶ no further commit begins ─▶ the copy has the whole log, and is told
        ├─ it has the place           ─▶ what waits is refused: clients go to the copy
        ╰─ not within HAND_OVER_MS    ─▶ withdrawn; the broker serves on

Clients wait meanwhile, and see no error: what they have sent is stored by one of the two.

Invariants
    A copy that takes the place late is not harmful: a commit that begins then waits for it, and is
    never acked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ...protocol.clock import Clock
from ...protocol.copies import HAND_OVER_MS, HandedOver, HandOver
from ...protocol.endpoints import GIVE_PLACE
from ...protocol.errors import (
    BusyError,
    ConflictError,
    KeylaneError,
    NotFoundError,
    Reason,
    UnavailableError,
    WrongBrokerError,
)
from ...rpc.race import shield
from ...rpc.server import ControlRoute
from ..folder_ownership import FolderOwnership, check_folder_ownership
from ..store.group_commit import GroupCommit
from .follow_service import FollowService, KnownCopy
from .set_keeper import LIVE_MS, SetKeeper

log = logging.getLogger("keylane.broker")

LOOK_MS = 200
"""How often a broker asks a metaserver whether the copy has taken its place, in milliseconds, in
case the copy cannot say so.
"""


class HandingOver:
    """
    Hands over one broker.

    Args:
        folder_ownership: says whether this broker serves its group.
        on_replaced: called with the reason when a copy has the broker's place.
    """

    def __init__(
        self,
        commit: GroupCommit,
        following: FollowService,
        keeper: SetKeeper,
        *,
        broker_group: str,
        clock: Clock,
        folder_ownership: FolderOwnership | None,
        on_replaced: Callable[[str], None],
    ) -> None:
        self._commit = commit
        self._following = following
        self._keeper = keeper
        self._broker_group = broker_group
        self._boot_ms = clock.boot_ms
        self._ownership = folder_ownership
        self._on_replaced = on_replaced
        self._is_running = False

    @property
    def is_possible(self) -> bool:
        """True if a copy could take the place now."""
        return bool(self._ready_copies())

    def route(self) -> ControlRoute:
        """Return the route of the call with which a metaserver asks for a hand-over."""
        return ControlRoute(GIVE_PLACE, lambda body, _params: self.run(body))

    async def run(self, request: HandOver) -> HandedOver:
        """
        Hand over to a copy. A caller that is cancelled does not end it.

        Raises:
            ConflictError: there is no copy that could take the place, or not this one.
            NotFoundError: there is no copy with this id.
            BusyError: it hands over already.
            UnavailableError: the copy has not taken the place in time, and this broker serves on.
            WrongBrokerError: this broker does not serve its group.
            KeylaneError: no metaserver has answered; nothing was done.
        """
        return await shield(self._run(request))

    async def _run(self, request: HandOver) -> HandedOver:
        await check_folder_ownership(self._ownership)
        if self._is_running:
            raise BusyError(Reason.HAND_OVER_RUNNING, broker_group=self._broker_group)
        copy_id = self._choose(request.copy_id)
        self._is_running = True
        try:
            await self._keeper.offer_place(copy_id)
            began_ms = self._boot_ms()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HAND_OVER_MS / 1000):
                    await self._commit.hold()
                    self._following.offer_place(copy_id)
                    await self._wait_until_taken()
            paused_ms = self._boot_ms() - began_ms
            if not await self._is_taken():
                raise UnavailableError(
                    Reason.PLACE_NOT_TAKEN,
                    f"copy {copy_id} has not taken the place of the broker of group "
                    f"{self._broker_group} within {HAND_OVER_MS} ms",
                    broker_group=self._broker_group,
                )
        finally:
            self._following.offer_place("")
            self._is_running = False
            if not self._keeper.is_replaced:
                self._commit.release()
        text = f"copy {copy_id} has taken its place"
        log.warning("the broker of group %s serves no more: %s", self._broker_group, text)
        self._on_replaced(text)
        await self._commit.hold()
        self._commit.refuse(
            WrongBrokerError(
                f"this broker does not serve its group: {text}", broker_group=self._broker_group
            )
        )
        return HandedOver(broker_group=self._broker_group, copy_id=copy_id, paused_ms=paused_ms)

    async def _wait_until_taken(self) -> None:
        """Wait until the copy, or a metaserver, says that the copy has the place."""
        while not self._following.taken_over.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_MS / 1000):
                    await self._following.taken_over.wait()
                    return
            with contextlib.suppress(KeylaneError):
                if await self._keeper.was_replaced():
                    return

    async def _is_taken(self) -> bool:
        """Return True if the copy has the place; otherwise withdraw the offer. If no metaserver
        answers, what the copy has said counts.
        """
        if self._keeper.is_replaced:
            return True
        try:
            if self._following.taken_over.is_set():
                return await self._keeper.was_replaced()
            await self._keeper.offer_place("")
        except ConflictError:
            self._keeper.note_replaced()
        except KeylaneError:
            if self._following.taken_over.is_set():
                self._keeper.note_replaced()
        return self._keeper.is_replaced

    def _choose(self, copy_id: str) -> str:
        """Return the copy that is to take the place. Raises ConflictError, NotFoundError."""
        ready = self._ready_copies()
        if not copy_id:
            if ready:
                return max(ready, key=lambda each: (each.position, each.at_ms)).copy_id
            raise ConflictError(
                Reason.NO_COPY_IN_SET,
                f"broker group {self._broker_group} has no copy that could take the place of its "
                "broker",
                broker_group=self._broker_group,
            )
        known, members = self._following.known(copy_id), self._keeper.commitment.members or ()
        if known is None and copy_id not in members:
            raise NotFoundError(
                Reason.COPY_UNKNOWN,
                f"the broker of group {self._broker_group} knows no copy {copy_id}",
                broker_group=self._broker_group,
            )
        if known not in ready:
            if copy_id not in members:
                problem = "is not in the set"
            elif known is None or not self._is_live(known):
                problem = "has not been heard of lately"
            else:
                problem = "runs without failover"
            raise ConflictError(
                Reason.COPY_NOT_READY,
                f"copy {copy_id} of broker group {self._broker_group} {problem}",
                broker_group=self._broker_group,
            )
        return copy_id

    def _ready_copies(self) -> list[KnownCopy]:
        members = self._keeper.commitment.members or ()
        return [
            each
            for each in self._following.standings
            if each.copy_id in members and each.takes_over and self._is_live(each)
        ]

    def _is_live(self, copy: KnownCopy) -> bool:
        return self._boot_ms() - copy.at_ms <= LIVE_MS
