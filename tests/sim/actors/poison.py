"""Keys whose handlers always fail: messages of other keys are handled, even when half of the keys
fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from keylane.broker.store.store import Store
from keylane.checker.events import Ended, Event, Stored
from sim.actors.users import SHARED
from sim.machines.logs import read_log
from sim.service import Service, cursor_of

Owed = dict[tuple[str, int], dict[int, bytes]]
"""(group, partition) → offset → key of what a group owes to itself, though handlers of other keys
fail.
"""


def owed(service: Service, stores: Iterable[Store], poison: set[bytes]) -> Owed:
    """The messages that can be handled now: in partitions that their groups may read, of keys that
    do not fail.
    """
    debts: Owed = {}
    for store in stores:
        for partition_id, partition in store.state.partitions.items():
            first, end = partition.first_offset, partition.readable_offset
            healthy = {
                message.offset: message.key
                for message in read_log(store, partition_id, first, end)
                if type(message) is Stored and message.key not in poison
            }
            for group in service.groups:
                if group != SHARED and service.may_read(group, partition_id):
                    cursor = cursor_of(partition, group)
                    keys = {offset: key for offset, key in healthy.items() if offset >= cursor}
                    debts[group, partition_id] = keys
    return debts


def unhandled(debts: Owed, history: Sequence[Event]) -> Owed:
    """What is owed and was not handled, where there is any."""
    ended: dict[tuple[str, int], set[int]] = {who: set() for who in debts}
    for event in history:
        if type(event) is Ended and (event.group, event.partition_id) in ended:
            ended[event.group, event.partition_id].add(event.offset)
    left = {
        who: {offset: key for offset, key in sorted(keys.items()) if offset not in ended[who]}
        for who, keys in debts.items()
    }
    return {who: keys for who, keys in left.items() if keys}


def told(left: Owed) -> list[str]:
    """What was not handled in the time allowed, for people."""
    return [
        f"{group} did not handle {len(keys)} messages of partition "
        f"{partition_id}, as {min(keys)} of "
        f"{keys[min(keys)]!r}, while handlers of other keys failed"
        for (group, partition_id), keys in left.items()
    ]
