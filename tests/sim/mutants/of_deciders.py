"""Bugs of deciders: who gets which partition, what a reshape plans, where a reset begins, what segments are removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keylane.broker.partition.in_flight import InFlight
from keylane.broker.retention import loop as retention_loop
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.groups import leases as group_leases
from keylane.metaserver.operations import begin as operations_begin
from keylane.metaserver.operations import evacuations
from keylane.metaserver.operations import plan as operations_plan
from keylane.metaserver.resets import cursors as resets_cursors
from keylane.metaserver.resets import rows as resets_rows
from keylane.metaserver.resets import service as resets_service
from keylane.metaserver.retention import expiry_rows
from keylane.metaserver.sql.schema import partitions
from keylane.protocol.routing import PartitionState
from sim.mutants.mutant import Breaks, Patches


# ── who gets which partition ──────────────────────────────────────────────────────────────────────────
def first_session_gets_everything(patches: Patches) -> None:
    """All partitions of a group go to the session that joined first."""

    def allocate(sessions: Any, partitions: Any, *, current: Any, preferred: Any) -> Any:
        return real(sessions[:1], partitions, current=current, preferred=preferred)

    real = patches.set(group_leases, "allocate", allocate)


def suspended_sessions_are_granted(patches: Patches) -> None:
    """A suspended consumer keeps its share, and handles nothing of it."""

    def settle(*args: Any, suspended: Any = (), **kwargs: Any) -> Any:
        return real(*args, **kwargs)

    real = patches.set(lease_rows, "settle_leases", settle)


def shared_tokens_are_never_renewed(patches: Patches) -> None:
    """A shared group whose token a broker refuses gets no other one."""
    patches.set(lease_rows, "renew_token", lambda _lease, _token, *, last_token: None)


# ── shared groups ─────────────────────────────────────────────────────────────────────────────────────
def messages_in_flight_are_free(patches: Patches) -> None:
    """A message goes to each session that pulls, until one has acked it."""

    def free(self: Any, acked: Any, offset: int, readable_offset: int) -> Any:
        start = acked.next_unacked(offset)
        return start, min(readable_offset, acked.next_acked(start))

    patches.set(InFlight, "_free", free)


def released_messages_stay_in_flight(patches: Patches) -> None:
    """What a session had when it left waits for its deadline."""

    def give_back(self: Any, session: str) -> bool:
        self._left[session] = None
        return False

    patches.set(InFlight, "give_back", give_back)


# ── what a producer repeats ───────────────────────────────────────────────────────────────────────────
def oldest_batch_alone_is_remembered(patches: Patches) -> None:
    """A repeat is known if it is one of the batch that was stored first of those that are remembered."""

    def decide(producer: Any, header: Any, **kwargs: Any) -> Any:
        if producer is not None and len(producer.latest) > 1:
            producer = type(producer)(producer.epoch, producer.next_sequence, producer.latest[:1])
        return real(producer, header, **kwargs)

    from keylane.broker.partition import partition as partition_module

    real = patches.set(partition_module, "decide_append", decide)


# ── operations ────────────────────────────────────────────────────────────────────────────────────────
def children_have_one_parent(patches: Patches) -> None:
    """A partition that continues several has the first of them alone as its parent."""

    def plan(*args: Any) -> Any:
        planned = real(*args)
        children = (replace(child, parents=child.parents[:1]) for child in planned.children)
        return replace(planned, children=tuple(children))

    real = patches.set(operations_plan, "_plan", plan)


def merged_ranges_end_early(patches: Patches) -> None:
    """The child of a merge lacks the last logical partition."""

    def merge(current: Any, ids: Any, hosts: Any) -> Any:
        planned = real(current, ids, hosts)
        (child,) = planned.children
        return replace(planned, children=(replace(child, range_end=child.range_end - 1),))

    real = patches.set(operations_begin, "plan_merge", merge)


def evacuation_leaves_one_partition(patches: Patches) -> None:
    """The last partition of a broker group that is evacuated stays there."""

    def evacuation(current: Any, source: Any, hosts: Any) -> Any:
        leaving = [each for each in current if each.broker_group == source]
        return real([each for each in current if each not in leaving[1:]], source, hosts)

    real = patches.set(evacuations, "plan_evacuation", evacuation)


def moved_queue_is_a_new_one(patches: Patches) -> None:
    """A partition of a static subject that moves gets the number of a new queue."""

    def plan(*args: Any) -> Any:
        planned = real(*args)
        children = (replace(child, queue=None) for child in planned.children)
        return replace(planned, children=tuple(children))

    real = patches.set(operations_plan, "_plan", plan)


# ── resets ────────────────────────────────────────────────────────────────────────────────────────────
def reset_to_a_time_begins_late(patches: Patches) -> None:
    """The first message at or after the time is left out."""

    def physical(ask: Any, part: Any, begun: bool) -> int:
        if part.at_time is not None and part.at_time < part.next_offset:
            part = replace(part, at_time=part.at_time + 1)
        return int(real(ask, part, begun))

    real = patches.set(resets_cursors, "_physical", physical)


def children_are_placed_for_themselves(patches: Patches) -> None:
    """A reset places a partition by its own times, although one before it has messages behind the point."""
    patches.set(
        resets_cursors,
        "place_in_order",
        lambda own, parents: {number: place.at for number, place in own.items()},
    )


def parents_are_set_before_children(patches: Patches) -> None:
    """A reset sets the oldest partitions first; one that is interrupted goes on behind what comes again."""
    real = patches.set(resets_service, "generations", lambda partitions: real(partitions)[::-1])


def tokens_go_on_below_a_fence(patches: Patches) -> None:
    """A reset takes the next token of the database, though brokers have seen higher ones."""
    patches.set(resets_rows, "raise_token_floor", lambda last_token, fence: last_token)


# ── retention ─────────────────────────────────────────────────────────────────────────────────────────
def segment_of_the_floor_is_removed(patches: Patches) -> None:
    """The segment with the first message that a group needs goes with those before it."""

    def allowed(segments: Any, wanted: int, floor: int | None) -> int:
        position = real(segments, wanted, floor)
        if floor is None or floor >= wanted:
            return int(position)
        ends = [segment.end for segment in segments if segment.base <= floor]
        return max(ends, default=position)

    real = patches.set(retention_loop, "allowed_position", allowed)


def children_expire_before_their_parents(patches: Patches) -> None:
    """A sealed partition without messages expires, whatever it continues."""
    patches.set(
        expiry_rows,
        "_may_expire",
        (partitions.c.state == PartitionState.SEALED) & partitions.c.end_offset.is_not(None),
    )


BREAKS: tuple[Breaks, ...] = (
    first_session_gets_everything,
    suspended_sessions_are_granted,
    shared_tokens_are_never_renewed,
    messages_in_flight_are_free,
    released_messages_stay_in_flight,
    oldest_batch_alone_is_remembered,
    children_have_one_parent,
    merged_ranges_end_early,
    evacuation_leaves_one_partition,
    moved_queue_is_a_new_one,
    reset_to_a_time_begins_late,
    children_are_placed_for_themselves,
    parents_are_set_before_children,
    tokens_go_on_below_a_fence,
    segment_of_the_floor_is_removed,
)
