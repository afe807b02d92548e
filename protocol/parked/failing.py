"""The message that holds up a consumer group on a partition, because it fails and is tried again,
or its handler does not return. Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .changes import FAILURE_KIND_CHARS_MAX, FAILURE_TEXT_CHARS_MAX, Failure

KEY_DIGEST_CHARS_MAX = 64

HANGS_MS = 10_000
"""Milliseconds after which a handler that has not returned counts as hanging; so does a program
that has not acked a message.
"""
RUNNING = "running"
"""Kind of a message that hangs: the handler has not returned, or the program has not acked it."""


class FailingMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The oldest message of a partition that fails or hangs; its owner reports it with the acks,
    and the broker keeps it in memory.
    """

    offset: int
    key_digest: Annotated[str, Meta(max_length=KEY_DIGEST_CHARS_MAX)]
    """Name of the key in logs; the key itself may be private."""
    since_ms: int
    """Time of the first failure, or of the beginning of the try that hangs; milliseconds since 1970
    by the consumer's calendar.
    """
    attempts: int
    """Number of failed tries, including those of earlier owners."""
    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the class of its last error; RUNNING if it hangs."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """Name of the consumer."""
    at_ms: int
    """Time of the last failure, or time when it was last seen to hang; same unit as `since_ms`."""
    source: int | None = None
    """Partition that stores it, if it was parked and is handled again; None: it was not parked."""
    running_ms: int | None = None
    """Milliseconds that a hanging message had been with the handler or the program at `at_ms`;
    None: it waits for its next try.
    """


def failing_message(
    offset: int,
    failure: Failure,
    *,
    key_digest: str,
    since_ms: int,
    source: int | None = None,
    running_ms: int | None = None,
) -> FailingMessage:
    """Return a message that failed first at `since_ms`, and last as described by `failure`; or that
    has been hanging since then.
    """
    return FailingMessage(
        offset=offset,
        key_digest=key_digest,
        since_ms=since_ms,
        attempts=failure.attempts,
        kind=failure.kind,
        text=failure.text,
        client=failure.client,
        at_ms=failure.at_ms,
        source=source,
        running_ms=running_ms,
    )


def running_of(what: str, *, client: str, at_ms: int, attempts: int) -> Failure:
    """Return the record of a message that hangs; `attempts` is the number of earlier failed
    tries.
    """
    return Failure(RUNNING, what, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
