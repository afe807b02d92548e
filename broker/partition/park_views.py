"""What operators see of a group's parked messages, and the changes that they ask for.  Pure."""

from __future__ import annotations

import msgspec

from ...protocol.errors import InvalidRequestError
from ...protocol.parked import (
    PARKED_PAGE_BYTES,
    PARKED_ROWS_MAX,
    RETRIED,
    ChangeParkedKey,
    ParkChange,
    ParkedList,
    ParkedView,
    ParkKey,
    ParkState,
    Redrive,
    Shift,
    Unpark,
)
from .parked import Parked
from .parked_key import ParkedKey


def listed_keys(
    parked: Parked, group: str, first: int, count: int, *, retrying: bool = False
) -> ParkedList:
    """
    Keys that operators know, from the `first`th on: up to `count`, and until they pass PARKED_PAGE_BYTES.

    Args:
        retrying: with what waits for retry, by the number of its tries.
    """
    views: list[ParkedView] = []
    size_bytes, more = 0, False
    for key, each in parked.some_keys(first, retrying=retrying):
        if len(views) == count or size_bytes >= PARKED_PAGE_BYTES:
            more = True
            break
        views.append(_view(parked.own, key, each))
        size_bytes += len(msgspec.json.encode(views[-1]))
    return ParkedList(
        partition_id=parked.own, group=group, frozen=parked.frozen, keys=views, more=more
    )


def _view(own: int, key: ParkKey, parked: ParkedKey) -> ParkedView:
    source, start, _ = next(parked.rows(0, 1), (own, -1, -1))
    tries = key if isinstance(key, int) else None
    begun = tries is not None and tries < 0
    return ParkedView(
        key_hex=key.hex() if isinstance(key, bytes) else None,
        state=ParkState.REDRIVING if begun else parked.state,
        messages=parked.messages,
        since_ms=parked.since_ms,
        failure=parked.failure,
        first_source=source,
        first_offset=start,
        tries=-tries - 1 if tries is not None and begun else tries,
        next_ms=min(parked.next_tries.values(), default=None),
    )


def key_of(key_hex: str | None) -> ParkKey:
    """The key that an operator names.  Raises InvalidRequestError: it is not hexadecimal."""
    try:
        return None if key_hex is None else bytes.fromhex(key_hex)
    except ValueError:
        raise InvalidRequestError(f"a key in hexadecimal, not {key_hex!r:.80}") from None


def operators_change(asked: ChangeParkedKey) -> list[ParkChange]:
    """
    The changes that an operator asks for.

    Raises:
        InvalidRequestError: the key is not hexadecimal, or there is no message to skip, or too many.
    """
    key = key_of(asked.key_hex)
    rows = asked.retry if asked.skip is None else asked.skip
    if rows is None:
        return [Redrive(key)]
    if not 1 <= len(rows) <= PARKED_ROWS_MAX:
        raise InvalidRequestError(
            f"{len(rows)} ranges of messages: from 1 to {PARKED_ROWS_MAX} in one request"
        )
    if asked.retry is None:
        return [Unpark(key, source, ((start, end),)) for source, start, end in rows]
    if key is not None or asked.skip is not None:
        raise InvalidRequestError(
            "retry is of dead letters, which have no key here, and is no skip"
        )
    return [Shift(None, RETRIED, source, ((start, end),)) for source, start, end in rows]
