"""`keylane consume`: prints messages as a member of a consumer group, and acks each after printing
it.
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
    Compile a template such as "{partition}:{offset} {key}" to a function that formats messages.

    Bytes are decoded as UTF-8, and control characters are escaped, because a message must not
    control the terminal.

    Raises:
        ConfigError: the template names an unknown field.
    """
    try:
        fields = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(f"--format {text!r}: {error}") from None
    for _literal, field, spec, conversion in fields:
        if spec or conversion or (field is not None and field not in FIELDS):
            field_names = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise ConfigError(f"--format {text!r}: the fields are {field_names}")
    parts = [(literal, field) for literal, field, _spec, _conversion in fields]

    def format_message(message: Message) -> str:
        values = message_fields(message)
        return "".join(
            literal if field is None else f"{literal}{printable(_to_text(values[field]))}"
            for literal, field in parts
        )

    return format_message


def message_fields(message: Message) -> dict[str, object]:
    """Return the fields that a template can show; bytes are decoded as UTF-8."""
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


def _to_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


async def consume(
    meta: str,
    output: OutputFormat,
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
    Print messages, then leave the group: after `count` messages, after `idle_s` seconds without
    one, or when interrupted.

    Raises:
        KeylaneError: an option is invalid, or the consumer failed.
    """
    check_name("subject", subject)
    check_name("consumer group", group)
    format_message = parse_format(template)
    if output is OutputFormat.JSON:
        format_message = message_json
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
    async with open_admin(meta):  # waits for a metaserver; a signal ends the command
        pass
    with StopSignals():  # a signal during the opening reaches `run`
        async with consumer:
            run_task = asyncio.create_task(consumer.run())  # ends the iteration on a signal
            try:
                await _print_messages(consumer, format_message, count, idle_s)
            finally:
                await consumer.close()
                await run_task


async def _print_messages(
    consumer: Consumer,
    format_message: Callable[[Message], str],
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
        sys.stdout.write(format_message(message) + "\n")
        sys.stdout.flush()
        await message.ack()
        printed += 1
