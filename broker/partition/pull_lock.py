"""Who may pull and ack a partition for one consumer group: a fence that only rises, and a lock that expires.  Pure.

    token < fence     FENCED: a newer owner exists              same token, same session: the owner
    token > fence     unknown: acquire first                    same token, other session: FENCED

The fence is the safety: it is durable before the owner it names reads the cursor.  The lock is for people and for
fair waiting: the owner's next call takes an expired or lost lock again, because there is no newer owner.

A shared group has one token for all its sessions; its lock is in the name of SHARED.

Invariants
    The fence never falls.  From the moment a higher token is decided on, every call of a lower one is refused.

Source: Kleppmann, "How to do distributed locking" (a token checked by the resource); QMQ's pull lock, which has
neither token nor memory over a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...protocol.errors import FencedError, InvalidRequestError, TokenUnknownError
from ...protocol.ids import MAX_I64
from ...protocol.limits import TOKEN_STEP_MAX, TTL_MS_DEFAULT, TTL_MS_MAX
from ...protocol.routing import ConsumeStrategy

SESSION_CHARS_MAX = 64
RESET = "=reset"
"""The session of a token that an operator brought to set a cursor; no consumer has such a name."""
RESET_SHARED = "=reset*"
"""The same, for a shared group."""
SHARED = "*"
"""The session of a shared group's token, which belongs to every session of the group."""


def operator_session(strategy: ConsumeStrategy) -> str:
    """The session of a token that an operator brought."""
    return RESET_SHARED if strategy is ConsumeStrategy.SHARED else RESET


@dataclass(slots=True)
class PullLock:
    """The fence of one (partition, consumer group) and who holds the lock."""

    fence: int = 0
    """The highest token seen; 0 before the first."""
    session: str = ""
    """The session that acquired it."""
    ttl_ms: int = TTL_MS_DEFAULT
    expires_at_ms: int = 0
    """By the broker's boot clock."""
    released: bool = False
    """Given back by its owner, who has to acquire again."""

    def holder(self, now_ms: int) -> str | None:
        """The session that holds the lock now."""
        held = not self.released and not self.shared and now_ms < self.expires_at_ms
        return self.session if held else None

    @property
    def known_ttl_ms(self) -> int:
        """The ttl of the session that brought the token; 0 if that was before the broker's start, or nobody did."""
        return self.ttl_ms if self.expires_at_ms else 0

    @property
    def shared(self) -> bool:
        """The token is that of every session of the group."""
        return self.session == SHARED

    @property
    def by_operator(self) -> bool:
        """The token was brought to set the cursor."""
        return self.session in {RESET, RESET_SHARED}

    @property
    def strategy(self) -> ConsumeStrategy:
        """The consume strategy under which this token was acquired."""
        shared = self.session in {SHARED, RESET_SHARED}
        return ConsumeStrategy.SHARED if shared else ConsumeStrategy.EXCLUSIVE


def decide_acquire(lock: PullLock, *, token: int, session: str, ttl_ms: int) -> bool:
    """
    True if the fence has to be raised to `token`, False if it stands there for this session already.

    Raises:
        FencedError: a higher token has been seen, or this one from another session.
        InvalidRequestError: impossible token, session or ttl.
        TokenUnknownError: more than TOKEN_STEP_MAX above the fence: it was never granted.
    """
    if not 1 <= token <= MAX_I64:
        raise InvalidRequestError(f"not a fencing token: {token}")
    if session != SHARED:
        check_session(session)
    if not 1 <= ttl_ms <= TTL_MS_MAX:
        raise InvalidRequestError(f"not a ttl: {ttl_ms} ms")
    if token > lock.fence + TOKEN_STEP_MAX:
        raise TokenUnknownError(
            "a token from the future was never granted", token=token, current_token=lock.fence
        )
    if token > lock.fence:
        return True
    _check_owner(lock, token=token, session=session)
    return False


def check_session(session: str) -> None:
    """Let the name of one session through.  Raises InvalidRequestError."""
    if not 1 <= len(session) <= SESSION_CHARS_MAX or session == SHARED:
        raise InvalidRequestError(f"a session has 1 to {SESSION_CHARS_MAX} characters")


def check_holder(lock: PullLock, *, token: int, session: str) -> None:
    """
    Let a pull, an ack or a release of the owner through.

    Raises:
        FencedError: a higher token has been seen, this one from another session, or it was released.
        TokenUnknownError: the token is higher than any acquired here.
    """
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
    """Apply a fence, decided now or read from the log."""
    assert token >= lock.fence
    lock.fence = token
    lock.session = session
    lock.expires_at_ms = 0
    lock.released = False


def take(lock: PullLock, *, ttl_ms: int, now_ms: int) -> None:
    """The owner takes the lock for `ttl_ms`."""
    lock.ttl_ms = ttl_ms
    lock.expires_at_ms = now_ms + ttl_ms
    lock.released = False


def renew(lock: PullLock, *, now_ms: int) -> None:
    """The owner made a call: the lock is held for another ttl."""
    lock.expires_at_ms = now_ms + lock.ttl_ms


def release(lock: PullLock) -> None:
    """The owner gives the lock back."""
    lock.released = True
