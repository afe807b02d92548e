"""`keylane read`: prints messages of a subject, selected by time, offset and key, without a group,
locks or acks; without those of brokers that do not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from ...consumer import Reader
from ...protocol.clock import SystemClock
from ...protocol.errors import ConfigError, UnreachableError
from ...protocol.reading.instants import parse_ago_ms, parse_instant_ms
from ...protocol.text import parse_number
from ..connection import open_admin
from ..message_json import message_printer
from ..options import WAIT_S, OutputFormat, parse_time
from ..screen import end_without
from .consume import MESSAGE_LINE


def parse_bound(text: str) -> str | int | datetime:
    """
    Parse the value of --from or --to: an offset, a time, or a keyword or age, which is returned
    unchanged.

    Raises:
        ConfigError: the text is none of these.
    """
    if text in {"earliest", "latest"} or parse_ago_ms(text) is not None:
        return text
    offset = parse_number(text)
    if offset is not None:
        return offset
    return datetime.fromtimestamp(parse_time(text) / 1000, UTC)


def _check_order(
    start: str | int | datetime, stop: str | int | datetime | None, *, now_ms: int
) -> None:
    """Raise ConfigError if the output would end before it begins. An offset has no known time."""
    if stop is None or isinstance(start, int) is not isinstance(stop, int) or start == "earliest":
        return
    first, end = (
        bound
        if isinstance(bound, int)
        else now_ms
        if bound == "latest"
        else parse_instant_ms(bound, now_ms=now_ms)
        for bound in (start, stop)
    )
    if first > end:
        raise ConfigError("--from is after --to, so nothing would be printed: exchange them")


async def read_subject(
    meta: str,
    output: OutputFormat,
    subject: str,
    *,
    start: str,
    stop: str | None,
    key: bytes | None,
    tags: list[str] | None,
    partition: int | None,
    limit: int | None,
    follow: bool,
    from_copies: bool,
) -> None:
    """
    Print messages until all have been read, `limit` have been printed, or the command is
    interrupted. The exit status is 1 if a partition could not be read.

    Raises:
        UnreachableError: no broker answers; with `partition` or `follow`, one of them does not.
    """
    first = parse_bound(start)
    end = None if stop is None else parse_bound(stop)
    _check_order(first, end, now_ms=SystemClock().wall_ms())
    format_message = message_printer(output, MESSAGE_LINE)

    def reader_without(unread: Collection[int]) -> Reader[bytes]:
        return Reader(
            meta,
            subject,
            start=first,
            stop=end,
            key=key,
            partition=partition,
            tags=tags or None,
            follow=follow,
            from_copies=from_copies,
            wait_s=WAIT_S.get(),
            _left_out=unread,
        )

    unread: dict[int, str] = {}
    async with AsyncExitStack() as stack:
        try:
            reader = await stack.enter_async_context(reader_without(unread))
        except UnreachableError:
            if partition is not None or follow:
                raise
            from ...admin.views import silent_partitions  # only who misses a broker loads it

            async with open_admin(meta) as admin:
                described = await admin.describe_subject(subject)
            unread = silent_partitions(described, key=key)
            if not unread or len(unread) == len(described.partitions):
                raise
            reader = await stack.enter_async_context(reader_without(unread))
        printed = 0
        async for message in reader:
            sys.stdout.write(format_message(message) + "\n")
            printed += 1
            if follow or printed % 1_000 == 0:
                sys.stdout.flush()
            if printed == limit:
                break
    sys.stdout.flush()
    end_without(unread)
