"""The message that holds a consumer group up on a partition: it fails, is tried again, and is not handled.  Pure."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .changes import FAILURE_KIND_CHARS_MAX, FAILURE_TEXT_CHARS_MAX, Failure

KEY_DIGEST_CHARS_MAX = 64


class FailingMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The oldest failing message of a partition, as its owner tells the broker with the acks; the broker keeps it in memory."""

    offset: int
    key_digest: Annotated[str, Meta(max_length=KEY_DIGEST_CHARS_MAX)]
    """As logs name the key; the key itself may be private."""
    since_ms: int
    """When it failed first, milliseconds since 1970 by the consumer's calendar."""
    attempts: int
    """Tries that failed, those of earlier owners included."""
    kind: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the class of its last error."""
    text: Annotated[str, Meta(max_length=FAILURE_TEXT_CHARS_MAX)]
    client: Annotated[str, Meta(max_length=FAILURE_KIND_CHARS_MAX)]
    """The name of the consumer."""
    at_ms: int
    """When it failed last, as `since_ms`."""
    source: int | None = None
    """The partition that stores it, if it was parked and is handled again; None: it was not parked."""


def failing_message(
    offset: int, failure: Failure, *, key_digest: str, since_ms: int, source: int | None = None
) -> FailingMessage:
    """A message that failed `since_ms` for the first time, and as `failure` says for the last time."""
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
    )
