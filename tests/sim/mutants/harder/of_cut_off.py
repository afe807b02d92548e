"""Bugs of consumers that are cut off from a broker alone, and of who gets what they have there."""

from __future__ import annotations

from typing import Any

from keylane.consumer.group.assignments import Assignments
from keylane.consumer.group.reachability import BrokerReachability, UnreachedBrokers
from keylane.metaserver.groups import lease_rows, service
from keylane.metaserver.groups import leases as group_leases
from sim.mutants.mutant import Breaks, Patches


def partitions_are_never_passed_on(patches: Patches) -> None:
    """The metaserver grants as if every member reached every broker."""

    def avoid_unreachable(allocated: Any, _sessions: Any, *, current: Any, unreachable: Any) -> Any:
        return dict(allocated)

    patches.set(group_leases, "avoid_unreachable", avoid_unreachable)


def unreached_brokers_are_not_told(patches: Patches) -> None:
    """Heartbeats name no broker group."""
    patches.set(Assignments, "unreached", lambda _self: ())


def reached_brokers_are_not_taken_back(patches: Patches) -> None:
    """A broker group that was told once is told for ever."""
    patches.set(UnreachedBrokers, "stop_reporting", lambda _self, _name, _now_ms: False)
    patches.set(
        UnreachedBrokers,
        "update_connections",
        _never_recovering(UnreachedBrokers.update_connections),
    )


def told_brokers_are_not_looked_at_again(patches: Patches) -> None:
    """Who has no partition left at a broker never asks whether it is reached again."""

    def due(self: Any, now_ms: int) -> list[str]:
        return [name for name in real(self, now_ms) if not self.is_reported(name)]

    real = patches.set(UnreachedBrokers, "find_due", due)


def brokers_away_for_all_count_as_unreached(patches: Patches) -> None:
    """The cluster is not asked whether it hears of the broker."""

    async def check_brokers(self: Any, due: Any) -> None:
        for name in due:
            self._brokers.report(name, self._clock.boot_ms())
            self._membership.nudge()

    patches.set(BrokerReachability, "_check_brokers", check_brokers)


def unreached_by_all_is_passed_round(patches: Patches) -> None:
    """Where no member gets at a partition, another one has it all the same."""

    def avoid_unreachable(allocated: Any, sessions: Any, *, current: Any, unreachable: Any) -> Any:
        after = real(allocated, sessions, current=current, unreachable=unreachable)
        for number, shut_out in unreachable.items():
            if number in after and shut_out.issuperset(sessions):
                others = [each for each in sessions if each != current.get(number)]
                after[number] = (others or list(sessions))[0]
        return after

    real = patches.set(group_leases, "avoid_unreachable", avoid_unreachable)


def all_brokers_count_as_unreached(patches: Patches) -> None:
    """Who does not get at one broker loses its partitions at the others too."""

    def read(connection: Any, group_id: int, subject_id: int) -> Any:
        said = real(connection, group_id, subject_id)
        who = set().union(*said.values())
        held = lease_rows.read_leases(connection, group_id)
        return said | dict.fromkeys(held.keys() - said.keys(), who) if who else said

    real = patches.set(lease_rows, "read_unreached", read)


def what_heartbeats_say_of_brokers_is_not_noted(patches: Patches) -> None:
    """The metaserver does not look at what heartbeats say of brokers."""
    patches.set(service, "_unreached_changed", lambda _ask, _row: False)


def open_connections_count_as_answers(patches: Patches) -> None:
    """A broker to which the network leads no more counts as reached when it is tried."""

    async def is_reached(_self: Any, _partition: Any) -> bool:
        return True

    patches.set(BrokerReachability, "_is_reached", is_reached)


def allocation_keeps_nothing(patches: Patches) -> None:
    """Each settling allocates as if no member had anything."""

    def allocate(sessions: Any, partitions: Any, *, current: Any, preferred: Any) -> Any:
        return real(sessions, partitions, current={}, preferred={})

    real = patches.set(group_leases, "allocate", allocate)


def _never_recovering(real: Any) -> Any:
    def update_connections(self: Any, failing: Any, reached: Any) -> bool:
        real(self, failing, ())
        return False

    return update_connections


BREAKS: tuple[Breaks, ...] = (
    partitions_are_never_passed_on,
    unreached_brokers_are_not_told,
    reached_brokers_are_not_taken_back,
    told_brokers_are_not_looked_at_again,
    brokers_away_for_all_count_as_unreached,
    unreached_by_all_is_passed_round,
    all_brokers_count_as_unreached,
    what_heartbeats_say_of_brokers_is_not_noted,
    open_connections_count_as_answers,
    allocation_keeps_nothing,
)
