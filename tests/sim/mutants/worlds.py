"""The worlds that show mutants which few worlds show: a hunt for one of these runs no other
seeds.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.actors.losing import is_losing
from sim.actors.outages import is_calm
from sim.features.feature import Feature
from sim.features.harder.killers import Killers
from sim.features.harder.parked import DamagedParks, RetainedParks
from sim.features.harder.past import ForgottenCutOvers
from sim.features.harder.quotas import Quotas
from sim.features.instances import Instances
from sim.features.lacking import OnLostDisks
from sim.features.later import LaterDeliveries
from sim.features.live_resets import LiveResetting, sets_parts
from sim.features.loops import PROMPT, PROMPT_EVERY, Loops
from sim.features.world import feature_plan_of, kind_of
from sim.following.features import STORIES
from sim.plans import plan_of
from sim.run import FEATURES_FIRST, FOLLOWED_FEATURES_FIRST
from sim.swarm import keyed_share

OFTEN_S = 1.0
"""Of the seconds between two faults: with more there are few in a world."""


# ── usual worlds ──────────────────────────────────────────────────────────────────────────────────
def _calendars_jump_in_silence(seed: int) -> bool:
    """Consumers fall silent, or are frozen, while their calendars jump, and others are there to
    take over.
    """
    plan = plan_of(seed)
    silent = {"wall_jump", "lost_lease", "consumer_pause"} <= plan.faults
    return silent and plan.groups == 1 and plan.consumers > 1 and plan.gap_s <= OFTEN_S


def _leases_end_with_messages(seed: int) -> bool:
    """Consumers whose ttl has a margin worth the name fall silent with messages in hand."""
    plan = plan_of(seed)
    silent = "lost_lease" in plan.faults and plan.gap_s <= OFTEN_S
    return silent and plan.ttl_ms >= 2_000 and plan.consumers > 1


def _batches_leave_home(seed: int) -> bool:
    """BEST_TRIED: keyed messages of large batches leave a broker that does not answer, soon."""
    plan = plan_of(seed)
    best_tried = not plan.strict and not plan.static and plan.partitions > 1
    silent = plan.faults & {
        "cut_producer",
        "broker_pause",
        "broker_stall",
        "broker_crash",
        "broker_power",
    }
    early = plan.producer["leave_after_ms"] == 300 and plan.producer["batch_count"] > 2
    return best_tried and len(silent) > 1 and early and plan.keys > 1


def _flushes_fail(seed: int) -> bool:
    """Brokers' disks fail to sync, often."""
    plan = plan_of(seed)
    return "broker_flush" in plan.faults and plan.gap_s <= OFTEN_S


def _disks_are_lost(seed: int) -> bool:
    """A broker's disk is lost, and an operator accepts it."""
    return seed < FEATURES_FIRST and is_losing(seed)


def _messages_leave_home(seed: int) -> bool:
    """BEST_TRIED: keyed messages leave a broker that does not answer, soon."""
    plan = plan_of(seed)
    best_tried = not plan.strict and not plan.static and plan.partitions > 1
    silent = plan.faults & {"cut_producer", "broker_pause", "broker_stall", "broker_crash"}
    early = plan.producer["leave_after_ms"] == 300 and plan.keys > 1
    return best_tried and early and bool(silent) and plan.gap_s <= OFTEN_S


def _mixed_batches_leave_home(seed: int) -> bool:
    """The same, and most batches have messages without a key as well."""
    return keyed_share(seed) < 0.9 and _batches_leave_home(seed)


# ── worlds of features ────────────────────────────────────────────────────────────────────────────
def _joins_come_late(seed: int) -> bool:
    """Calls of consumers with instance names come late, and twice."""
    number = seed - FEATURES_FIRST
    if kind_of(number) is not Instances:
        return False
    plan = feature_plan_of(number)
    return {"late", "twice"} <= plan.faults and plan.gap_s < OFTEN_S


def _groups_are_reset(seed: int) -> bool:
    """A group of several members and partitions is reset while they work."""
    number = seed - FEATURES_FIRST
    if kind_of(number) is not LiveResetting:
        return False
    plan = feature_plan_of(number)
    return plan.consumers > 1 and plan.partitions > 1


def _partitions_are_reset_alone(seed: int) -> bool:
    """Partitions of a group are set without the others, while it parks keys."""
    number = seed - FEATURES_FIRST
    if kind_of(number) is not LiveResetting or not sets_parts(number):
        return False
    return "on_failure" in feature_plan_of(number).consumer


def _cursors_take_long(seed: int) -> bool:
    """The same, on slow disks."""
    return _groups_are_reset(seed) and feature_plan_of(seed - FEATURES_FIRST).disk_s >= 0.2


def _batches_wait_unopened(seed: int) -> bool:
    """A key is redriven as soon as it was parked, and a loop has small batches that it has not
    opened.
    """
    number = seed - FEATURES_FIRST
    if kind_of(number) is not Loops or number % PROMPT_EVERY not in PROMPT:
        return False
    plan = feature_plan_of(number)
    parks = plan.consumer["on_failure"] == "park" and plan.consumer["tries_max"] == 1
    small = plan.consumer["pull_bytes"] == 200 and plan.consumer["buffer_messages"] > 4
    return parks and small and plan.consumers == 1


def _scheduled_logs_are_removed(seed: int) -> bool:
    """Brokers remove what is old of their logs under scheduled messages."""
    number = seed - FEATURES_FIRST
    if kind_of(number) is not LaterDeliveries:
        return False
    return "retention_bytes" in feature_plan_of(number).broker


def _disks_with_retries_are_lost(seed: int) -> bool:
    """Messages wait for retry at partitions whose disk is lost."""
    return kind_of(seed - FEATURES_FIRST) is OnLostDisks


def _cut_overs_are_followed(seed: int) -> bool:
    """Readers follow a subject that is cut over."""
    return seed >= FOLLOWED_FEATURES_FIRST and (seed - FOLLOWED_FEATURES_FIRST) % STORIES == 0


def _is(kind: type[Feature]) -> Callable[[int], bool]:
    """Worlds of this feature."""
    return lambda seed: kind_of(seed - FEATURES_FIRST) is kind


SHOWN_IN: dict[str, Callable[[int], bool]] = {
    "consumers_ask_for_no_promise": is_calm,
    "no_time_is_given_back": is_calm,
    "a_restart_of_the_owner_clears_suspects": _is(Killers),
    "accused_messages_are_tried_for_ever": _is(Killers),
    "acked_messages_need_no_segment": _is(RetainedParks),
    "all_suspects_are_accused": _is(Killers),
    "cuts_are_forgotten_before_they_are_published": _is(ForgottenCutOvers),
    "deadline_by_the_calendar": _calendars_jump_in_silence,
    "deadline_from_the_answer": _leases_end_with_messages,
    "detour_told_by_batch": _mixed_batches_leave_home,
    "group_is_granted_while_cursors_are_set": _cursors_take_long,
    "keys_go_on_behind_damage": _is(DamagedParks),
    "late_joins_begin_again": _joins_come_late,
    "later_batches_are_parked_before_earlier_ones": _batches_wait_unopened,
    "later_detour_not_declared": _messages_leave_home,
    "live_reset_waits_for_no_member": _groups_are_reset,
    "lost_messages_are_sent_again": _disks_are_lost,
    "lost_parents_are_waited_for": _disks_with_retries_are_lost,
    "margin_on_the_wrong_side": _leases_end_with_messages,
    "messages_are_written_again_behind_their_end": _scheduled_logs_are_removed,
    "new_messages_overtake_suspects": _is(Killers),
    "no_message_is_suspected": _is(Killers),
    "open_deliveries_go_with_their_segment": _scheduled_logs_are_removed,
    "quotas_are_looked_up_for_everybody_alone": _is(Quotas),
    "reset_of_a_child_forgets_its_parents": _partitions_are_reset_alone,
    "rows_of_rows_come_again": _cut_overs_are_followed,
    "running_publications_are_forgotten": _is(ForgottenCutOvers),
    "second_copy_not_declared": _batches_leave_home,
    "settled_messages_go_with_their_segment": _scheduled_logs_are_removed,
    "suspects_are_handed_out_together": _is(Killers),
    "unheard_sessions_hold_the_place": _joins_come_late,
    "unreadable_parked_messages_are_given_up": _is(DamagedParks),
    "waiting_messages_go_with_their_segment": _scheduled_logs_are_removed,
    "writes_on_after_a_failed_flush": _flushes_fail,
}
"""By the mutant's name: whether the world of a seed may show it."""


def shows(name: str, seed: int) -> bool:
    """Whether a hunt for the mutant of this name tries a seed."""
    suits = SHOWN_IN.get(name)
    return suits is None or suits(seed)
