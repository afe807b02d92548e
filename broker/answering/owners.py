"""Checks that a request comes from the owner of a pull lock. Pure."""

from __future__ import annotations

from ...protocol.errors import TokenUnknownError
from ...protocol.frames import Ack, ChangeParked, ListParked, Pull, PullShared, ReadParked, Release
from ..partition.partition import Group, HostedPartition
from ..partition.pull_lock import SHARED, check_holder, check_session, renew
from ..partition.state import BrokerState

OwnersRequest = Pull | PullShared | Ack | Release | ChangeParked | ListParked | ReadParked
"""The requests that only the owner of a pull lock may send."""


def owned(state: BrokerState, request: OwnersRequest, now_ms: int) -> tuple[HostedPartition, Group]:
    """
    Check that a request comes from the owner of the pull lock, and renew the lock.

    Args:
        now_ms: the time of the boot clock in this turn of the event loop.

    Returns:
        The partition and the group.
    """
    session = request.session
    partition = state.partition(request.partition_id)
    if partition.fences_lost:
        partition.check_owners()
    group = partition.groups.get(request.group)
    if group is None:
        raise TokenUnknownError("the group never acquired this partition", token=request.token)
    lock, kind = group.lock, type(request)
    shared = lock.session == SHARED
    if shared or session != lock.session or not lock.fence:
        check_session(session)  # the session that acquired the lock was checked then
    # The token of a shared group belongs to all its sessions, but an exclusive pull never comes
    # from one of them.
    of_all = kind is PullShared or (shared and kind is not Pull)
    check_holder(lock, token=request.token, session=SHARED if of_all else session)
    renew(lock, now_ms=now_ms)
    if shared:
        group.handed_out().hear(session, ttl_ms=lock.ttl_ms, now_ms=now_ms)
    return partition, group


def hold(group: Group, request: Pull, until_ms: int) -> None:
    """Renew the pull lock for a pull that waits until `until_ms`, if its sender is still the
    owner.
    """
    lock = group.lock
    if lock.fence == request.token and lock.session == request.session:
        renew(lock, now_ms=until_ms)
