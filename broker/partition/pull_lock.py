"""Decides who may pull and ack a partition for a consumer group, using a fence that only rises and
a lock that expires. Pure.

    token < fence     FENCED: there is a newer owner            same token, same session: the owner
    token > fence     unknown: acquire first                    same token, other session: FENCED

The fence makes handling safe, because it is durable before the owner reads the cursor. The lock
only shows the owner to operators. If it has expired, the owner's next call renews it, because there
is no newer owner.

A shared group has one token for all sessions, and the session of its lock is SHARED.

An owner that cannot reach a metaserver may ask for a promise:

    promised ──▶ higher token waits, and ends the promise ──▶ let in when the promise has run out,
                                                              or the owner has released

Invariants
    The fence never falls. After a higher token was accepted, every call with a lower one is
    refused. No higher token is accepted while a promise lasts, also after a restart: a promise is
    given once its record is durable, and lasts from the start of the broker that reads it.

See Kleppmann, "How to do distributed locking" (a token that the resource checks), and QMQ's pull
lock, which has no token and does not survive a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import FencedError, InvalidRequestError, TokenUnknownError
from ...protocol.ids import MAX_I64
from ...protocol.limits import TOKEN_STEP_MAX, TTL_MS_DEFAULT, TTL_MS_MAX
from ...protocol.routing import ConsumeStrategy

SESSION_CHARS_MAX = 64
RESET = "=reset"
"""The session of a token presented by an operator's reset. No consumer has this session."""
RESET_SHARED = "=reset*"
"""The session of a token presented by an operator's reset of a shared group."""
SHARED = "*"
"""The session that is stored with a shared group's token, which all sessions of the group use."""


def operator_session(strategy: ConsumeStrategy) -> str:
    """Return the session that an operator's reset uses with its token."""
    return RESET_SHARED if strategy is ConsumeStrategy.SHARED else RESET


@dataclass(slots=True)
class PullLock:
    """The fence and the lock of a consumer group on a partition."""

    fence: int = 0
    """The highest token that was accepted, or 0."""
    session: str = ""
    """The session that acquired the token."""
    ttl_ms: int = TTL_MS_DEFAULT
    expires_at_ms: int = 0
    """When the lock expires, in milliseconds since the broker's machine was booted."""
    released: bool = False
    """True if the owner has released the lock, and must acquire it again."""
    promise_ms: int = 0
    """The longest promise to the owner that is recorded, in milliseconds; 0: none."""
    promised_until_ms: int = 0
    """When the last promise of this broker's run ends, in milliseconds since boot."""
    waiting_token: int = 0
    """The highest token that waits for the end of a promise."""

    def holder_at(self, now_ms: int) -> str | None:
        """Return the session that holds the lock now, or None."""
        is_held = not self.released and not self.is_shared and now_ms < self.expires_at_ms
        return self.session if is_held else None

    @property
    def known_ttl_ms(self) -> int:
        """The ttl of the session that acquired the token, in milliseconds; 0 if it was acquired
        before the broker started.
        """
        return self.ttl_ms if self.expires_at_ms else 0

    @property
    def is_shared(self) -> bool:
        """True if all sessions of the group use the token."""
        return self.session == SHARED

    @property
    def is_operators(self) -> bool:
        """True if the token was presented by an operator's reset."""
        return self.session in {RESET, RESET_SHARED}

    @property
    def strategy(self) -> ConsumeStrategy:
        """The consume strategy with which the token was acquired."""
        is_shared = self.session in {SHARED, RESET_SHARED}
        return ConsumeStrategy.SHARED if is_shared else ConsumeStrategy.EXCLUSIVE


def decide_acquire(lock: PullLock, *, token: int, session: str, ttl_ms: int) -> bool:
    """
    Decide whether a session may acquire with `token`.

    Returns:
        True if the fence must be raised to `token`, False if this session has already raised it.

    Raises:
        FencedError: the fence is higher, or another session has this token.
        InvalidRequestError: the token, the session or the ttl is invalid.
        TokenUnknownError: the token is more than TOKEN_STEP_MAX above the fence, so it cannot have
            been granted.
    """
    if not 1 <= token <= MAX_I64:
        raise InvalidRequestError(f"not a fencing token: {token}")
    if session != SHARED:
        check_session(session)
    if not 1 <= ttl_ms <= TTL_MS_MAX:
        raise InvalidRequestError(f"not a ttl: {ttl_ms} ms")
    if token > lock.fence + TOKEN_STEP_MAX:
        raise TokenUnknownError(
            "the token is too high to have been granted", token=token, current_token=lock.fence
        )
    if token > lock.fence:
        return True
    _check_owner(lock, token=token, session=session)
    return False


def check_session(session: str) -> None:
    """Check the name of a session. Raises InvalidRequestError."""
    if not 1 <= len(session) <= SESSION_CHARS_MAX or session == SHARED:
        raise InvalidRequestError(f"a session has 1 to {SESSION_CHARS_MAX} characters")


def check_holder(lock: PullLock, *, token: int, session: str) -> None:
    """
    Check that a pull, an ack or a release comes from the owner.

    Raises:
        FencedError: the fence is higher, another session has this token, or the lock was released.
        TokenUnknownError: the token is above the fence.
    """
    if token == lock.fence and session == lock.session and not lock.released:
        return
    if token > lock.fence:
        raise TokenUnknownError(
            "the token was never acquired here", token=token, current_token=lock.fence
        )
    _check_owner(lock, token=token, session=session)
    if lock.released:
        raise FencedError("the pull lock was released", token=token)


def _check_owner(lock: PullLock, *, token: int, session: str) -> None:
    if token < lock.fence:
        raise FencedError(token=token, current_token=lock.fence)
    if session != lock.session:
        raise FencedError("another session has this token", token=token, current_token=lock.fence)


def raise_fence(lock: PullLock, *, token: int, session: str) -> None:
    """Raise the fence to a token that was accepted or read from the log."""
    assert token >= lock.fence
    lock.fence = token
    lock.session = session
    lock.expires_at_ms = 0
    lock.released = False
    lock.promise_ms = lock.promised_until_ms = lock.waiting_token = 0


def grant_lock(lock: PullLock, *, ttl_ms: int, now_ms: int) -> None:
    """Grant the lock to the owner for `ttl_ms`."""
    lock.ttl_ms = ttl_ms
    lock.expires_at_ms = now_ms + ttl_ms
    lock.released = False


def renew(lock: PullLock, *, now_ms: int) -> None:
    """Extend the lock to a full ttl from now, because the owner made a call."""
    lock.expires_at_ms = now_ms + lock.ttl_ms


def decide_promise(lock: PullLock, *, token: int, wanted_ms: int, now_ms: int) -> int:
    """
    Promise the owner that no higher token is let in, unless one waits, and renew the lock.

    Returns:
        The length of the promise in milliseconds, which must be recorded before it is answered; 0
        if there is none.
    """
    if token != lock.fence or lock.released or lock.waiting_token > token or lock.is_shared:
        return 0
    promise_ms = min(wanted_ms, lock.ttl_ms)
    renew(lock, now_ms=now_ms)
    lock.promised_until_ms = max(lock.promised_until_ms, now_ms + promise_ms)
    lock.promise_ms = max(lock.promise_ms, promise_ms)
    return promise_ms


def promise_left_ms(lock: PullLock, *, now_ms: int, opened_ms: int) -> int:
    """
    Return how long no higher token is let in.

    Args:
        opened_ms: when this broker opened its data folder; recorded promises last from then on.
    """
    if lock.released or not lock.promise_ms:
        return 0
    return max(0, max(lock.promised_until_ms, opened_ms + lock.promise_ms) - now_ms)


def release_lock(lock: PullLock) -> None:
    """Release the lock at the request of the owner."""
    lock.released = True
