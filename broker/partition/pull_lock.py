"""The right to pull and ack a partition for a consumer group: a fence that only rises, and a lock
that expires. Pure.

    token < fence     FENCED: a newer owner exists              same token, same session: the owner
    token > fence     unknown: acquire first                    same token, other session: FENCED

The fence makes handling safe: it is durable before its owner reads the cursor. The lock only shows
the owner to people and keeps waiting fair. If the lock has expired, the owner's next call takes it
again, because no newer owner exists.

A shared group has one token for all its sessions; the session of its lock is SHARED.

Invariants
    The fence never falls. Once a higher token is accepted, every call with a lower token is
    refused.

Source: Kleppmann, "How to do distributed locking" (a token checked by the resource); QMQ's pull
lock, which has neither token nor memory over a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import FencedError, InvalidRequestError, TokenUnknownError
from ...protocol.ids import MAX_I64
from ...protocol.limits import TOKEN_STEP_MAX, TTL_MS_DEFAULT, TTL_MS_MAX
from ...protocol.routing import ConsumeStrategy

SESSION_CHARS_MAX = 64
RESET = "=reset"
"""The session of a token that an operator's reset has presented. No consumer has this session."""
RESET_SHARED = "=reset*"
"""The session of a token that an operator's reset has presented for a shared group."""
SHARED = "*"
"""The session of a shared group's token, which belongs to every session of the group."""


def operator_session(strategy: ConsumeStrategy) -> str:
    """Return the session of a token that an operator's reset presents."""
    return RESET_SHARED if strategy is ConsumeStrategy.SHARED else RESET


@dataclass(slots=True)
class PullLock:
    """The fence and the lock of a consumer group on a partition."""

    fence: int = 0
    """The highest token that was presented, or 0 before the first."""
    session: str = ""
    """The session that acquired this token."""
    ttl_ms: int = TTL_MS_DEFAULT
    expires_at_ms: int = 0
    """The time at which the lock expires, in milliseconds of the broker's boot clock."""
    released: bool = False
    """True if the owner has released the lock, and has to acquire again."""

    def holder(self, now_ms: int) -> str | None:
        """Return the session that holds the lock now, or None."""
        held = not self.released and not self.shared and now_ms < self.expires_at_ms
        return self.session if held else None

    @property
    def known_ttl_ms(self) -> int:
        """The ttl in milliseconds of the session that acquired the token, or 0 if no session has
        acquired it since the broker's start.
        """
        return self.ttl_ms if self.expires_at_ms else 0

    @property
    def shared(self) -> bool:
        """True if the token belongs to every session of the group."""
        return self.session == SHARED

    @property
    def by_operator(self) -> bool:
        """True if the token was presented by an operator's reset."""
        return self.session in {RESET, RESET_SHARED}

    @property
    def strategy(self) -> ConsumeStrategy:
        """The consume strategy under which this token was acquired."""
        shared = self.session in {SHARED, RESET_SHARED}
        return ConsumeStrategy.SHARED if shared else ConsumeStrategy.EXCLUSIVE


def decide_acquire(lock: PullLock, *, token: int, session: str, ttl_ms: int) -> bool:
    """
    Decide whether a session may acquire with `token`.

    Returns:
        True if the fence has to be raised to `token`, False if this session has raised it already.

    Raises:
        FencedError: the fence is higher, or another session has this token.
        InvalidRequestError: the token, the session or the ttl is impossible.
        TokenUnknownError: the token is more than TOKEN_STEP_MAX above the fence, so it was never
            granted.
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
    """Check the name of a session, or raise InvalidRequestError."""
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
    """Raise the fence to a token that was just accepted or read from the log."""
    assert token >= lock.fence
    lock.fence = token
    lock.session = session
    lock.expires_at_ms = 0
    lock.released = False


def take(lock: PullLock, *, ttl_ms: int, now_ms: int) -> None:
    """Give the lock to the owner for `ttl_ms`."""
    lock.ttl_ms = ttl_ms
    lock.expires_at_ms = now_ms + ttl_ms
    lock.released = False


def renew(lock: PullLock, *, now_ms: int) -> None:
    """Extend the lock by its ttl, because the owner made a call."""
    lock.expires_at_ms = now_ms + lock.ttl_ms


def release(lock: PullLock) -> None:
    """Free the lock, because the owner has given it back."""
    lock.released = True
