"""Bugs of a broker: fences, durability, sequences, cursors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from keylane.broker import service
from keylane.broker.answering import open_pulls
from keylane.broker.partition import partition as partition_module
from keylane.broker.partition import pull_lock
from keylane.broker.partition.appends import Duplicate
from keylane.broker.partition.partition import Group, HostedPartition
from keylane.broker.partition.records import CursorBody
from keylane.broker.service import BrokerService
from keylane.broker.storage.log import recovery
from keylane.broker.storage.log.log_reader import BatchReader
from keylane.broker.store.group_commit import AdmissionQueue, GroupCommit
from keylane.broker.store.store import Store
from keylane.broker.store.tail_cache import TailCache
from keylane.protocol.errors import ProducerFencedError, SequenceGapError, SequenceReusedError
from keylane.protocol.frames import Ack, Pull
from keylane.protocol.limits import PULL_ANSWERS_MAX
from keylane.protocol.offsets import AckedOffsets
from keylane.protocol.record import (
    HEADER_BYTES,
    Header,
    IncompleteRecord,
    read_header,
    stamp_record,
)
from keylane.testing.machines.disk import SimAppendFile, SimDisk
from sim.mutants.mutant import Breaks, Patches


def no_token_check(patches: Patches) -> None:
    patches.set(pull_lock, "_check_owner", lambda lock, *, token, session: None)


def _lower_token_passes(patches: Patches, module: Any, kind: type[Any]) -> None:
    def owned(state: Any, request: Any, now_ms: int) -> Any:
        if type(request) is not kind:
            return real(state, request, now_ms)
        partition = state.partition(request.partition_id)
        return partition, partition.groups[request.group]

    real = patches.set(module, "check_owner", owned)


def ack_of_lower_token_accepted(patches: Patches) -> None:
    _lower_token_passes(patches, service, Ack)


def pull_of_lower_token_accepted(patches: Patches) -> None:
    _lower_token_passes(patches, open_pulls, Pull)
    patches.set(open_pulls, "check_holder", lambda lock, *, token, session: None)


def parts_need_no_owner(patches: Patches) -> None:
    """The owner of a pull is checked for its first answer alone, and neither a newer owner nor its
    pulls end it.
    """

    def owned(state: Any, request: Any, now_ms: int) -> Any:
        if type(request) is not Pull or request.answers_max == PULL_ANSWERS_MAX:
            return real_owned(state, request, now_ms)
        partition = state.partition(request.partition_id)
        return partition, partition.groups[request.group]

    def answer(self: Any, partition: Any, bytes_max: int, now_ns: int) -> bool:
        request, now_ms = self._request, now_ns // 1_000_000
        begun = request.answers_max < PULL_ANSWERS_MAX
        nothing = request.offset == partition.readable_offset and not partition.ended
        if begun and nothing and now_ms < self._deadline_ms:
            self.wait(now_ms)
            return True
        return real_answer(self, partition, bytes_max, now_ns)

    real_owned = patches.set(open_pulls, "check_owner", owned)
    real_answer = patches.set(open_pulls.OpenPull, "answer", answer)
    patches.set(open_pulls.OpenPull, "end", lambda _pull: None)


def line_waits_for_a_commit(patches: Patches) -> None:
    """Room that an append gives back reaches the next append with a commit only, and perhaps no
    commit is under way.
    """

    @asynccontextmanager
    async def turn(self: Any, length: int) -> AsyncIterator[None]:
        try:
            async with real(self, length):
                try:
                    yield
                finally:
                    self.admit = lambda: None
        finally:
            vars(self).pop("admit", None)

    real = patches.set(AdmissionQueue, "admission", turn)


def fence_not_durable(patches: Patches) -> None:
    def raise_fence(self: Any, partition: Any, group: Any, *, token: int, session: str) -> Any:
        from keylane.broker.partition.records import FenceBody

        partition.groups[group.name] = group
        partition.apply_fence(FenceBody(group.name, token, session))
        return self.commit.wait_flushed()

    patches.set(Store, "raise_fence", raise_fence)


def fence_told_before_durable(patches: Patches) -> None:
    """The new owner is answered before its fence is on the disk."""

    def raise_fence(self: Any, *args: Any, **kwargs: Any) -> Any:
        real(self, *args, **kwargs).add_done_callback(lambda done: done.exception())
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    real = patches.set(Store, "raise_fence", raise_fence)


def release_lowers_the_fence(patches: Patches) -> None:
    def release(lock: Any) -> None:
        lock.released = True
        lock.fence = 0

    patches.set(service, "release_lock", release)


def ack_before_fsync(patches: Patches) -> None:
    def append(self: Any, partition_id: int, record: Any, ended: Any, **options: Any) -> Any:
        answer = real(self, partition_id, record, lambda _error: None, **options)
        asyncio.get_running_loop().call_soon(ended, None)
        return answer

    real = patches.set(Store, "append", append)


def duplicate_told_before_durable(patches: Patches) -> None:
    """A repeat of a batch that is still on its way to the disk is answered at once."""

    def append(self: Any, partition_id: int, record: Any, ended: Any, **options: Any) -> Any:
        def told(error: Any) -> None:
            if not at_once:
                ended(error)

        at_once = False
        base_offset, at_once = real(self, partition_id, record, told, **options)
        if at_once:
            asyncio.get_running_loop().call_soon(ended, None)
        return base_offset, at_once

    real = patches.set(Store, "append", append)


def progress_told_before_durable(patches: Patches) -> None:
    def save(self: Any, partition: Any, group: Any, _ended: Any) -> bool:
        self._store.save_progress_then(partition, group, lambda _error: None)
        return False

    patches.set(BrokerService, "_save_then", save)


def cursor_never_saved(patches: Patches) -> None:
    def save(self: Any, _partition: Any, _group: Any, ended: Any) -> None:
        self.commit.call_when_flushed(ended)

    patches.set(Store, "save_progress_then", save)


def ranges_above_the_cursor_forgotten(patches: Patches) -> None:
    def body(self: Any) -> CursorBody:
        return CursorBody(self.name, self.lock.fence, self.acked.cursor, [])

    patches.set(Group, "cursor_body", body)


def cursor_jumps_a_gap(patches: Patches) -> None:
    def add(self: Any, start: int, end: int) -> bool:
        moved = end > self.cursor
        self.cursor = max(self.cursor, end)
        return moved

    patches.set(AckedOffsets, "add", add)


def cursor_falls(patches: Patches) -> None:
    """An ack sets the cursor to its end, also when that is below the old cursor."""

    def apply(acked: Any, ranges: Any) -> bool:
        for start, end in ranges:
            acked.add(start, end)
            acked.cursor = min(acked.cursor, end)
        return True

    patches.set(service, "apply_ack", apply)


def duplicates_stored(patches: Patches) -> None:
    def decide(producer: Any, header: Header, **kwargs: Any) -> Any:
        real(producer, header, **kwargs)
        return None

    real = patches.set(partition_module, "decide_append", decide)


def sequence_gap_accepted(patches: Patches) -> None:
    def decide(producer: Any, header: Header, **kwargs: Any) -> Any:
        try:
            return real(producer, header, **kwargs)
        except SequenceGapError:
            return None

    real = patches.set(partition_module, "decide_append", decide)


def repeats_known_by_their_sequence(patches: Patches) -> None:
    """Any batch whose sequence is already used is answered as stored."""

    def decide(producer: Any, header: Header, **kwargs: Any) -> Any:
        try:
            return real(producer, header, **kwargs)
        except SequenceReusedError:
            return Duplicate(-1)

    real = patches.set(partition_module, "decide_append", decide)


def old_producer_epoch_accepted(patches: Patches) -> None:
    def decide(producer: Any, header: Header, **kwargs: Any) -> Any:
        try:
            return real(producer, header, **kwargs)
        except ProducerFencedError:
            return None

    real = patches.set(partition_module, "decide_append", decide)


def sealed_takes_appends(patches: Patches) -> None:
    def decide(self: Any, header: Header) -> Any:
        return partition_module.decide_append(self.producers.get(header.producer_id), header)

    patches.set(HostedPartition, "decide_append", decide)


def seal_not_durable(patches: Patches) -> None:
    def seal(self: Any, partition_id: int) -> Any:
        partition = self.state.partition(partition_id)
        partition.sealed = partition.ended = True
        self._wake(partition_id)
        return partition, self.commit.wait_flushed()

    patches.set(Store, "seal", seal)


def older_picture_of_a_partition_accepted(patches: Patches) -> None:
    """A second call to host a partition opens it again, also when it is sealed."""

    def host(self: Any, facts: Any) -> Any:
        partition, durable = real(self, facts)
        partition.sealed = partition.ended = False
        return partition, durable

    real = patches.set(Store, "host", host)


def dedup_forgotten_at_restart(patches: Patches) -> None:
    def opened(cls: Any, *args: Any, **kwargs: Any) -> Any:
        store = real(cls, *args, **kwargs)
        for partition in store.state.partitions.values():
            partition.producers.clear()
        return store

    real = patches.set(Store, "open", classmethod(opened))


def fences_forgotten_at_restart(patches: Patches) -> None:
    def opened(cls: Any, *args: Any, **kwargs: Any) -> Any:
        store = real(cls, *args, **kwargs)
        for partition in store.state.partitions.values():
            for group in partition.groups.values():
                group.lock.fence = group.durable_fence = 0
        return store

    real = patches.set(Store, "open", classmethod(opened))


def readable_before_durable(patches: Patches) -> None:
    """A long poll is woken for messages that are not on the disk yet."""

    def append(self: Any, partition_id: int, record: Any, ended: Any, **options: Any) -> Any:
        base_offset, duplicate = real(self, partition_id, record, ended, **options)
        if not duplicate:
            partition = self.state.partitions[partition_id]
            header = bytearray(record[:HEADER_BYTES])
            stamp_record(header, base_offset=base_offset, position=0, appended_at_ms=0)
            partition.readable_offset = partition.next_offset
            self._cache.add(
                partition_id,
                base_offset,
                partition.next_offset,
                header=header,
                body=memoryview(bytes(record[HEADER_BYTES:])),
            )
            self._wake(partition_id)
        return base_offset, duplicate

    def add(self: Any, partition_id: int, base_offset: int, *args: Any, **kwargs: Any) -> None:
        """Add a group again once it is durable, or after the disk refused it: it is counted
        once.
        """
        batches = self._partitions.get(partition_id, {})
        if base_offset not in batches:
            add_new(self, partition_id, base_offset, *args, **kwargs)

    real = patches.set(Store, "append", append)
    add_new = patches.set(TailCache, "add", add)


def no_fsync(patches: Patches) -> None:
    patches.set(SimAppendFile, "fdatasync", lambda self: None)


def no_sync_of_new_names(patches: Patches) -> None:
    patches.set(SimDisk, "sync_folder", lambda self, path="": None)


def writes_on_after_a_failed_flush(patches: Patches) -> None:
    def fail(self: Any, *args: Any) -> None:
        real(self, *args)
        self._failure = None

    real = patches.set(GroupCommit, "_fail_commit", fail)


def full_disk_undoes_nothing(patches: Patches) -> None:
    patches.set(HostedPartition, "undo_append", lambda self, undo: None)


def damaged_bodies_pass_recovery(patches: Patches) -> None:
    def read(data: Any, start: int = 0) -> Any:
        header = read_header(data, start)
        if isinstance(header, Header) and len(data) - start < header.length:
            return IncompleteRecord(header.length)
        return header

    patches.set(recovery, "read_record", read)


def reads_begin_one_batch_late(patches: Patches) -> None:
    """The index finds the batch behind the one that contains the offset."""

    def read(self: Any, partition_id: int, offset: int, end: int, bytes_max: int) -> Any:
        data, upto = real(self, partition_id, offset, end, bytes_max)
        header = read_header(data)
        assert isinstance(header, Header)
        return (data[header.length :], upto) if upto - offset > 3 else (data, upto)

    def cached(self: Any, partition: Any, offset: int, *, bytes_max: int) -> Any:
        pieces, upto = real_cached(self, partition, offset, bytes_max=bytes_max)
        return (pieces[2:], upto) if upto - offset > 3 and len(pieces) > 2 else (pieces, upto)

    real = patches.set(BatchReader, "read", read)
    real_cached = patches.set(Store, "read_cached", cached)


def empty_ack_says_the_end(patches: Patches) -> None:
    def decide(self: Any, request: Any, now_ms: int) -> Any:
        cursor, partition, group = real(self, request, now_ms)
        if not request.ranges:
            cursor = partition.readable_offset
        return cursor, partition, group

    real = patches.set(BrokerService, "_apply_ack", decide)


BREAKS: tuple[Breaks, ...] = (
    no_token_check,
    ack_of_lower_token_accepted,
    pull_of_lower_token_accepted,
    parts_need_no_owner,
    line_waits_for_a_commit,
    fence_not_durable,
    fence_told_before_durable,
    release_lowers_the_fence,
    ack_before_fsync,
    duplicate_told_before_durable,
    repeats_known_by_their_sequence,
    progress_told_before_durable,
    cursor_never_saved,
    ranges_above_the_cursor_forgotten,
    cursor_jumps_a_gap,
    cursor_falls,
    duplicates_stored,
    sequence_gap_accepted,
    old_producer_epoch_accepted,
    sealed_takes_appends,
    seal_not_durable,
    older_picture_of_a_partition_accepted,
    dedup_forgotten_at_restart,
    fences_forgotten_at_restart,
    readable_before_durable,
    no_fsync,
    no_sync_of_new_names,
    writes_on_after_a_failed_flush,
    full_disk_undoes_nothing,
    damaged_bodies_pass_recovery,
    reads_begin_one_batch_late,
    empty_ack_says_the_end,
)
