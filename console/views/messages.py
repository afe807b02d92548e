"""The messages of a subject: by time, offset and key, and those that come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from datetime import UTC, datetime
from heapq import nlargest
from typing import NamedTuple, TypedDict, cast

import msgspec

from ...admin import SubjectDescription
from ...admin.views import silent_partitions
from ...consumer import Reader
from ...protocol.errors import ConfigError, InvalidRequestError, KeylaneError, OverloadedError
from ...protocol.message import Message
from ...protocol.reading.instants import parse_ago_ms
from ...protocol.text import format_time, key_text, parse_number, printable
from ...rpc.environment import Environment
from ..feed import Feed
from ..live import encode_event
from ..page import Page, Sentence, href
from ..shown import VALUE_BYTES_SHOWN, Form, parse_hex, preview_text, value_text
from .subjects import ROOT, tabs

SHOWN_MAX = 50
"""How many messages are on a page."""
NEWEST_READ_MAX = 1_000
"""How many messages are kept while the newest ones are looked for."""
POSITIONS_MAX = 200
"""How many partitions the address of the next page can name."""
READ_S = 4.0
"""How long a page waits for messages, in seconds: a key may be far apart."""
TAIL_PERIOD_S = 0.5
TAIL_ALIVE_S = 5.0
"""How long a tail without messages is quiet, in seconds."""
TAIL_MESSAGES_MAX = 25
"""How many messages a tail shows in each TAIL_PERIOD_S; others are counted."""
TAILS_MAX = 20
"""The maximum number of open tails of a metaserver."""
FORMS: tuple[Form, ...] = ("auto", "json", "text", "hex")


class ShownMessage(TypedDict):
    """A message, as a page shows it."""

    key: str
    place: str
    sent: str
    preview: str
    value: str
    note: str
    properties: str


def shown_message(message: Message[bytes], form: Form) -> ShownMessage:
    """Return what a page shows of a message."""
    text, shown_as = value_text(message.value, form)
    size = len(message.value)
    cut = f", the first {VALUE_BYTES_SHOWN} of them" if size > VALUE_BYTES_SHOWN else ""
    try:
        properties = ", ".join(
            f"{printable(name)} = {_property_text(value)}"
            for name, value in message.properties.items()
        )
    except KeylaneError as error:
        properties = error.message
    return ShownMessage(
        key=key_text(message.key),
        place=f"partition {message.partition_id}, offset {message.offset}",
        sent=f"{format_time(message.sent_at_ns // 1_000_000)[:23].replace('T', ' ')} UTC",
        preview=preview_text(message.value),
        value=text,
        note=f"{size} bytes{cut}, as {shown_as}",
        properties=properties,
    )


def _property_text(value: str | bytes) -> str:
    return printable(value if isinstance(value, str) else value.decode(errors="backslashreplace"))


class Found(NamedTuple):
    """What was read."""

    messages: list[Message[bytes]]
    positions: dict[int, int]
    """Where the next messages begin, by partition."""
    has_more: bool
    """True if there may be more messages."""
    unknown: tuple[str, ...]
    """Why messages of some partitions are missing."""


class Asked(msgspec.Struct, frozen=True):
    """Which messages a page asks for."""

    start: str = "newest"
    partition: int | None = None
    key: bytes | None = None
    form: Form = "auto"


def read_query(query: Mapping[str, str]) -> Asked:
    """Return what the address of a page asks for. Raises ConfigError."""
    form = query.get("form", "auto")
    partition = query.get("partition", "").strip()
    if partition and parse_number(partition) is None:
        raise ConfigError(f"a partition is a number, not {partition!r:.40}")
    key = query.get("key", "")
    try:
        key_bytes = parse_hex(key) if query.get("key_as") == "hex" else key.encode()
    except InvalidRequestError as error:
        raise ConfigError(f"the key is {error.message}") from None
    return Asked(
        start=query.get("start", "newest").strip() or "newest",
        partition=parse_number(partition) if partition else None,
        key=key_bytes or None,
        form=form if form in FORMS else "auto",
    )


async def read(
    feed: Feed, subject: str, asked: Asked, *, address: str, environment: Environment
) -> Found:
    """Read up to SHOWN_MAX messages, without those of brokers that do not answer."""
    described = await feed.subject(subject, age_s=0.0)  # which brokers answer now
    silent = silent_partitions(described, key=asked.key, partition_id=asked.partition)
    unknown = [*silent.values()]
    found: list[Message[bytes]] = []
    is_whole = False
    reader = Reader[bytes](
        address,
        subject,
        start=cast(str, _start(described, asked)),
        key=asked.key,
        partition=asked.partition,
        _environment=environment,
        _left_out=silent,
    )
    is_newest = asked.start == "newest"
    try:
        async with asyncio.timeout(READ_S), reader:
            async for message in reader:
                found.append(message)
                if is_newest and len(found) > NEWEST_READ_MAX:
                    found = _newest(found)
                elif not is_newest and len(found) == SHOWN_MAX:
                    break
            else:
                is_whole = True
    except TimeoutError:
        if not reader.positions:
            unknown.append(f"brokers have not answered within {READ_S:g} s")
    if is_newest:
        found = _newest(found)
    return Found(found, reader.positions, not is_whole, tuple(dict.fromkeys(unknown)))


def _newest(found: list[Message[bytes]]) -> list[Message[bytes]]:
    """Return the SHOWN_MAX newest messages, newest first. Those of one batch share their time."""
    return nlargest(SHOWN_MAX, found, key=lambda each: (each.sent_at_ns, each.offset))


def _start(described: SubjectDescription, asked: Asked) -> object:
    """Return where a reader begins. Raises ConfigError."""
    text = asked.start
    if text in {"earliest", "latest"} or parse_ago_ms(text) is not None:
        return text
    if "." in text and ":" not in text and "-" not in text:
        return _positions(text)
    offset = parse_number(text)
    if offset is not None:
        if asked.partition is None:
            raise ConfigError("an offset needs a partition: offsets count within one")
        return offset
    if text == "newest":
        partitions = [
            each
            for each in described.partitions
            if each.next_offset is not None and asked.partition in {None, each.partition_id}
        ]
        share = max(1, SHOWN_MAX // max(1, len(partitions)))
        if asked.key is not None:
            share = 100_000  # a key may be far apart
        return {
            each.partition_id: max(each.first_offset or 0, (each.next_offset or 0) - share)
            for each in partitions
        } or "earliest"
    try:
        given = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            "begin at newest, earliest, a time ago such as -15m, an ISO 8601 time, or an offset of "
            f"a partition, not at {text!r:.60}"
        ) from None
    return given if given.tzinfo else given.replace(tzinfo=UTC)


def _positions(text: str) -> dict[int, int]:
    positions = {}
    for part in text.split("_"):
        partition, _, offset = part.partition(".")
        if (number := parse_number(partition)) is None or (at := parse_number(offset)) is None:
            raise ConfigError(f"these are no positions: {text!r:.80}")
        positions[number] = at
    return positions


def _positions_text(positions: Mapping[int, int]) -> str:
    return "_".join(f"{number}.{at}" for number, at in positions.items())


async def messages(
    feed: Feed,
    names: Mapping[str, str],
    query: Mapping[str, str],
    *,
    address: str,
    environment: Environment,
) -> Page:
    """Return a page of messages."""
    subject = names["subject"]
    problem, next_address = "", ""
    asked, found = Asked(), Found([], {}, has_more=False, unknown=())
    try:
        asked = read_query(query)
        found = await read(feed, subject, asked, address=address, environment=environment)
        if found.has_more and asked.start != "newest":
            if len(found.positions) <= POSITIONS_MAX:
                kept = {**query, "start": _positions_text(found.positions)}
                next_address = href("subjects", subject, "messages", **kept)
            else:
                problem = "There are more messages. Choose a partition or a key to see them all."
    except ConfigError as error:
        problem = error.message
    fields = {
        "start": query.get("start", "newest"),
        "partition": query.get("partition", ""),
        "key": query.get("key", ""),
        "key_as": "hex" if query.get("key_as") == "hex" else "",
        "form": asked.form,
    }
    tail = {each: fields[each] for each in ("partition", "key", "key_as", "form")}
    return Page(
        title=subject,
        trail=(ROOT,),
        section="subjects",
        tabs=tabs(subject),
        template="messages.html",
        is_live=False,
        unknown=tuple(map(Sentence, found.unknown)),
        extra={
            "tab": "Messages",
            "fields": fields,
            "problem": problem,
            "found": [shown_message(each, asked.form) for each in found.messages],
            "next_address": next_address,
            "tail": href("subjects", subject, "tail", **tail),
            "follow": query.get("follow", ""),
            "address": href("subjects", subject, "messages"),
            "follow_address": href("subjects", subject, "messages", **{**tail, "follow": "on"}),
        },
    )


class Tails:
    """The open tails of a metaserver."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._open = 0

    async def stream(
        self, subject: str, query: Mapping[str, str], environment: Environment
    ) -> AsyncGenerator[bytes, None]:
        """
        Yield the messages that are stored from now on, as events.

        Raises:
            OverloadedError: so many tails are open.
            ConfigError: the query is wrong.
            Any error of a `Reader`.
        """
        if self._open >= TAILS_MAX:
            raise OverloadedError(f"{TAILS_MAX} tails are open", limit=TAILS_MAX)
        asked = read_query(query)
        self._open += 1
        try:
            reader = Reader[bytes](
                self._address,
                subject,
                start="latest",
                key=asked.key,
                partition=asked.partition,
                follow=True,
                _environment=environment,
            )
            async with reader:
                yield b": open\n\n"
                async for event in self._events(reader, asked.form):
                    yield event
        finally:
            self._open -= 1

    async def _events(self, reader: Reader[bytes], form: Form) -> AsyncGenerator[bytes, None]:
        while True:
            shown: list[ShownMessage] = []
            left_out = 0
            try:
                async with asyncio.timeout(TAIL_ALIVE_S):
                    shown.append(shown_message(await anext(reader), form))
                async with asyncio.timeout(TAIL_PERIOD_S):
                    async for message in reader:
                        if len(shown) < TAIL_MESSAGES_MAX:
                            shown.append(shown_message(message, form))
                        else:
                            left_out += 1
                            if left_out % 500 == 0:
                                await asyncio.sleep(0)
            except TimeoutError:
                pass
            if shown:
                yield encode_event({"messages": shown, "left_out": left_out}, "messages")
            else:
                yield b": alive\n\n"
