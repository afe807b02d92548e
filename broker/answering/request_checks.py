"""Checks the fields of acks and pulls: they must keep to their limits and name stored messages.
Pure.

Checks that a request comes from the owner of a pull lock.
"""

from __future__ import annotations

from ...protocol.errors import InvalidRequestError, OverloadedError, TokenUnknownError
from ...protocol.frames import Ack, ChangeParked, ListParked, Pull, PullShared, ReadParked, Release
from ...protocol.ids import MAX_I64
from ...protocol.limits import (
    IN_FLIGHT_MS_MAX,
    IN_FLIGHT_PER_SESSION_MAX,
    PULL_BYTES_MAX,
    PULL_WAIT_MS_MAX,
    TAG_BYTES_MAX,
    TAGS_WANTED_MAX,
)
from ...protocol.parked import FailingMessage
from ..partition.partition import ATTEMPTS_MAX, Group, HostedPartition
from ..partition.pull_lock import SHARED, check_holder, check_session, renew
from ..partition.state import BrokerState
from ..partition.suspects import BEGUN_MAX


def check_failed(request: Ack, partition: HostedPartition) -> None:
    """Raise InvalidRequestError or OverloadedError if the failed tries are not those of stored
    messages or are too many.
    """
    if len(request.failed) > ATTEMPTS_MAX:
        raise OverloadedError(f"more than {ATTEMPTS_MAX} failed messages in one ack")
    for offset, attempts in request.failed:
        if not (0 <= offset < partition.readable_offset and 1 <= attempts <= MAX_I64):
            raise InvalidRequestError(f"no failed message: offset {offset}, {attempts} tries")


def check_failing(failing: FailingMessage, partition: HostedPartition) -> None:
    """Raise InvalidRequestError if the failing message is not stored."""
    end = partition.readable_offset if failing.source is None else MAX_I64
    if not 0 <= failing.offset < end:
        raise InvalidRequestError(f"no failing message: offset {failing.offset}")


def check_begun(request: Ack, partition: HostedPartition) -> None:
    """Raise InvalidRequestError or OverloadedError if the begun messages are not stored or are too
    many.
    """
    if len(request.begun) > BEGUN_MAX:
        raise OverloadedError(f"more than {BEGUN_MAX} begun messages in one ack")
    for offset, crashes in request.begun:
        if not (0 <= offset < partition.readable_offset and 1 <= crashes <= MAX_I64):
            raise InvalidRequestError(f"no message to begin: offset {offset}, {crashes} crashes")


def check_held(request: Ack, partition: HostedPartition) -> None:
    """Raise InvalidRequestError or OverloadedError if a session cannot have the held messages with
    its handlers.
    """
    if sum(end - start for start, end in request.held) > IN_FLIGHT_PER_SESSION_MAX:
        raise OverloadedError(f"more than {IN_FLIGHT_PER_SESSION_MAX} held messages in one ack")
    if not 1 <= request.in_flight_ms <= IN_FLIGHT_MS_MAX:
        raise InvalidRequestError(
            f"in_flight_ms is from 1 to {IN_FLIGHT_MS_MAX}, not {request.in_flight_ms}"
        )
    for start, end in request.held:
        if not 0 <= start < end <= partition.readable_offset:
            raise InvalidRequestError(f"no held messages: offsets {start} to {end}")


def wanted_tags(request: Pull) -> list[bytes]:
    """Return the tags of a pull as UTF-8, or raise InvalidRequestError."""
    wanted = [tag.encode() for tag in request.tags]
    if len(wanted) > TAGS_WANTED_MAX or not all(0 < len(tag) <= TAG_BYTES_MAX for tag in wanted):
        raise InvalidRequestError(
            f"a pull has at most {TAGS_WANTED_MAX} tags of 1 to {TAG_BYTES_MAX} bytes"
        )
    return wanted


def check_shared(request: PullShared) -> int:
    """Return the number of bytes that the answer may have, or raise InvalidRequestError."""
    for name, value, high in (
        ("count_max", request.count_max, IN_FLIGHT_PER_SESSION_MAX),
        ("in_flight_ms", request.in_flight_ms, IN_FLIGHT_MS_MAX),
        ("bytes_max", request.bytes_max, MAX_I64),
    ):
        if not 1 <= value <= high:
            raise InvalidRequestError(f"{name} is from 1 to {high}, not {value}")
    if not 0 <= request.wait_ms <= PULL_WAIT_MS_MAX:
        raise InvalidRequestError(f"cannot wait {request.wait_ms} ms")
    return min(request.bytes_max, PULL_BYTES_MAX)


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
