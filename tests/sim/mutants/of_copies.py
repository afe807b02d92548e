"""Bugs of copies: what acks wait for, what a copy has and says, which copy is promoted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from keylane.broker import service
from keylane.broker.copies import set_keeper as keeping
from keylane.broker.copies.commitment import Commitment
from keylane.broker.copies.copied_log import CopiedLog
from keylane.broker.copies.folding import Folding
from keylane.broker.copies.follow_service import FollowService
from keylane.broker.copies.follower import Follower
from keylane.broker.copies.placement import NOWHERE
from keylane.broker.copies.set_keeper import SetKeeper
from keylane.broker.folder_ownership import check_copied
from keylane.broker.offline import promotion
from keylane.broker.storage.files import AppendFile, replace_file
from keylane.broker.storage.log.commit_log import WritePlan
from keylane.broker.store.copy_wait import CopyWait
from keylane.broker.store.group_commit import GroupCommit
from keylane.metaserver.cluster import copy_sets, fall_backs
from keylane.protocol.errors import KeylaneError
from keylane.testing.machines.disk import SimAppendFile
from sim.actors import hosts
from sim.mutants.mutant import Breaks, Patches


# ── what acks wait for ────────────────────────────────────────────────────────────────────────────
def acks_wait_for_no_copy(patches: Patches) -> None:
    """A commit is durable when the broker alone has synced it."""
    patches.set(Commitment, "covers", lambda self, end: self.members is not None)


def proposed_copies_do_not_count(patches: Patches) -> None:
    """A copy counts only once the answer of a metaserver has come."""

    def covers(self: Any, end: int) -> bool:
        return self.members is not None and all(
            self.synced.get(each, -1) >= end for each in self.members
        )

    patches.set(Commitment, "covers", covers)


def commits_end_before_the_set_is_known(patches: Patches) -> None:
    """A broker that was restarted acks before a metaserver has said which copies count."""

    def covers(self: Any, end: int) -> bool:
        return self.members is None or real(self, end)

    real = patches.set(Commitment, "covers", covers)


def most_copies_are_enough(patches: Patches) -> None:
    """Of several copies that count one may lack a commit."""

    def covers(self: Any, end: int) -> bool:
        counted = self.counted
        have = sum(self.synced.get(each, -1) >= end for each in counted)
        return self.members is not None and have >= len(counted) - (len(counted) > 1)

    patches.set(Commitment, "covers", covers)


def too_few_folders_are_enough(patches: Patches) -> None:
    """A commit ends though fewer folders have it than an operator has asked for."""

    def covers(self: Any, end: int) -> bool:
        return self.members is not None and not self.missing(end)

    patches.set(Commitment, "covers", covers)


def copies_join_beside_a_commit_that_has_ended(patches: Patches) -> None:
    """What is about to become durable without a copy is not asked of it when it joins."""
    patches.set(CopyWait, "decided_end", lambda self, log_end: log_end)


def copies_join_that_lack_something(patches: Patches) -> None:
    """A copy joins as soon as it follows."""

    def decide(commitment: Any, *, log_end: int, **given: Any) -> Any:
        return real(commitment, log_end=0, **given)

    real = patches.set(keeping, "decide_set", decide)


def copies_join_beside_an_earlier_commit(patches: Patches) -> None:
    """A commit that began before the broker had copies ends without them."""

    async def begin(self: Any, stored: Any) -> None:
        self._has_marker = True
        self._wait.copies = self.commitment

    patches.set(SetKeeper, "_begin", begin)


def unanswered_proposals_are_forgotten(patches: Patches) -> None:
    """A proposal that was not answered may be stored, and counts no more."""

    async def propose(self: Any, members: frozenset[str]) -> None:
        self.commitment.proposed = members
        try:
            stored = await self._ask(tuple(sorted(members)))
        except KeylaneError:
            self.commitment.proposed = frozenset()
            raise
        self._adopt(stored)

    patches.set(SetKeeper, "_propose", propose)


def leaving_copies_do_not_count(patches: Patches) -> None:
    """A late copy counts no more once a metaserver was asked to leave it out."""

    async def propose(self: Any, members: frozenset[str]) -> None:
        if members < (self.commitment.members or frozenset()):
            self.commitment.members = members
            self._wait.check()
        await real(self, members)

    real = patches.set(SetKeeper, "_propose", propose)


def folders_do_not_say_that_they_have_copies(patches: Patches) -> None:
    """A broker that is restarted does not know that its acks may have to wait."""
    patches.set(keeping, "record_copies", lambda files, *, exist: None)


def clients_are_answered_before_copies_have_the_log(patches: Patches) -> None:
    """A repeated batch that a restarted broker finds in its log is acked at once."""
    patches.set(hosts, "has_copies", lambda files: False)


def restarted_brokers_call_their_log_durable(patches: Patches) -> None:
    """A copy counts on what other copies may lack, and is not cut when one of them serves."""
    patches.set(SetKeeper, "knows_durable_end", lambda self: True)


def refused_folders_are_read_to_their_end(patches: Patches) -> None:
    """A broker whose place a copy has answers what no copy had when it was killed."""
    patches.set(service, "check_readable", check_copied)


def late_copies_are_waited_for_for_ever(patches: Patches) -> None:
    """No copy is left out because it keeps acks waiting."""
    patches.set(SetKeeper, "_is_late", lambda self, now_ms: False)


def lost_copies_keep_their_place(patches: Patches) -> None:
    """A copy that is gone is not replaced while nothing waits for it."""
    patches.set(SetKeeper, "_silent", lambda self, now_ms: [])


# ── what a copy has ───────────────────────────────────────────────────────────────────────────────
def copies_say_what_they_have_not_synced(patches: Patches) -> None:
    """A copy reports the bytes that it has in the page cache."""

    def append(self: Any, segment: int, data: Any) -> None:
        skipped = SimAppendFile.fdatasync
        SimAppendFile.fdatasync = lambda _file: None  # type: ignore[method-assign]
        try:
            real(self, segment, data)
        finally:
            SimAppendFile.fdatasync = skipped  # type: ignore[method-assign]

    real = patches.set(CopiedLog, "append", append)


def copies_say_what_they_are_about_to_store(patches: Patches) -> None:
    """A copy that asks ahead counts with the answer that it has not stored."""

    def request(self: Any, tail: Any, **options: Any) -> Any:
        return replace(real(self, tail, **options), unsynced_bytes=0)

    real = patches.set(Follower, "_request", request)


def new_segments_of_copies_are_not_durable(patches: Patches) -> None:
    """The name of a segment that a copy begins is not synced."""

    def open_segment(self: Any, segment: int) -> AppendFile:
        files, self._files = self._files, _WithoutFolderSyncs(self._files)
        try:
            file: AppendFile = real(self, segment)
        finally:
            self._files = files
        return file

    real = patches.set(CopiedLog, "_open", open_segment)


class _WithoutFolderSyncs:
    def __init__(self, files: Any) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def sync_folder(self, path: str = "") -> None:
        """Sync nothing."""


def copies_are_not_compared(patches: Patches) -> None:
    """A copy whose broker was restarted goes on where it ends."""

    async def compare(self: Any, request: Any) -> None:
        return None

    patches.set(FollowService, "_compare", compare)


def reports_count_before_a_comparison(patches: Patches) -> None:
    """A copy counts though its log was not compared with that of this opening."""

    async def follow(self: Any, request: Any, payload: memoryview) -> Any:
        if request.position >= 0:
            self._remember(request.copy_id).is_compared = True
            self.on_report(request.copy_id, request.position, NOWHERE)
        return await real(self, request, payload)

    real = patches.set(FollowService, "follow", follow)


def copies_are_cut_too_far(patches: Patches) -> None:
    """A copy that is ahead loses records which were durable as well."""

    def last_positions(self: Any) -> list[int]:
        positions = real(self)
        return [self._bases[-1], *positions[-1:]] if self._bases else positions

    real = patches.set(CopiedLog, "last_positions", last_positions)


def copies_that_are_ahead_are_not_cut(patches: Patches) -> None:
    """A copy that has what its broker has lost ends."""

    async def cut_back(self: Any, broker: Any, refused: Any) -> None:
        raise refused

    patches.set(Follower, "_cut_back", cut_back)


def cut_copies_keep_their_trail(patches: Patches) -> None:
    """The trail of a copy names records that were cut."""

    def cut(self: Any, position: int) -> None:
        kept = {
            path: bytes(content.data)
            for path, content in self._files.contents.items()
            if path.endswith(".trail")
        }
        real(self, position)
        for path, data in kept.items():
            if self._files.size(path) is None:
                file = self._files.open_append(path)
                file.append([data])
                file.fdatasync()

    real = patches.set(CopiedLog, "cut", cut)


def segments_of_a_commit_begin_with_the_barrier(patches: Patches) -> None:
    """A record says that all before it was durable while copies may lack the same commit."""

    def begin_segment(self: Any) -> None:
        real(self)
        self._barrier = True

    real = patches.set(WritePlan, "begin_segment", begin_segment)


def copies_remove_segments_at_once(patches: Patches) -> None:
    """A copy removes a segment before it has what the broker repeated of it."""

    def store(self: Any, answer: Any, payload: memoryview) -> None:
        real(self, answer, payload)
        self._log.remove_before(answer.first_position)

    real = patches.set(Follower, "_store", store)


def copies_remove_segments_that_a_cut_needs(patches: Patches) -> None:
    """What was repeated of a removed segment may be cut with the newest commit."""
    patches.set(CopiedLog, "barrier_position", property(lambda self: self.end))


def two_folders_count_as_one(patches: Patches) -> None:
    """Followers of two folders with one id are not told apart."""
    patches.set(FollowService, "_check_follower", lambda self, copy, name: None)


# ── the database, and promotion ───────────────────────────────────────────────────────────────────
def sets_are_changed_from_any_version(patches: Patches) -> None:
    """A proposal that comes late, or again, takes effect."""

    def change(connection: Any, broker_group: str, request: Any) -> Any:
        stored = copy_sets.read_copy_set(connection, broker_group)
        known = replace(request, version=stored.version)
        return real(connection, broker_group, known)

    real = patches.set(copy_sets, "change_copy_set", change)
    patches.set(_callers()[0], "change_copy_set", change)


def sets_are_changed_by_any_opening(patches: Patches) -> None:
    """A broker in whose place a copy has come takes it out of the set."""

    def change(connection: Any, broker_group: str, request: Any) -> Any:
        row = copy_sets._lock_broker(connection, broker_group)
        known = replace(request, broker_id=row.broker_id, opening=row.opening)
        stored = copy_sets.read_copy_set(connection, broker_group)
        if known.term >= 0:
            known = replace(known, term=stored.term, version=stored.version)
        return replace(real(connection, broker_group, known), term=max(0, request.term))

    real = patches.set(copy_sets, "change_copy_set", change)
    patches.set(_callers()[0], "change_copy_set", change)


def any_copy_is_promoted(patches: Patches) -> None:
    """A copy for which acks did not wait takes the place of its broker."""

    def promote(connection: Any, broker_group: str, request: Any, **options: Any) -> Any:
        stored = copy_sets.read_copy_set(connection, broker_group)
        if request.copy_id not in stored.members and not stored.promoted:
            members = (*stored.members, request.copy_id)[-5:]
            copy_sets._store(connection, broker_group, replace(stored, members=members))
        return real(connection, broker_group, request, **options)

    real = patches.set(copy_sets, "promote_copy", promote)
    for module in _callers():
        patches.set(module, "promote_copy", promote)


def earlier_brokers_come_back_after_a_promotion(patches: Patches) -> None:
    """A report of the folder that was given up is accepted before that of the promoted one."""

    def promote(connection: Any, broker_group: str, request: Any, **options: Any) -> Any:
        opening = copy_sets._lock_broker(connection, broker_group).opening
        answer = real(connection, broker_group, request, **options)
        connection.execute(copy_sets.sa.update(copy_sets.brokers).values(opening=opening))
        return answer

    real = patches.set(copy_sets, "promote_copy", promote)
    for module in _callers():
        patches.set(module, "promote_copy", promote)


def replaced_folders_keep_their_snapshots(patches: Patches) -> None:
    """A folder that becomes a copy keeps the state of what is cut from its log."""

    def demote(files: Any, *, copy_id: str) -> None:
        kept = {name: bytes(each.data) for name, each in files.contents.items()}
        real(files, copy_id=copy_id)
        for name, data in kept.items():
            if name.startswith("snapshot/"):
                replace_file(files, name, data)

    real = patches.set(promotion, "demote_folder", demote)


def promoted_folders_do_not_know_their_promotion(patches: Patches) -> None:
    """The folder of a promoted copy does not know the opening that metaservers know."""
    patches.set(promotion, "record_promotion", lambda files, copy_id: None)


# ── hand-over ─────────────────────────────────────────────────────────────────────────────────────
def brokers_store_on_while_they_hand_over(patches: Patches) -> None:
    """Commits begin after the copy was told that it has everything."""

    async def hold(self: Any) -> None:
        self._held.set()

    patches.set(GroupCommit, "hold", hold)


def what_waits_is_acked_when_the_place_is_taken(patches: Patches) -> None:
    """A broker whose place was taken acks what it has not stored."""

    def refuse(self: Any, error: Any) -> None:
        for callback in self._undo_all([]):
            if callback is not None:
                callback(None)
        real(self, error)

    real = patches.set(GroupCommit, "refuse", refuse)


def offers_do_not_end(patches: Patches) -> None:
    """A copy takes the place of a broker that goes on."""

    def read(connection: Any, broker_group: str) -> Any:
        query = copy_sets.sa.select(copy_sets.copy_sets.c.handing_to)
        named = query.where(copy_sets.copy_sets.c.broker_group == broker_group)
        return replace(
            real(connection, broker_group), handing_to=connection.execute(named).scalar() or ""
        )

    real = patches.set(copy_sets, "_read", read)


def what_is_not_durable_is_applied(patches: Patches) -> None:
    """A copy that is kept ready to serve applies what may be cut."""

    async def run(self: Any, durable: Any) -> None:
        await real(self, lambda: (durable()[0], 1 << 60))

    real = patches.set(Folding, "run", run)


def databases_that_fell_back_are_not_noticed(patches: Patches) -> None:
    """A copy that was left out since may be promoted."""
    patches.set(fall_backs, "quarantine_copies", lambda connection, reason: [])


def _callers() -> Sequence[Any]:
    """The modules that have imported the functions of `copy_sets`."""
    from keylane.metaserver import calls
    from keylane.metaserver.catalogue import service

    return calls, service


BREAKS: tuple[Breaks, ...] = (
    acks_wait_for_no_copy,
    proposed_copies_do_not_count,
    commits_end_before_the_set_is_known,
    most_copies_are_enough,
    too_few_folders_are_enough,
    copies_join_beside_a_commit_that_has_ended,
    copies_join_that_lack_something,
    copies_join_beside_an_earlier_commit,
    unanswered_proposals_are_forgotten,
    leaving_copies_do_not_count,
    folders_do_not_say_that_they_have_copies,
    clients_are_answered_before_copies_have_the_log,
    restarted_brokers_call_their_log_durable,
    refused_folders_are_read_to_their_end,
    late_copies_are_waited_for_for_ever,
    lost_copies_keep_their_place,
    copies_say_what_they_have_not_synced,
    copies_say_what_they_are_about_to_store,
    new_segments_of_copies_are_not_durable,
    copies_are_not_compared,
    reports_count_before_a_comparison,
    copies_are_cut_too_far,
    copies_that_are_ahead_are_not_cut,
    cut_copies_keep_their_trail,
    segments_of_a_commit_begin_with_the_barrier,
    copies_remove_segments_at_once,
    copies_remove_segments_that_a_cut_needs,
    two_folders_count_as_one,
    sets_are_changed_from_any_version,
    sets_are_changed_by_any_opening,
    any_copy_is_promoted,
    earlier_brokers_come_back_after_a_promotion,
    promoted_folders_do_not_know_their_promotion,
    replaced_folders_keep_their_snapshots,
    brokers_store_on_while_they_hand_over,
    what_waits_is_acked_when_the_place_is_taken,
    offers_do_not_end,
    what_is_not_durable_is_applied,
    databases_that_fell_back_are_not_noticed,
)
