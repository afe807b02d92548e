"""A small model of the set of copies: SQL stores which folders have everything, acks wait for them,
and one of them takes the place of a broker that is gone. Nothing here is the product's code.

    SqlOfCopies   one row: the set and its version, the term, the newest opening; it never fails
    FolderOnDisk  a log of numbered messages, what of it is synced, and who the folder is
    FolderProcess a program on a folder: a broker that keeps the set, or a copy that follows

A walk is a chain of steps. Messages are lost, late, doubled and cut off one way; programs are
killed and paused, and folders are lost or put back to an older image. An observer sees everything
and judges each step. Then all faults end, and the group has to serve with all of its copies.

Left out: retention, an operator who accepts an older folder, and two folders with one id. An older
image is put back only if SQL knows better: that it may not is a limit of the rules themselves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

REPORT, TTL, POLL, LAG, CALL, AWAY, LIVE, SILENT, LOOK = 6, 30, 15, 8, 20, 12, 20, 60, 3
"""Times in steps."""
HAND_OVER, START = 10, 40
CHAOS, SETTLE = 450, 700
FAULTS_PER_STEP = 0.04
FORGETS_FIRST = 1_000_000
"""From this walk on, operators forget copies as well, gone or not."""
_FAULTS = ("kill", "pause", "cut", "hand over", "promote", "lose", "image", "wanted", "heal")
_NARROW = ((6, 2, 3, 0, 0, 0, 0, 0, 2), (0, 2, 4, 6, 0, 0, 0, 4, 2), (3, 0, 3, 0, 5, 0, 0, 0, 2))
"""Weights of faults: brokers that die again, hand-overs beside changes, and promotions by hand."""

MUTANTS = {
    "set changes from any version": "lost",
    "set changes from any opening": "lost",
    "proposed set does not count": "lost",
    "unanswered proposal is forgotten": "lost",
    "late copy counts no more before SQL has stored it": "lost",
    "folder has no marker": "lost",
    "restarted broker does not wait for its copies": "lost",
    "copy joins that lacks something": "lost",
    "copy joins beside a commit that was decided": "lost",
    "unsynced bytes count": "lost",
    "end of a promoted copy is not checked": "lost",
    "copy outside of the set is promoted": "lost",
    "copies are not compared": "lost",
    "copy is not cut": "late",
    "least is ignored": "too few",
    "hand-over has no end": "late",
    "restarted broker calls its log durable": "ended",
    "hand-over adopts the set of its answer": "lost",
    "silent copy keeps its place": "late",
    "term is not raised by a promotion": "lost",
}
"""The rules that can be left out, and how each one shows."""


class BrokenRuleError(Exception):
    """A walk that broke a promise: the kind, and what was seen."""


class ModelRecord(NamedTuple):
    """A message in a log; two records with one stamp have the same bytes."""

    number: int
    stamp: int
    has_barrier: bool


class CopySetRow(NamedTuple):
    """What SQL answers about the copies."""

    wanted: int
    least: int
    members: frozenset[str] = frozenset()
    term: int = 0
    version: int = 0
    promoted: str = ""
    durable_end: int = 0
    handing_to: str = ""


@dataclass
class FolderOnDisk:
    """A data folder."""

    copy_id: str = ""
    """The id of a copy; "": a broker's folder."""
    has_log: bool = True
    log: list[ModelRecord] = field(default_factory=list)
    synced: int = 0
    opening: str = ""
    before: frozenset[str] = frozenset()
    has_marker: bool = False
    complete_at: int = 0
    noted_end: int = 0
    term: int = 0
    """The term in which it was promoted; for the observer."""
    is_old: bool = False
    """True if it was put back; for the observer."""

    @property
    def barrier(self) -> int:
        """The index of the newest record with BARRIER."""
        return next((i for i in reversed(range(len(self.log))) if self.log[i].has_barrier), 0)

    def could_serve(self) -> bool:
        """Return True if a copy has what it knows to be durable."""
        ends = (self.complete_at, self.noted_end)
        return bool(self.copy_id) and self.has_log and self.synced >= max(ends)


class SqlOfCopies:
    """The database of all metaservers. Each method is a transaction, and returns its answer."""

    def __init__(self, world: CopiesWorld, row: CopySetRow) -> None:
        self.world, self.row = world, row
        self.opening, self.log_end = "", 0
        self.address = self.alive_until = self.handing_until = 0

    def store(self, **changed: Any) -> CopySetRow:
        """Store a new version."""
        self.row = self.row._replace(version=self.row.version + 1, **changed)
        return self.row

    def read(self) -> CopySetRow:
        """Return the row, without an offer that has ended."""
        is_offered = self.world.now < self.handing_until
        return self.row if is_offered else self.row._replace(handing_to="")

    def knows(self, opening: str, before: frozenset[str], log_end: int) -> bool:
        """Return True if a broker's folder is not older than the group's."""
        return self.opening in {"", opening, *before} and log_end >= self.log_end

    def on_report(self, sender: int, opening: str, before: frozenset[str], log_end: int) -> bool:
        """A broker reports itself."""
        if not self.knows(opening, before, log_end):
            return False
        self.opening, self.log_end, self.address = opening, log_end, sender
        self.alive_until = self.world.now + TTL
        return True

    def on_change(
        self, _: int, opening: str, known: tuple[int, int], members: Any, durable_end: int
    ) -> CopySetRow | None:
        """A broker asks, or proposes a set."""
        mutant, row = self.world.mutant, self.row
        if opening != self.opening and mutant != "set changes from any opening":
            return None
        if durable_end > row.durable_end and row.version:
            row = self.row = row._replace(durable_end=durable_end)
        is_current = known == (row.term, row.version)
        if mutant == "set changes from any version":
            is_current = known[0] == row.term
        if members is not None and is_current and members != row.members:
            return self.store(members=members, promoted="")
        if row.version and known[0] == -1:
            return self.store(promoted="")
        return self.read()

    on_look = on_change

    def on_offer(self, _: int, opening: str, term: int, copy_id: str) -> bool:
        """A broker offers its place, or withdraws that."""
        row = self.read()
        is_ready = term == row.term and copy_id in row.members
        if opening != self.opening or (copy_id and not is_ready):
            return False
        self.row = row._replace(handing_to=copy_id)
        self.handing_until = self.world.now + HAND_OVER
        return True

    def forget(self, copy_id: str) -> None:
        """An operator takes a copy out of the set."""
        others = self.row.members - {copy_id}
        if others and 1 + len(others) >= self.row.least:
            self.store(members=others)
            self.world.forgotten += 1

    def promotes(self, copy_id: str, log_end: int) -> bool:
        """Return True if acks have waited for a copy, and it has what was durable."""
        mutant, row = self.world.mutant, self.row
        has_end = log_end >= row.durable_end or mutant == "end of a promoted copy is not checked"
        return has_end and (
            copy_id in row.members or mutant == "copy outside of the set is promoted"
        )

    def repeats(self, copy_id: str, log_end: int) -> bool:
        """Return True if the copy has the place already."""
        row, is_alive = self.row, self.world.now < self.alive_until
        is_same = row.promoted == copy_id and log_end >= row.durable_end
        return is_same and (self.opening == copy_id or not is_alive)

    def on_take(
        self, sender: int, copy_id: str, log_end: int, by_itself: bool, lose: bool
    ) -> CopySetRow | None:
        """A copy, or its operator, asks for the broker's place."""
        world, row = self.world, self.read()
        if self.repeats(copy_id, log_end):
            return row
        is_offered = row.handing_to == copy_id
        is_gone = by_itself and not row.promoted and world.is_gone(self.address)
        if world.now < self.alive_until and not is_offered and not is_gone:
            return None
        others = row.members - {copy_id}
        if self.promotes(copy_id, log_end):
            self.log_end = min(self.log_end, log_end)
            self.opening = copy_id
            if by_itself:
                self.alive_until = world.now + START
        elif lose:
            others = frozenset()
            world.lose(world.folders[sender], row.term + 1)
        else:
            return None
        term = row.term + (world.mutant != "term is not raised by a promotion")
        return self.store(
            members=others, term=term, promoted=copy_id, durable_end=log_end, handing_to=""
        )

    def accept(self, folder: FolderProcess) -> None:
        """An operator accepts a broker's folder that was refused."""
        self.opening, self.log_end = folder.disk.opening, folder.end
        self.store(members=frozenset(), promoted="", durable_end=0)


class FolderProcess:
    """A program on a folder."""

    def __init__(self, world: CopiesWorld, number: int) -> None:
        self.world, self.number = world, number
        self.disk = FolderOnDisk()
        if number:
            self.empty()
        self.paused_until = 0
        self.start()

    def empty(self) -> None:
        """Begin with an empty folder, as a copy."""
        self.disk = FolderOnDisk(self.world.new_name("copy"), has_log=False)

    def start(self) -> None:
        """Start on the folder as it is."""
        disk, mutant = self.disk, self.world.mutant
        self.alive, self.is_ended = True, False
        self.process = self.world.next_number()
        self.pending: dict[str, tuple[int, int]] = {}
        self.done_at: dict[str, int] = {}
        # of a copy
        self.name = self.world.new_name("follower")
        self.broker: int | None = None
        self.tail_start = -1
        self.durable_end = disk.noted_end
        self.promoting = ""
        # of a broker
        self.end = self.decided = self.opened_end = len(disk.log)
        self.commit_end = 0
        self.queue: set[int] = set()
        self.asked: set[int] = set()
        self.has_reported = self.was_accepted = self.is_aside = self.is_replaced = False
        self.waits = self.had_marker = disk.has_marker
        self.is_copied = mutant == "restarted broker does not wait for its copies"
        self.stored: CopySetRow | None = None
        self.members: frozenset[str] | None = None
        self.proposed: frozenset[str] | None = None
        self.least = 1
        self.flushed_at = self.known_at = self.waiting_since = 0
        self.reported: dict[str, int] = {}
        self.heard_at: dict[str, int] = {}
        self.away: dict[str, int] = {}
        self.followers: dict[str, str] = {}
        self.compared: set[str] = set()
        self.handing = self.offered_to = ""
        self.handing_since = 0
        self.started_at = self.world.now
        self.is_held = False
        if not disk.copy_id:
            disk.synced = len(disk.log)
            disk.before |= {disk.opening}
            disk.opening = self.world.new_name("opening")

    def kill(self) -> None:
        """End the program: of what was not synced, a part is gone."""
        disk = self.disk
        self.alive = False
        del disk.log[self.world.rng.randint(disk.synced, len(disk.log)) :]
        disk.synced = len(disk.log)

    def is_due(self, what: str, steps: int) -> bool:
        """Return True if something was done that long ago, and note that it is done now."""
        if self.world.now - self.done_at.get(what, -CHAOS) < steps:
            return False
        self.done_at[what] = self.world.now
        return True

    def call(self, what: str, to: Any, *args: Any) -> None:
        """Send a request, whose answer goes to a method."""
        call = self.world.next_number()
        self.pending[what] = call, self.world.now
        self.world.send(self.number, to, f"on_{what}", args, what, call)

    def on_answer(self, _: int, what: str, call: int, answer: Any) -> None:
        """Take the answer of a request that has not been given up."""
        if self.pending.get(what, (0, 0))[0] == call:
            del self.pending[what]
            getattr(self, f"{what}_answered")(answer)

    def tick(self) -> None:
        """Do what is due."""
        for what, (_, sent) in list(self.pending.items()):
            if self.world.now - sent >= CALL:
                del self.pending[what]
                self.call_failed(what)
        if self.world.rng.random() < self.world.diligence:
            self.disk.synced = len(self.disk.log)
        if self.disk.copy_id:
            self.follow()
        else:
            self.serve()

    def call_failed(self, what: str) -> None:
        """A request was not answered in time."""
        self.has_reported |= what == "report"
        if what == "follow":
            self.disconnect()
        elif what == "change" and self.world.mutant == "unanswered proposal is forgotten":
            self.proposed = None
        elif what == "offer":
            self.end_hand_over()

    # ── as a broker ───────────────────────────────────────────────────────────────────────────────
    def serve(self) -> None:
        """Report, keep the set, commit, and hand over."""
        disk = self.disk
        if self.is_replaced or self.is_aside:
            self.demote()
        if not self.is_replaced and "report" not in self.pending and self.is_due("report", REPORT):
            self.call("report", "sql", disk.opening, disk.before, self.end)
        if not self.is_copied and self.members is not None and self.covers(self.opened_end):
            self.is_copied = True
        self.commit()
        if self.was_accepted and not self.is_replaced and "change" not in self.pending:
            self.keep_set()
        if self.handing:
            self.hand_over()

    def report_answered(self, is_accepted: bool) -> None:
        """SQL has accepted or refused this folder."""
        self.has_reported, self.is_aside = True, not is_accepted
        self.was_accepted |= is_accepted

    def demote(self) -> None:
        """Become a copy, once another broker serves."""
        sql, disk = self.world.sql, self.disk
        serves = sql.address != self.number and self.world.now < sql.alive_until
        if not serves or self.world.is_cut("sql", self.number) or self.world.rng.random() > 0.2:
            return
        if self.world.failover:
            disk.copy_id, disk.has_marker = self.world.new_name("copy"), True
            disk.complete_at, disk.noted_end = len(disk.log) // 2, 0
        else:
            self.empty()  # by its operator
        self.start()

    def on_append(self, _: int, numbers: tuple[int, ...]) -> None:
        """A client sends messages, perhaps not for the first time."""
        is_waiting = self.had_marker and not self.is_copied
        if self.disk.copy_id or self.is_aside or not self.has_reported or is_waiting:
            return
        newest = max((each.number for each in self.disk.log), default=0)
        self.asked |= set(numbers)
        self.queue |= {each for each in numbers if each > newest}
        self.answer_asked()

    def answer_asked(self) -> None:
        """Ack what is durable."""
        for position, record in enumerate(self.disk.log[: self.end]):
            if record.number in self.asked:
                self.asked.remove(record.number)
                self.world.judge_ack(self, position)
                self.world.send(self.number, "client", "on_acked", (record.number,))

    def commit(self) -> None:
        """Begin a commit, decide that it is durable, or end it a step later."""
        log, world = self.disk.log, self.world
        if self.decided > self.end:
            self.end, self.commit_end = self.decided, 0
            self.answer_asked()
        elif self.commit_end:
            self.waiting_since = self.waiting_since or world.now
            if self.disk.synced >= self.commit_end and self.covers(self.commit_end):
                self.decided = self.commit_end
                world.judge_durable(self)
        elif self.queue and not self.is_held and not self.is_replaced:
            newest = max((each.number for each in log), default=0)
            for number in sorted(each for each in self.queue if each > newest):
                log.append(ModelRecord(number, world.next_number(), len(log) == self.end))
            self.queue.clear()
            self.commit_end, self.waiting_since = len(log) if len(log) > self.end else 0, 0

    def covers(self, end: int) -> bool:
        """Return True if all copies that count have the log up to `end`, and they are enough."""
        mutant = self.world.mutant
        if not self.waits:
            return True
        if self.members is None:
            return False
        counted = self.members | (self.proposed or frozenset())
        if mutant == "proposed set does not count":
            counted = self.members
        elif mutant == "late copy counts no more before SQL has stored it":
            counted = self.members if self.proposed is None else self.proposed
        is_enough = 1 + len(counted) >= self.least or mutant == "least is ignored"
        return is_enough and all(self.reported.get(each, -1) >= end for each in counted)

    def keep_set(self) -> None:
        """Ask SQL, or propose a set."""
        disk, stored = self.disk, self.stored
        if self.end < self.flushed_at:
            return  # a commit that began without copies has to end first
        if self.proposed is not None:
            self.ask("change", self.proposed)
        elif stored is None or self.is_due("poll", POLL):
            self.ask("change", None)
        elif stored.wanted > 1 or stored.members:
            if not disk.has_marker and self.world.mutant != "folder has no marker":
                disk.has_marker = True
            elif not self.waits:
                self.waits, self.flushed_at = True, self.commit_end
            else:
                self.least = stored.least
                members = self.decide_set(stored)
                if members is not None and members != self.members:
                    self.proposed = members
                    self.ask("change", members)
        else:
            self.waits = disk.has_marker = False

    def ask(self, what: str, members: frozenset[str] | None) -> None:
        """Ask SQL what is stored, and perhaps to change it."""
        known = (-1, 0) if self.stored is None else (self.stored.term, self.stored.version)
        durable_end = self.end if self.is_copied else 0
        self.call(what, "sql", self.disk.opening, known, members, durable_end)

    def change_answered(self, stored: CopySetRow | None) -> None:
        """SQL has told the stored set."""
        if stored is None or self.is_replaced:
            return
        if self.proposed is not None and self.stored is not None:
            if stored.version == self.stored.version:
                return  # it is asked again
            for left in (self.members or frozenset()) - stored.members:
                self.away[left] = self.world.now + AWAY
        self.adopt(stored)

    def adopt(self, stored: CopySetRow) -> None:
        """Take what SQL has stored."""
        if self.names_another(stored):
            self.note_replaced()
            return
        if self.stored is None:
            self.known_at = self.world.now
            self.disk.term = max(self.disk.term, stored.term)
        self.stored = stored
        if self.waits:
            self.least = stored.least
        self.members, self.proposed = stored.members, None

    def names_another(self, stored: CopySetRow) -> bool:
        """Return True if a copy was promoted."""
        known = self.stored
        return known is not None and stored.term > known.term and bool(stored.promoted)

    def note_replaced(self) -> None:
        """A copy has this broker's place: nothing more is acked."""
        self.is_replaced = self.waits = True
        self.members, self.handing, self.offered_to = None, "", ""

    def decide_set(self, stored: CopySetRow) -> frozenset[str] | None:
        """Return the set that acks should wait for, if it should change."""
        members, has, now = self.members or frozenset(), self.reported, self.world.now
        acked_end = self.end if self.end > self.opened_end else 0
        leaving = {each for each in members if -1 < has.get(each, -1) < acked_end}
        if not self.is_copied:
            self.known_at = now if self.is_aside else self.known_at
            is_late = now - self.known_at >= LAG
        else:
            is_late = bool(self.commit_end) and now - self.waiting_since >= LAG
        if is_late:
            late = {each for each in members if has.get(each, -1) < len(self.disk.log)} - leaving
            spare = 1 + len(members - leaving) - stored.least
            leaving |= set(
                sorted(late, key=lambda each: (has.get(each, -1), each))[: max(0, spare)]
            )
        if leaving:
            return members - leaving
        if len(members) >= stored.wanted:
            return frozenset(sorted(members)[: stored.wanted - 1])
        needed = max(self.end, self.decided)
        if self.world.mutant == "copy joins beside a commit that was decided":
            needed = self.end
        elif self.world.mutant == "copy joins that lacks something":
            needed = 0
        complete = sorted(
            each
            for each, heard_at in self.heard_at.items()
            if each not in members and has[each] >= needed
            if now - heard_at <= LIVE and now >= self.away.get(each, 0)
        )
        room = stored.wanted - 1 - len(members)
        silent = [
            each
            for each in sorted(members)
            if now - self.heard_at.get(each, self.started_at) > SILENT
            if self.world.mutant != "silent copy keeps its place"
        ]
        replaced = silent[: max(0, len(complete) - room)]
        joining = frozenset(complete[: room + len(replaced)])
        return (members - frozenset(replaced)) | joining if joining else None

    def begin_hand_over(self) -> None:
        """Offer the place to a copy of the set."""
        ready = sorted(each for each in self.members or () if each in self.heard_at)
        if ready and self.stored is not None and not self.handing and not self.is_replaced:
            self.handing, self.handing_since = self.world.rng.choice(ready), self.world.now
            self.world.hand_overs += 1
            self.call("offer", "sql", self.disk.opening, self.stored.term, self.handing)

    def offer_answered(self, is_stored: bool) -> None:
        """SQL has stored the offer, or that it is withdrawn."""
        if not is_stored:
            self.ask("look", None)
        elif self.handing and self.world.now - self.handing_since < HAND_OVER:
            self.is_held = True
        else:
            self.end_hand_over()

    def hand_over(self) -> None:
        """Hold, tell the copy, look whether it has the place, and end."""
        is_over = self.world.now - self.handing_since >= HAND_OVER
        if is_over and self.world.mutant != "hand-over has no end":
            self.offered_to = ""
            if "offer" not in self.pending and self.stored is not None:
                self.call("offer", "sql", self.disk.opening, self.stored.term, "")
        elif self.is_held and not self.commit_end:
            self.offered_to = self.handing
            if "look" not in self.pending and self.is_due("look", LOOK):
                self.ask("look", None)

    def end_hand_over(self) -> None:
        """Go on."""
        self.handing = self.offered_to = ""
        self.is_held = False

    def look_answered(self, stored: CopySetRow | None) -> None:
        """SQL has said whether a copy has the place. The set that it names may be an older one."""
        if stored is None or self.names_another(stored):
            self.note_replaced()
        elif self.world.mutant == "hand-over adopts the set of its answer":
            self.adopt(stored)

    def on_taken(self, _: int, copy_id: str) -> None:
        """A copy says that it has the place."""
        if copy_id == self.offered_to:
            self.ask("look", None)

    def on_follow(
        self, _: int, copy_id: str, name: str, position: int, start: int, tail: Any, unsynced: int
    ) -> Any:
        """A copy asks for what follows the end of its log."""
        log = self.disk.log
        if self.disk.copy_id or not self.was_accepted or self.is_aside or self.is_replaced:
            return None
        equal = 0
        while equal < len(tail) and log[start + equal : start + equal + 1] == [tail[equal]]:
            equal += 1
        is_other = position > len(log) or equal < len(tail)
        if is_other and self.world.mutant != "copies are not compared":
            return "differs", start + equal
        if start >= 0 or position < 0:
            self.compared.add(copy_id)
        if position >= 0 and copy_id in self.compared:
            is_early = self.world.mutant == "unsynced bytes count"
            self.reported[copy_id] = position if is_early else position - unsynced
            self.heard_at[copy_id] = self.world.now
        counted = (self.members or frozenset()) | (self.proposed or frozenset())
        stored = self.stored
        has_room = stored is not None and len(stored.members) < stored.wanted - 1
        end = (
            len(log) if copy_id in counted or (has_room and copy_id in self.reported) else self.end
        )
        at = max(position, 0)
        data = log[at : min(end, at + self.world.rng.randint(1, 4))]
        is_offered = copy_id == self.offered_to and position == end
        knows = self.is_copied or not self.had_marker
        knows |= self.world.mutant == "restarted broker calls its log durable"
        durable_end = self.end if knows else 0
        return "same", self.disk.opening, self.end, durable_end, position, data, is_offered

    # ── as a copy ─────────────────────────────────────────────────────────────────────────────────
    def follow(self) -> None:
        """Follow the broker, or ask for its place."""
        world, disk = self.world, self.disk
        if self.is_ended or "take" in self.pending or "follow" in self.pending:
            return
        if self.promoting:
            self.ask_for_place()
        elif self.broker is None:
            if not world.is_cut("sql", self.number) and self.is_due("connect", 2):
                self.broker = world.sql.address
                self.compare_next()
        elif self.is_due("follow", 1):
            has_tail = self.tail_start >= 0
            tail = tuple(disk.log[self.tail_start :]) if has_tail else ()
            position = len(disk.log) if disk.has_log else -1
            unsynced = 0 if has_tail else len(disk.log) - disk.synced
            self.call("follow", self.broker, disk.copy_id, self.name, position, self.tail_start,
                      tail, unsynced)  # fmt: skip

    def compare_next(self) -> None:
        """Let the broker compare what may differ at the next request."""
        self.tail_start = max(0, self.disk.barrier - 1) if self.disk.has_log else -1
        self.disk.synced = len(self.disk.log)

    def disconnect(self) -> None:
        """Look the broker up anew, or ask for its place."""
        self.broker = None
        if self.world.failover and self.world.rng.random() < 0.5:
            self.ask_for_place()

    def ask_for_place(self) -> None:
        """Ask SQL for the broker's place."""
        disk = self.disk
        disk.synced = len(disk.log)
        if not disk.could_serve() or self.world.is_limit(disk):
            self.promoting = ""
            return
        self.call("take", "sql", disk.copy_id, len(disk.log), not self.promoting,
                  self.promoting == "lose")  # fmt: skip

    def take_answered(self, row: CopySetRow | None) -> None:
        """SQL has given the place, or refused it."""
        disk, broker = self.disk, self.broker
        self.promoting = ""
        if row is None:
            return
        taken = disk.copy_id
        self.world.promotions += 1
        disk.before, disk.opening = disk.before | {disk.opening}, taken
        disk.copy_id, disk.term = "", row.term
        self.start()
        if broker is not None:
            self.world.send(self.number, broker, "on_taken", (taken,))

    def follow_answered(self, answer: Any) -> None:
        """Store what the broker has sent, or be cut to what it has."""
        disk = self.disk
        if answer is None:
            self.disconnect()
            return
        if answer[0] == "differs":
            position = answer[1]
            if self.tail_start >= 0 and self.world.mutant != "copy is not cut":
                if position < max(disk.barrier, self.durable_end):
                    self.is_ended = True
                    self.world.judge_ended(self)
                    return
                del disk.log[position:]
                disk.synced = min(disk.synced, position)
            self.compare_next()
            return
        _, opening, end, durable_end, position, data, is_offered = answer
        if disk.has_log and self.tail_start < 0 and opening != disk.opening:
            self.compare_next()
            return
        if not disk.has_log:
            disk.has_log, disk.complete_at = True, end
        elif position != len(disk.log):
            return
        self.tail_start = -1
        self.durable_end = max(self.durable_end, min(durable_end, len(disk.log)))
        if opening != disk.opening:
            disk.opening, disk.before = opening, frozenset()
        disk.has_marker = self.world.mutant != "folder has no marker"
        disk.log += data
        if self.world.rng.random() < 0.1:
            disk.noted_end = self.durable_end
        if is_offered and self.world.failover:
            self.ask_for_place()


class CopiesWorld:
    """One walk, and its observer."""

    def __init__(self, seed: int, mutant: str = "") -> None:
        self.rng = rng = random.Random(seed)
        self.mutant = mutant
        self.now = self.numbers = 0
        self.mail: dict[int, list[tuple[Any, ...]]] = {}
        self.cuts: set[tuple[Any, Any]] = set()
        self.loss, self.late, self.doubled = (rng.choice((0.0, 0.02, 0.1)) for _ in range(3))
        self.diligence = rng.choice((0.3, 0.7, 1.0))
        self.weights = [rng.choice((0, 1, 3)) for _ in _FAULTS[:-1]] + [2]
        if rng.random() < 0.4:
            self.weights = list(rng.choice(_NARROW))
        self.failover = rng.random() < 0.7
        self.forgets = seed >= FORGETS_FIRST
        self.forgotten = 0
        self.hand_overs = self.promotions = self.losses = self.lost_term = 0
        self.acked: list[ModelRecord] = []
        self.newest_ack = 0, -1
        """The term of the last ack, and the folder."""
        self.next = 1
        count = rng.choice((2, 3, 3))
        self.sql = SqlOfCopies(self, self.draw_wanted(count))
        self.folders: list[FolderProcess] = []
        self.folders += [FolderProcess(self, number) for number in range(count)]
        self.images = [replace(each.disk) for each in self.folders]

    def draw_wanted(self, count: int) -> CopySetRow:
        """Draw how many folders there are to be, and how many of them an ack needs."""
        wanted = self.rng.randint(2, count)
        return CopySetRow(wanted, self.rng.randint(1, wanted))

    def next_number(self) -> int:
        """Return a number that no other call has returned."""
        self.numbers += 1
        return self.numbers

    def new_name(self, of: str) -> str:
        """Return a name that nothing else has."""
        return f"{of} {self.next_number()}"

    def is_cut(self, sender: Any, to: Any) -> bool:
        """Return True if messages are cut off this way."""
        return (sender, to) in self.cuts

    def is_gone(self, number: int) -> bool:
        """Return True if a machine says that no broker listens there."""
        folder = self.folders[number]
        is_up = folder.alive and not folder.disk.copy_id
        return not is_up and not self.is_cut("sql", number) and not self.is_cut(number, "sql")

    def send(
        self, sender: Any, to: Any, what: str, args: tuple[Any, ...], kind: str = "", call: int = 0
    ) -> None:
        """Send a message, which may be lost, late or doubled."""
        rng = self.rng
        if rng.random() < self.loss or self.is_cut(sender, to):
            return
        process = self.folders[to].process if isinstance(to, int) else 0
        for _ in range(1 + (rng.random() < self.doubled)):
            late = rng.randint(5, 60) if rng.random() < self.late else 0
            at = self.now + rng.randint(1, 2) + late
            self.mail.setdefault(at, []).append((sender, to, process, what, args, kind, call))

    def deliver(
        self, sender: Any, to: Any, process: int, what: str, args: Any, kind: str, call: int
    ) -> None:
        """Give a message to its receiver, if that is still the same process, and send its answer."""
        if to == "client":
            self.next = max(self.next, args[0] + 1)
            return
        receiver: Any = self.sql
        if to != "sql":
            receiver = self.folders[to]
            if not receiver.alive or receiver.process != process:
                return
            if self.now < receiver.paused_until:
                message = sender, to, process, what, args, kind, call
                self.mail.setdefault(receiver.paused_until, []).append(message)
                return
        answer = getattr(receiver, what)(sender, *args)
        if call:
            self.send(to, sender, "on_answer", (kind, call, answer))

    def step(self) -> None:
        """Take one step, and judge it."""
        self.now += 1
        for message in self.mail.pop(self.now, ()):
            self.deliver(*message)
        for folder in self.folders:
            if folder.alive and self.now >= folder.paused_until:
                folder.tick()
        if self.now % 2:
            to = (
                self.sql.address
                if self.rng.random() < 0.8
                else self.rng.choice(self.folders).number
            )
            self.send("client", to, "on_append", (tuple(range(self.next, self.next + 2)),))
        self.judge_folders()

    # ── the observer ──────────────────────────────────────────────────────────────────────────────
    def judge_ack(self, folder: FolderProcess, position: int) -> None:
        """A broker acks a message."""
        prefix, term = folder.disk.log[: position + 1], folder.disk.term
        if term < self.lost_term:
            return  # its loss has a name already
        same = min(len(prefix), len(self.acked))
        if prefix[:same] != self.acked[:same]:
            raise BrokenRuleError("lost", f"{folder.number} acks {prefix[-1]} in another log")
        if same == len(prefix):
            return
        newest_term, number = self.newest_ack
        if term < newest_term or (term == newest_term and number not in {-1, folder.number}):
            raise BrokenRuleError("lost", f"{folder.number} acks in term {term}, after {number}")
        self.acked, self.newest_ack = prefix, (term, folder.number)

    def judge_durable(self, folder: FolderProcess) -> None:
        """A commit is about to end."""
        log = folder.disk.log
        has = sum(each.disk.log[: min(each.disk.synced, len(log))] == log for each in self.folders)
        if has < folder.least and not self.losses:
            raise BrokenRuleError("too few", f"{has} folders have {log[-1]}, not {folder.least}")

    def has_acked(self, disk: FolderOnDisk) -> bool:
        """Return True if a folder has synced everything that was acked."""
        return disk.log[: min(disk.synced, len(self.acked))] == self.acked

    def is_limit(self, disk: FolderOnDisk) -> bool:
        """Return True for an older image that the rules cannot know as one."""
        if disk.is_old and self.has_acked(disk):
            disk.is_old = False
        return disk.is_old and len(disk.log) >= self.sql.row.durable_end

    def judge_folders(self) -> None:
        """Each folder that may serve has everything that was acked."""
        sql = self.sql
        for each in self.folders:
            disk = each.disk
            if self.has_acked(disk) or self.is_limit(disk):
                continue
            if disk.could_serve() and (
                sql.promotes(disk.copy_id, disk.synced) or sql.repeats(disk.copy_id, disk.synced)
            ):
                raise BrokenRuleError("lost", f"{each.number} may be promoted at {self.now}")
            serves = not disk.copy_id and sql.opening in {disk.opening, *disk.before}
            if serves and len(disk.log) >= sql.log_end and disk.term >= self.lost_term:
                raise BrokenRuleError("lost", f"{each.number} serves at {self.now}")

    def judge_ended(self, folder: FolderProcess) -> None:
        """A copy follows no more, because its broker has another log."""
        if not self.losses:
            raise BrokenRuleError("ended", f"copy {folder.number} at {self.now}")

    def lose(self, folder: FolderProcess, term: int) -> None:
        """An operator gives up what a folder lacks."""
        log, same = folder.disk.log, 0
        while same < min(len(log), len(self.acked)) and log[same] == self.acked[same]:
            same += 1
        del self.acked[same:]
        self.lost_term, self.losses = term, self.losses + 1

    # ── faults ────────────────────────────────────────────────────────────────────────────────────
    def disturb(self) -> None:
        """Begin or end a fault now and then."""
        rng = self.rng
        folder = rng.choice(self.folders)
        if not folder.alive and rng.random() < 0.1:
            folder.start()
        if rng.random() < 0.01:
            self.images[folder.number] = replace(folder.disk, log=list(folder.disk.log))
        if self.forgets and self.sql.row.members and rng.random() < 0.05:
            self.sql.forget(rng.choice(sorted(self.sql.row.members)))
        if rng.random() > FAULTS_PER_STEP:
            return
        fault = rng.choices(_FAULTS, self.weights)[0]
        if fault == "kill":
            killed = rng.choice((folder, self.folders[self.sql.address]))
            killed.kill()
            if rng.random() < 0.5:
                killed.start()
        elif fault == "pause":
            folder.paused_until = self.now + rng.randint(1, 60)
        elif fault == "cut":
            other = rng.choice(["sql", "client", *range(len(self.folders))])
            self.cuts ^= {rng.choice(((folder.number, other), (other, folder.number)))}
        elif fault == "hand over":
            for each in self.folders:
                if each.alive and not each.disk.copy_id and self.failover:
                    each.begin_hand_over()
        elif fault == "promote":
            is_copy = folder.alive and folder.disk.copy_id
            folder.promoting = rng.choice(("keep", "keep", "lose")) if is_copy else ""
        elif fault == "lose":
            self.lose_folder(folder)
        elif fault == "image":
            self.put_back(folder)
        elif fault == "wanted":
            drawn = self.draw_wanted(len(self.folders))
            self.sql.store(wanted=drawn.wanted, least=drawn.least)
        elif fault == "heal":
            self.cuts.clear()

    def lose_folder(self, folder: FolderProcess) -> None:
        """A disk is gone; an empty folder takes its place."""
        if self.is_spare(folder):
            self.losses += 1
            folder.empty()
            folder.start()

    def is_spare(self, folder: FolderProcess) -> bool:
        """Return True if another folder has everything that was acked."""
        others = [each.disk for each in self.folders if each is not folder]
        known = {self.sql.opening}
        return any(
            self.has_acked(each)
            and (each.could_serve() if each.copy_id else known & {each.opening, *each.before})
            for each in others
        )

    def put_back(self, folder: FolderProcess) -> None:
        """An older image of a disk is put back, if SQL can know that it is older."""
        image, sql = self.images[folder.number], self.sql
        image = replace(image, log=list(image.log[: image.synced]), is_old=True)
        if image.copy_id:
            is_known = len(image.log) < sql.row.durable_end or not image.has_log
        else:
            is_known = not sql.knows(image.opening, image.before, len(image.log))
            is_known = is_known and image.has_marker
        if is_known and self.is_spare(folder):
            self.losses += 1
            folder.kill()
            folder.disk = image

    def heal(self) -> None:
        """End all faults."""
        self.cuts.clear()
        self.loss = self.late = self.doubled = 0.0
        self.diligence = 1.0
        for folder in self.folders:
            folder.paused_until = 0
            if not folder.alive:
                folder.start()

    def operate(self, is_patient: bool) -> None:
        """What an operator does: empty what cannot follow, and promote where nobody serves."""
        for folder in self.folders:
            if folder.is_ended:
                folder.empty()
                folder.start()
        copies = [each for each in self.folders if each.disk.could_serve()]
        if copies and self.now >= self.sql.alive_until:
            best = max(copies, key=lambda each: len(each.disk.log))
            best.promoting = "keep" if is_patient or not self.losses else "lose"
        elif self.losses and not is_patient and self.now >= self.sql.alive_until:
            for folder in self.folders:
                if folder.is_replaced:
                    folder.start()
            # One that was promoted since comes first: the other would be replaced by it.
            refused = sorted(self.folders, key=lambda each: -each.disk.term)
            for folder in [each for each in refused if each.is_aside][:1]:
                folder.disk.term = self.sql.row.term
                self.lose(folder, folder.disk.term)
                self.sql.accept(folder)


def walk(seed: int, mutant: str = "") -> CopiesWorld:
    """Take one walk. Raises BrokenRuleError."""
    world = CopiesWorld(seed, mutant)
    for _ in range(CHAOS):
        world.disturb()
        world.step()
    world.heal()
    healed, number = world.now, world.next
    while world.now < healed + SETTLE:
        world.step()
        if world.now % 20 == 0:
            world.operate(world.now < healed + SETTLE // 3)
        wanted = world.sql.row.wanted
        if world.next > number + 4 and len(world.sql.row.members) == wanted - 1:
            return world
    raise BrokenRuleError(
        "late", f"no acks, or too few copies, {SETTLE} steps after the last fault"
    )
