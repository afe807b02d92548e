"""Keeps the set of copies that acks wait for, by asking a metaserver.

    a copy has the whole log, and more are wanted ─▶ counts from now on ─▶ stored ─▶ in the set
    a commit has waited for a copy for too long   ─▶ still counts       ─▶ stored ─▶ out of the set
    a metaserver names a higher term              ─▶ a copy was promoted: no commit is acked again
    the metaservers' database fell back           ─▶ the set stays; told once all of it follows

Invariants
    Until a metaserver has answered, the stored set and the proposed one both count. A proposal
    whose answer was lost is repeated until its version has passed, because it may still arrive.
    A folder whose acks may have to wait for copies says so itself, before the first copy counts:
    its broker completes no commit, and answers nobody, before a metaserver has said which copies
    count, and these have what was in the log: of its end it is not known whether it was durable.
    In quarantine the database may name other copies than before: those that counted count on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from ...protocol.backoff import Backoff
from ...protocol.clock import Clock
from ...protocol.copies import ChangeCopySet, CopySet, OfferPlace
from ...protocol.errors import ConflictError, KeylaneError
from ...protocol.log_filter import LogFilter
from ...protocol.text import listed
from ...rpc.operating.histogram import Histogram
from ..storage.data_folder import has_copies, record_copies
from ..storage.files import Files
from ..store.group_commit import RunBlocking
from ..store.store import Store
from .commitment import WAITS_FOR_COPIES, Commitment, decide_set
from .placement import NOWHERE, Placement, Site

log = logging.getLogger("keylane.broker")

POLL_MS = 2_000
"""How often a broker with copies asks how many are wanted, in milliseconds."""
QUARANTINE_POLL_MS = 500
"""As POLL_MS, in quarantine."""
IDLE_POLL_MS = 30_000
"""How often one without copies asks."""
TICK_MS = 100
LIVE_MS = 2_000
"""How long ago a copy may have asked last that is to join, in milliseconds."""
SILENT_MS = 20_000
"""How long a copy must have been silent before another takes its place, in milliseconds."""
AWAY_MS = 1_000
"""How long a copy that was too late does not join again, in milliseconds: twice as long as the time
before if it was late again within AWAY_MS_MAX.
"""
AWAY_MS_MAX = 20_000
CLOSE_MS = 1_000
REMEMBERED_MAX = 64
"""The largest number of copies that are remembered."""
WAITS = Backoff(first_ms=50, max_ms=1_000)


class Away(NamedTuple):
    """The time in which a copy that was too late may not join again."""

    until_ms: int = 0
    length_ms: int = 0

    def next(self, now_ms: int) -> Away:
        """Return the time that begins now, because the copy was late again."""
        is_soon = self.length_ms and now_ms < self.until_ms + AWAY_MS_MAX
        length_ms = min(2 * self.length_ms, AWAY_MS_MAX) if is_soon else AWAY_MS
        return Away(now_ms + length_ms, length_ms)


class SetKeeper:
    """
    Keeps the copies of one broker.

    Args:
        change: asks a metaserver to change the set, and returns the stored one.
        offer: asks a metaserver to let a copy take this broker's place.
        known: set once a metaserver has known this opening of the folder.
        is_registered: returns True while the metaservers accept this opening.
        lag_ms: how long a commit waits for a copy before the broker asks to leave it out.
        site: where the broker runs.
    """

    def __init__(
        self,
        store: Store,
        files: Files,
        *,
        broker_group: str,
        broker_id: str,
        opening: str,
        change: Callable[[ChangeCopySet], Awaitable[CopySet]],
        offer: Callable[[OfferPlace], Awaitable[CopySet]],
        known: asyncio.Event,
        is_registered: Callable[[], bool],
        run_blocking: RunBlocking,
        clock: Clock,
        rng: random.Random,
        lag_ms: int,
        site: Site = NOWHERE,
    ) -> None:
        self.site = site
        self._log = store.log
        self._wait = store.commit.copy_wait
        self._wait_flushed = store.commit.wait_flushed
        self._opened_end = store.log.end
        self._files = files
        self._broker_group = broker_group
        self._broker_id = broker_id
        self._opening = opening
        self._change = change
        self._offer = offer
        self._known = known
        self._is_registered = is_registered
        self._run_blocking = run_blocking
        self._boot_ms = clock.boot_ms
        self._rng = rng
        self._lag_ms = lag_ms
        self._failures = LogFilter()
        self.commitment = Commitment()
        self._stored: CopySet | None = None
        self._changes = 0
        self.is_replaced = False
        """True once a copy was promoted."""
        self._asked_ms = 0
        self._opened_ms = clock.boot_ms()
        self._known_ms = 0
        """When a metaserver has said for the first time which copies count."""
        self._quarantined_ms = 0
        """When the present quarantine was first heard of."""
        self._reported_ms: dict[str, int] = {}
        """By copy, when it reported last."""
        self._sites: dict[str, Site] = {}
        """By copy, where it runs."""
        self._logged: dict[str, str] = {}
        """What was logged of machines that are shared."""
        self._away: dict[str, Away] = {}
        self._event = asyncio.Event()
        self.on_copied: Callable[[], None] = lambda: None
        """Called once, when the copies that count have what the log had at the start."""
        self._is_copied = False
        self._had_marker = has_copies(files)
        self._has_marker: bool | None = self._had_marker
        """Whether the folder says that it has copies; None after a write that has failed."""
        if self._has_marker:
            self._wait.copies = self.commitment

    # ── for operators ─────────────────────────────────────────────────────────────────────────────
    @property
    def stored(self) -> CopySet | None:
        """The set as a metaserver has last sent it; None before that, and once a copy was
        promoted.
        """
        return None if self.is_replaced else self._stored

    @property
    def quarantine(self) -> str:
        """The reason of the quarantine that the copies are in, as a metaserver has last told it."""
        return "" if self._stored is None else self._stored.quarantine

    @property
    def term(self) -> int:
        """How often a copy was promoted, as a metaserver has last told it; 0 before that."""
        return 0 if self._stored is None else self._stored.term

    @property
    def changes(self) -> int:
        """How often this broker has seen another set than before."""
        return self._changes

    @property
    def waits(self) -> Histogram:
        """How long commits that were synced here have waited for copies."""
        return self._wait.waits

    @property
    def waiting_ms(self) -> int:
        """For how many milliseconds a commit has waited for copies; 0 if none does."""
        return self._wait.waiting_ms

    @property
    def problem(self) -> str:
        """The reason why nothing is acked now; "" if acks continue, or a metaserver has yet to be
        asked to leave out a copy that is late.
        """
        if self.is_replaced:
            return (
                "a copy of its data folder was promoted: restart it if an operator has accepted "
                "this folder since"
            )
        is_starting = not self.knows_durable_end()
        if not is_starting and self.waiting_ms < 2 * self._lag_ms:
            return ""
        missing = self.commitment.missing(self._log.written_end)
        if self.quarantine:
            return f"acks wait for copies, and none may be left out: {self.quarantine}"
        have = 1 + len(self.commitment.counted - missing)
        if have < self.commitment.least:
            return (
                f"acks wait until {self.commitment.least} data folders have everything, and "
                f"{have} {'has' if have == 1 else 'have'} it"
            )
        if is_starting:
            return WAITS_FOR_COPIES
        late = ", ".join(sorted(missing))
        return f"acks wait for copies ({late or 'unknown'}), and no metaserver has left them out"

    def shared_machines(self) -> dict[str, str]:
        """Return, by copy on a machine with the broker or a copy of the set, a sentence that says
        so; nothing where an operator has allowed it.
        """
        stored = self.stored
        if stored is None or stored.wanted == 1 or stored.may_share_machine:
            return {}
        placement = self._placement(stored)
        sentences = {}
        for copy_id in sorted(self._sites):
            if neighbour := placement.neighbour(copy_id, stored.members):
                machine = self._sites[copy_id].machine
                where = f"the copy {copy_id} is on the same machine as {neighbour} ({machine})"
                sentences[copy_id] = (
                    f"{where}, and leaves the set once acks can do without it"
                    if copy_id in stored.members
                    else f"{where}, so acks do not wait for it"
                )
        return sentences

    def _placement(self, stored: CopySet) -> Placement:
        return Placement(self.site, self._sites, stored.may_share_machine)

    # ── from copies ───────────────────────────────────────────────────────────────────────────────
    def knows_durable_end(self) -> bool:
        """Return False after a start until the copies that count have what the log had then."""
        return self._is_copied or not self._had_marker

    def may_be_ahead(self, copy_id: str) -> bool:
        """Return True if acks wait for a copy, or may do so soon: under load, a copy that gets only
        what is durable is always a commit behind.
        """
        if copy_id in self.commitment.counted:
            return True
        stored = self._stored
        return (
            stored is not None
            and copy_id in self._reported_ms
            and len(stored.members) < stored.wanted - 1
        )

    def note_report(self, copy_id: str, position: int, site: Site = NOWHERE) -> None:
        """Note where a copy runs, and that it has synced the log up to a position."""
        is_new = copy_id not in self.commitment.synced
        if is_new and len(self._reported_ms) >= REMEMBERED_MAX:
            self._forget_oldest()
        self.commitment.synced[copy_id] = position
        self._reported_ms[copy_id] = self._boot_ms()
        self._sites[copy_id] = site
        self._copies_changed()
        if is_new:
            self._event.set()

    def _forget_oldest(self) -> None:
        """Forget the copy that has not reported for the longest time, unless it counts."""
        others = self._reported_ms.keys() - self.commitment.counted
        oldest = min(others, key=self._reported_ms.__getitem__)
        for by_copy in (
            self.commitment.synced,
            self._reported_ms,
            self._sites,
            self._logged,
            self._away,
        ):
            by_copy.pop(oldest, None)

    def _copies_changed(self) -> None:
        self._wait.check()
        if not self._is_copied and self.commitment.covers(self._opened_end):
            self._is_copied = True
            self.on_copied()

    # ── to a metaserver ───────────────────────────────────────────────────────────────────────────
    async def run(self) -> None:
        """Keep the set until cancelled, or a copy has taken this broker's place."""
        await self._known.wait()  # before, each answer is a refusal
        pauses = WAITS.pauses(self._rng)
        while not self.is_replaced:  # then nothing is acked any more
            is_idle = not (self._has_marker or self._reported_ms or self.quarantine)
            if self._stored is not None and is_idle:
                self._event.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_POLL_MS / 1000):
                        await self._event.wait()
            try:
                await self._keep()
            except Exception as error:  # noqa: BLE001 - without the keeper, acks may wait for ever
                if self._is_registered():  # otherwise the registration says what is wrong
                    self._log_failure(error)
                await asyncio.sleep(pauses.next_pause_ms() / 1000)
            else:
                pauses.reset()
                await asyncio.sleep(TICK_MS / 1000)

    def _log_failure(self, error: Exception) -> None:
        message = error.message if isinstance(error, KeylaneError) else repr(error)
        if text := self._failures.count_failure(message, self._boot_ms()):
            log.warning(
                "cannot keep the set of copies of broker group %s: %s", self._broker_group, text
            )

    async def _keep(self) -> None:
        """Ask a metaserver what it has stored, if that is due, and change what has to change."""
        now_ms = self._boot_ms()
        poll_ms = QUARANTINE_POLL_MS if self.quarantine else POLL_MS
        if self._stored is None or now_ms - self._asked_ms >= poll_ms:
            self._adopt(await self._ask(None))
        stored = self._stored
        if self.is_replaced:
            return
        assert stored is not None
        if stored.wanted > 1 or stored.members:
            await self._begin(stored)
        elif self._has_marker is not False and not stored.quarantine:
            await self._end()
            return
        if stored.quarantine:
            return
        members = decide_set(
            self.commitment,
            wanted=stored.wanted,
            acked_end=self._log.end if self._log.end > self._opened_end else 0,
            log_end=self._wait.decided_end(self._log.end),
            written_end=self._log.written_end,
            is_late=self._is_late(now_ms),
            candidates=self._candidates(now_ms),
            silent=self._silent(now_ms),
            placement=self._placement(stored),
        )
        self._log_shared_machines()
        if members is not None and members != self.commitment.members:
            await self._propose(members)

    def _log_shared_machines(self) -> None:
        sentences = self.shared_machines()
        for copy_id, sentence in sentences.items():
            if self._logged.get(copy_id) != sentence:
                log.warning("broker group %s: %s", self._broker_group, sentence)
        self._logged = sentences

    def _is_late(self, now_ms: int) -> bool:
        """Return True if a copy has kept a commit, or the clients, waiting for too long."""
        if self._is_copied:
            return self._wait.waiting_ms >= self._lag_ms
        if not self._is_registered():  # copies follow no broker that is not
            self._known_ms = now_ms
        return now_ms - self._known_ms >= self._lag_ms

    def _candidates(self, now_ms: int) -> list[str]:
        return [
            copy_id
            for copy_id, reported_ms in self._reported_ms.items()
            if now_ms - reported_ms <= LIVE_MS
            and now_ms >= self._away.get(copy_id, Away()).until_ms
        ]

    def _silent(self, now_ms: int) -> list[str]:
        return [
            copy_id
            for copy_id in self.commitment.members or ()
            if now_ms - self._reported_ms.get(copy_id, self._opened_ms) > SILENT_MS
        ]

    async def _begin(self, stored: CopySet) -> None:
        """Let acks wait for the copies that count, if they do not yet."""
        if not self._has_marker:
            await self._record_copies(exist=True)
        if self._wait.copies is None:
            self._wait.copies = self.commitment
            # A commit that has begun before waits for no copy: none may join until it has ended.
            await self._wait_flushed()
            self.commitment.least = stored.least

    async def _end(self) -> None:
        """Let acks wait for no copy any more."""
        self._wait.copies = None
        self._copies_changed()
        await self._record_copies(exist=False)

    async def _record_copies(self, *, exist: bool) -> None:
        self._has_marker = None
        await self._run_blocking(partial(record_copies, self._files, exist=exist))
        self._has_marker = exist

    async def _propose(self, members: frozenset[str]) -> None:
        """Change the set. What is proposed counts until it is stored, or something newer is."""
        self.commitment.proposed = members
        before = self._stored
        assert before is not None
        stored = before
        while stored.version == before.version:
            stored = await self._ask_until_answered(members)
        before_members = self.commitment.members or frozenset()
        self._adopt(stored)
        if self.is_replaced or stored.quarantine:
            return
        left = before_members - frozenset(stored.members)
        for copy_id in left:
            self._away[copy_id] = self._away.get(copy_id, Away()).next(self._boot_ms())
        log.log(
            logging.WARNING if left else logging.INFO,
            "acks of broker group %s wait for %s%s",
            self._broker_group,
            listed(stored.members) if stored.members else "no copy",
            f", and no more for {listed(sorted(left))}" if left else "",
        )

    async def _ask_until_answered(self, members: frozenset[str]) -> CopySet:
        pauses = WAITS.pauses(self._rng)
        while True:
            try:
                return await self._ask(tuple(sorted(members)))
            except KeylaneError as error:
                if text := self._failures.count_failure(error.message, self._boot_ms()):
                    log.warning(
                        "acks of broker group %s wait until a metaserver has stored the set of "
                        "copies: %s",
                        self._broker_group,
                        text,
                    )
                await asyncio.sleep(pauses.next_pause_ms() / 1000)

    async def _ask(self, members: tuple[str, ...] | None) -> CopySet:
        stored = self._stored or CopySet(term=-1)
        self._asked_ms = self._boot_ms()
        answer = await self._change(
            ChangeCopySet(
                broker_id=self._broker_id,
                opening=self._opening,
                term=stored.term,
                version=stored.version,
                members=members,
                durable_end=self._log.end if self._is_copied else 0,
                known=self._known_set(),
                is_followed=self._is_followed(),
            )
        )
        if failures := self._failures.end_failures(self._boot_ms()):
            log.warning(
                "broker group %s: metaservers answer about its set of copies again, after %s",
                self._broker_group,
                failures,
            )
        return answer

    def _known_set(self) -> CopySet | None:
        """The set as this broker knows it: the copies that count, without those proposed."""
        if self._stored is None:
            return None
        members = tuple(sorted(self.commitment.members or ()))
        return msgspec.structs.replace(self._stored, members=members)

    def _is_followed(self) -> bool:
        """Return True if all copies that count have followed this broker since the quarantine."""
        counted = self.commitment.counted
        return (
            self._is_copied
            and (self._wait.copies is not None or not counted)
            and all(self._reported_ms.get(each, 0) > self._quarantined_ms for each in counted)
        )

    def _adopt(self, stored: CopySet) -> None:
        """Take what a metaserver has stored."""
        if self._names_another(stored):
            self.note_replaced()
            return
        self._note_quarantine(stored)
        if stored.quarantine and self._stored is not None:
            self._stored = msgspec.structs.replace(
                self._stored,
                term=stored.term,
                version=stored.version,
                quarantine=stored.quarantine,
            )
            return
        if self._stored is None:
            self._known_ms = self._boot_ms()
        elif stored.members != self._stored.members:
            self._changes += 1
        self._stored = stored
        if self._wait.copies is not None:
            self.commitment.least = stored.least
        self.commitment.confirm(frozenset(stored.members))
        self._copies_changed()

    def _note_quarantine(self, stored: CopySet) -> None:
        """Note that a quarantine has begun, also after another one, or has ended."""
        known = self._stored or CopySet()
        if stored.quarantine and (stored.version != known.version or not known.quarantine):
            self._quarantined_ms = self._boot_ms()
        if stored.quarantine != known.quarantine:
            log.warning(
                "the set of copies of broker group %s %s",
                self._broker_group,
                f"may not change: {stored.quarantine}" if stored.quarantine else "may change again",
            )

    def _names_another(self, stored: CopySet) -> bool:
        """Return True if a copy was promoted. Without its name, an operator has accepted this
        broker's folder since.
        """
        known = self._stored
        return known is not None and stored.term > known.term and bool(stored.promoted)

    def note_replaced(self) -> None:
        """Note that a copy has this broker's place: no commit is acked again."""
        self.is_replaced = True
        self.commitment.members = None
        self._wait.copies = self.commitment
        self._wait.give_up("a copy of its data folder was promoted")

    # ── hand-over ─────────────────────────────────────────────────────────────────────────────────
    async def offer_place(self, copy_id: str) -> None:
        """
        Let a copy of the set take this broker's place; "": none any more.

        Raises:
            ConflictError: another opening or a copy has the place, or the copy is not in the set.
            KeylaneError: no metaserver has answered.
        """
        stored = self._stored or CopySet()
        await self._offer(
            OfferPlace(
                broker_id=self._broker_id,
                opening=self._opening,
                term=stored.term,
                copy_id=copy_id,
            )
        )

    async def was_replaced(self) -> bool:
        """Ask a metaserver whether a copy has this broker's place. Raises KeylaneError."""
        try:
            # Its set is not adopted: what is proposed meanwhile counts on, and this answer may be
            # older than the one that says what became of it.
            is_replaced = self._names_another(await self._ask(None))
        except ConflictError:
            is_replaced = True
        if is_replaced:
            self.note_replaced()
        return self.is_replaced

    async def close(self) -> None:
        """Let a commit that waits for copies fail, because the broker stops, unless they have it
        within CLOSE_MS.
        """
        with contextlib.suppress(TimeoutError, KeylaneError):
            async with asyncio.timeout(CLOSE_MS / 1000):
                await self._wait_flushed()
        self._wait.give_up("the broker stops before all copies have the commit")
