"""The message that holds a consumer group up on a partition: it fails and is tried again, or its
handler does not return.  Pure.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .changes import FAILURE_KIND_CHARS_MAX, FAILURE_TEXT_CHARS_MAX, Failure

KEY_DIGEST_CHARS_MAX = 64

HANGS_MS = 10_000
"""A handler that runs for longer hangs; so does a program that holds a message for longer without
an ack.
"""
RUNNING = "running"
"""In place of the name of an error: the handler has not returned, or the program has not acked the
message.
"""


class FailingMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The oldest message of a partition that fails or hangs, as its owner tells the broker with the
    acks; the broker keeps it in memory.
    """

    offset: int
    key_digest: Annotated[str, Meta(max_length=KEY_DIGEST_CHARS_MAX)]
    """As logs name the key; the key itself may be private."""
    since_ms: int
    """When it failed first, or when the try began that hangs; milliseconds since 1970 by the
    consumer's calendar.
    """
    attempts: int
    """Tries that failed, those of earlier owners included."""
    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the class of its last error; RUNNING if it hangs."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the consumer."""
    at_ms: int
    """When it failed last, or when it was seen last that it hangs, as `since_ms`."""
    source: int | None = None
    """The partition that stores it, if it was parked and is handled again; None: it was not
    parked.
    """
    running_ms: int | None = None
    """It hangs: for how long it had been with the handler, or the program, at `at_ms`; None: it
    waits for its next try.
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
    """A message that failed `since_ms` for the first time, and as `failure` says for the last time;
    or hangs since then.
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
    """What is told of a message that hangs; `attempts` is the number of tries that failed
    before.
    """
    return Failure(RUNNING, what, client[:FAILURE_KIND_CHARS_MAX], at_ms, attempts)
