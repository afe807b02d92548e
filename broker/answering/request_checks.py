"""Validates acks and pulls: their fields must be within the limits and refer to stored messages,
and the sender must own the pull lock. Pure.
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
    """
    Check the failed messages of an ack.

    Raises:
        InvalidRequestError: one of them is not stored, or its number of attempts is invalid.
        OverloadedError: there are too many.
    """
    if len(request.failed) > ATTEMPTS_MAX:
        raise OverloadedError(f"more than {ATTEMPTS_MAX} failed messages in one ack")
    for offset, attempts in request.failed:
        if not (0 <= offset < partition.readable_offset and 1 <= attempts <= MAX_I64):
            raise InvalidRequestError(
                f"invalid failed message: offset {offset}, {attempts} attempts"
            )


def check_failing(failing: FailingMessage, partition: HostedPartition) -> None:
    """Raise InvalidRequestError if the failing message, or one of the others that it names, is not
    stored.
    """
    for each in (failing, *failing.others):
        end = partition.readable_offset if each.source is None else MAX_I64
        if not 0 <= each.offset < end or (each.others and each is not failing):
            raise InvalidRequestError(f"invalid failing message: offset {each.offset}")


def check_begun(request: Ack, partition: HostedPartition) -> None:
    """
    Check the messages whose handling is about to begin once an ack is durable.

    Raises:
        InvalidRequestError: one of them is not stored, or its number of crashes is invalid.
        OverloadedError: there are too many.
    """
    if len(request.begun) > BEGUN_MAX:
        raise OverloadedError(f"more than {BEGUN_MAX} begun messages in one ack")
    for offset, crashes in request.begun:
        if not (0 <= offset < partition.readable_offset and 1 <= crashes <= MAX_I64):
            raise InvalidRequestError(f"invalid begun message: offset {offset}, {crashes} crashes")


def check_held(request: Ack, partition: HostedPartition) -> None:
    """
    Check the messages that an ack keeps in flight.

    Raises:
        InvalidRequestError: one of them is not stored, or the time is invalid.
        OverloadedError: there are too many.
    """
    if sum(end - start for start, end in request.held) > IN_FLIGHT_PER_SESSION_MAX:
        raise OverloadedError(f"more than {IN_FLIGHT_PER_SESSION_MAX} held messages in one ack")
    if not 1 <= request.in_flight_ms <= IN_FLIGHT_MS_MAX:
        raise InvalidRequestError(
            f"in_flight_ms is from 1 to {IN_FLIGHT_MS_MAX}, not {request.in_flight_ms}"
        )
    for start, end in request.held:
        if not 0 <= start < end <= partition.readable_offset:
            raise InvalidRequestError(f"invalid held messages: offsets {start} to {end}")


def wanted_tags(request: Pull) -> list[bytes]:
    """Return the tags of a pull, encoded as UTF-8. Raises InvalidRequestError."""
    wanted = [tag.encode() for tag in request.tags]
    if len(wanted) > TAGS_WANTED_MAX or not all(0 < len(tag) <= TAG_BYTES_MAX for tag in wanted):
        raise InvalidRequestError(
            f"a pull has at most {TAGS_WANTED_MAX} tags of 1 to {TAG_BYTES_MAX} bytes"
        )
    return wanted


def check_shared(request: PullShared) -> int:
    """Check the limits of a shared pull, and return the maximum size of the reply in bytes. Raises
    InvalidRequestError.
    """
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


def check_owner(
    state: BrokerState, request: OwnersRequest, now_ms: int
) -> tuple[HostedPartition, Group]:
    """
    Check that a request comes from the owner of the pull lock, and renew the lock.

    Args:
        now_ms: the current time, in milliseconds since boot.

    Returns:
        The partition and the group.
    """
    session = request.session
    partition = state.partition(request.partition_id)
    if partition.fences_lost:
        partition.check_fences_known()
    group = partition.groups.get(request.group)
    if group is None:
        raise TokenUnknownError("the group has never acquired this partition", token=request.token)
    lock, kind = group.lock, type(request)
    shared = lock.session == SHARED
    if shared or session != lock.session or not lock.fence:
        check_session(session)  # the lock's own session was checked when it acquired the lock
    # All sessions of a shared group have the same token, but they never send exclusive pulls.
    is_shared_request = kind is PullShared or (shared and kind is not Pull)
    check_holder(lock, token=request.token, session=SHARED if is_shared_request else session)
    renew(lock, now_ms=now_ms)
    if shared:
        group.current_in_flight().renew_session(session, ttl_ms=lock.ttl_ms, now_ms=now_ms)
    return partition, group


def extend_lock(group: Group, request: Pull, deadline_ms: int) -> None:
    """Extend the pull lock for a pull that waits until `deadline_ms`, if its sender still owns the
    lock.
    """
    lock = group.lock
    if lock.fence == request.token and lock.session == request.session:
        renew(lock, now_ms=deadline_ms)
