"""The fence only rises, and the lock belongs to the newest owner."""

from __future__ import annotations

import pytest

from keylane.broker.partition.pull_lock import (
    PullLock,
    check_holder,
    decide_acquire,
    grant_lock,
    raise_fence,
    release_lock,
    renew,
)
from keylane.protocol.errors import FencedError, InvalidRequestError, TokenUnknownError
from keylane.protocol.ids import MAX_I64


def held(token: int = 5, session: str = "s1") -> PullLock:
    lock = PullLock()
    raise_fence(lock, token=token, session=session)
    grant_lock(lock, ttl_ms=100, now_ms=1000)
    return lock


def test_higher_token_raises_the_fence():
    """A newer grant takes the lock at once, also from a session that holds it."""
    assert decide_acquire(held(), token=6, session="s2", ttl_ms=100)


def test_same_owner_takes_the_lock_again():
    """Acquiring again under the same token and session needs no new fence."""
    assert not decide_acquire(held(), token=5, session="s1", ttl_ms=100)


@pytest.mark.parametrize(("token", "session"), [(4, "s1"), (5, "s2")])
def test_session_that_does_not_hold_the_token_is_fenced(token, session):
    """A lower token, and the same token from another session, are refused."""
    lock = held()
    with pytest.raises(FencedError):
        decide_acquire(lock, token=token, session=session, ttl_ms=100)
    with pytest.raises(FencedError):
        check_holder(lock, token=token, session=session)


def test_token_from_the_future_is_unknown():
    """A pull or ack under a token that never acquired is refused."""
    with pytest.raises(TokenUnknownError):
        check_holder(held(), token=6, session="s1")
    with pytest.raises(TokenUnknownError):
        check_holder(PullLock(), token=1, session="s1")


def test_lock_expires_and_comes_back():
    """After its ttl no session holds the lock; the owner's next call takes it again, because no
    newer owner came.
    """
    lock = held()
    assert lock.holder_at(1099) == "s1"
    assert lock.holder_at(1100) is None

    check_holder(lock, token=5, session="s1")
    renew(lock, now_ms=2000)
    assert lock.holder_at(2099) == "s1"


def test_released_lock_has_to_be_acquired_again():
    """After a release the owner's pulls are refused until it acquires."""
    lock = held()
    release_lock(lock)
    assert lock.holder_at(1001) is None
    with pytest.raises(FencedError):
        check_holder(lock, token=5, session="s1")

    assert not decide_acquire(lock, token=5, session="s1", ttl_ms=100)
    grant_lock(lock, ttl_ms=100, now_ms=1000)
    check_holder(lock, token=5, session="s1")


@pytest.mark.parametrize(
    ("token", "session", "ttl_ms"),
    [
        (0, "s", 100),
        (-1, "s", 100),
        (MAX_I64 + 1, "s", 100),
        (9, "", 100),
        (9, "s" * 65, 100),
        (9, "s", 0),
        (9, "s", 10**9),
    ],
)
def test_impossible_requests_are_refused(token, session, ttl_ms):
    """A token, session or ttl out of its range is a typed error and changes nothing."""
    lock = held()
    with pytest.raises(InvalidRequestError):
        decide_acquire(lock, token=token, session=session, ttl_ms=ttl_ms)

    assert lock == held()
