"""Idempotency keys: a broker remembers the key of a request, so that a repeat is stored once.
Pure.

    key                ──▶  producer id, at or above KEYED_IDS
    messages           ──▶  producer epoch: a digest of keys, values and properties in their order
    every partition         one batch of the request, with sequence 0; with sequence ASKED, the
                            broker only says whether it has the batch

A broker remembers the batch like a producer's, durably. A batch with the same id and epoch is its
repeat; one with another epoch contains other messages, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from ..errors import InvalidRequestError
from ..ids import KEYED_IDS
from ..limits import IDEMPOTENCY_KEY_CHARS_MAX
from .posted import PostedMessage

IDEMPOTENCY_KEY = "Idempotency-Key"
ASKED = 1
"""Sequence of a batch that is not to be stored: the broker answers that it is a duplicate, or
refuses it because of the gap.
"""


class KeyedProducer(NamedTuple):
    """The producer id and epoch under which the messages of a request are stored."""

    producer_id: int
    producer_epoch: int


def keyed_producer(key: str, messages: Sequence[PostedMessage]) -> KeyedProducer:
    """
    Return the producer id and epoch of a request with an idempotency key.

    Raises:
        InvalidRequestError: the key is empty, longer than IDEMPOTENCY_KEY_CHARS_MAX, or not visible
            ASCII.
    """
    if not 0 < len(key) <= IDEMPOTENCY_KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
        raise InvalidRequestError(
            f"an {IDEMPOTENCY_KEY} is 1 to {IDEMPOTENCY_KEY_CHARS_MAX} printable "
            f"characters of ASCII"
        )
    of_key = int.from_bytes(blake2b(key.encode(), digest_size=8).digest())
    digest = blake2b(digest_size=4)
    for message in messages:
        for part in message:
            digest.update(len(part).to_bytes(4))
            digest.update(part)
    return KeyedProducer(KEYED_IDS | of_key >> 1, int.from_bytes(digest.digest()))
