"""Bugs of deciders: who gets which partition, what a reshape plans, where a reset begins, what
segments are removed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keylane.broker.retention import loop as retention_loop
from keylane.metaserver.groups import lease_rows
from keylane.metaserver.groups import leases as group_leases
from keylane.metaserver.operations import begin as operations_begin
from keylane.metaserver.operations import evacuations
from keylane.metaserver.operations import plan as operations_plan
from keylane.metaserver.resets import cursors as resets_cursors
from sim.mutants.mutant import Breaks, Patches


# ── who gets which partition ──────────────────────────────────────────────────────────────────────
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


# ── operations ────────────────────────────────────────────────────────────────────────────────────
def children_have_one_parent(patches: Patches) -> None:
    """A partition that continues several has the first of them alone as its parent."""

    def plan(*args: Any) -> Any:
        planned = real(*args)
        children = (replace(child, parents=child.parents[:1]) for child in planned.children)
        return replace(planned, children=tuple(children))

    real = patches.set(operations_plan, "_plan_children", plan)


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


# ── resets ────────────────────────────────────────────────────────────────────────────────────────
def reset_to_a_time_begins_late(patches: Patches) -> None:
    """The first message at or after the time is left out."""

    def physical(ask: Any, part: Any, begun: bool) -> int:
        if part.offset_at_time is not None and part.offset_at_time < part.next_offset:
            part = replace(part, offset_at_time=part.offset_at_time + 1)
        return int(real(ask, part, begun))

    real = patches.set(resets_cursors, "_physical_cursor", physical)


# ── retention ─────────────────────────────────────────────────────────────────────────────────────
def segment_of_the_floor_is_removed(patches: Patches) -> None:
    """The segment with the first message that a group needs goes with those before it."""

    def allowed(segments: Any, wanted: int, floor: int | None) -> int:
        position = real(segments, wanted, floor)
        if floor is None or floor >= wanted:
            return int(position)
        ends = [segment.end for segment in segments if segment.base <= floor]
        return max(ends, default=position)

    real = patches.set(retention_loop, "allowed_position", allowed)


BREAKS: tuple[Breaks, ...] = (
    first_session_gets_everything,
    suspended_sessions_are_granted,
    children_have_one_parent,
    merged_ranges_end_early,
    evacuation_leaves_one_partition,
    reset_to_a_time_begins_late,
    segment_of_the_floor_is_removed,
)
