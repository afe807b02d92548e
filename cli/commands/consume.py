"""`keylane consume`: prints messages as a member of a consumer group, and acks each after it was
printed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import string
import sys
from collections.abc import Callable
from typing import cast

from ...consumer import Consumer, ConsumerSettings
from ...protocol.errors import ConfigError, CorruptBatchError
from ...protocol.ids import check_name
from ...protocol.message import Message
from ...protocol.routing import ConsumeStrategy
from ...protocol.text import printable
from ...rpc.stop_signals import StopSignals
from ..connection import open_admin
from ..message_json import message_json, shown_properties
from ..options import OutputFormat

FIELDS = (
    "subject",
    "partition",
    "offset",
    "key",
    "value",
    "token",
    "lease_partition",
    "attempt",
    "sent_at_ns",
    "properties",
    "queue",
    "logic_offset",
)


def parse_format(text: str) -> Callable[[Message], str]:
    """
    Return a function that formats messages by a template such as "{partition}:{offset} {key}".

    Bytes are shown as UTF-8, with control characters escaped, so that a message cannot control the
    terminal.

    Raises:
        ConfigError: the template names an unknown field.
    """
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"--format {text!r}: {error}") from None
    for _literal, field, spec, conversion in parsed:
        if spec or conversion or (field is not None and field not in FIELDS):
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise ConfigError(f"--format {text!r}: the fields are {known}")
    pieces = [(literal, field) for literal, field, _spec, _conversion in parsed]

    def show(message: Message) -> str:
        facts = message_facts(message)
        return "".join(
            literal if field is None else f"{literal}{printable(_plain(facts[field]))}"
            for literal, field in pieces
        )

    return show


def message_facts(message: Message) -> dict[str, object]:
    """Return a message as names and values to show, with bytes as UTF-8 text."""
    return {
        "subject": message.subject,
        "partition": message.partition_id,
        "offset": message.offset,
        "key": message.key.decode(errors="backslashreplace"),
        "value": message.value.decode(errors="backslashreplace"),
        "token": message.fencing_token,
        "lease_partition": "" if message.lease is None else message.lease.partition_id,
        "attempt": message.attempt,
        "sent_at_ns": message.sent_at_ns,
        "properties": _properties(message),
        "queue": message.queue,
        "logic_offset": message.logic_offset,
    }


def _properties(message: Message) -> dict[str, str] | str:
    try:
        return shown_properties(message.properties)
    except CorruptBatchError:  # brokers do not check properties
        return message.packed_properties.decode(errors="backslashreplace")


def _plain(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


async def consume(
    meta: str,
    form: OutputFormat,
    *,
    subject: str,
    group: str,
    count: int | None,
    template: str,
    idle_s: float | None,
    ttl_ms: int,
    shared: bool = False,
    tags: list[str] | None = None,
) -> None:
    """
    Print messages until `count` are printed, none arrives for `idle_s` seconds, or an interrupt;
    then leave the group.

    Raises:
        KeylaneError: an option is invalid, or the consumer ended with this error.
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    show = parse_format(template)
    if form is OutputFormat.JSON:
        show = message_json
    # The command itself configures the log: warnings of the consumer, without its ready line.
    logging.getLogger("keylane").addHandler(cast(logging.Handler, logging.lastResort))
    consumer = Consumer(
        meta,
        subject=subject,
        group=group,
        settings=ConsumerSettings(
            ttl_ms=ttl_ms,
            consume_strategy=ConsumeStrategy.SHARED if shared else ConsumeStrategy.EXCLUSIVE,
            tags=tags or None,
        ),
    )
    async with open_admin(meta):  # waits for a metaserver, and a signal ends the command
        pass
    with StopSignals():  # a signal during the opening reaches `run`
        async with consumer:
            running = asyncio.create_task(consumer.run())  # ends the iteration at a signal
            try:
                await _print_messages(consumer, show, count, idle_s)
            finally:
                await consumer.close()
                await running


async def _print_messages(
    consumer: Consumer,
    show: Callable[[Message], str],
    count: int | None,
    idle_s: float | None,
) -> None:
    messages = aiter(consumer)
    printed = 0
    while count is None or printed < count:
        try:
            async with asyncio.timeout(idle_s):
                message = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            return
        sys.stdout.write(show(message) + "\n")
        sys.stdout.flush()
        await message.ack()
        printed += 1
