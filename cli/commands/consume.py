"""`keylane consume`: prints messages as a member of a consumer group, acking each one after it has
been printed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import cast

from ...consumer import Consumer, ConsumerSettings
from ...protocol.ids import check_name
from ...protocol.message import Message
from ...protocol.routing import ConsumeStrategy
from ...rpc.stop_signals import StopSignals
from ..connection import open_admin
from ..message_json import message_printer
from ..options import OutputFormat

MESSAGE_LINE = "{partition_id}:{offset} {key} {value}"


async def consume(
    meta: str,
    output: OutputFormat,
    *,
    subject: str,
    group: str,
    count: int | None,
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
    format_message = message_printer(output, MESSAGE_LINE)
    # The command itself configures the log, which shows the warnings of the consumer but not its
    # ready line.
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
    with StopSignals():  # a signal while opening is handled by `run`
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
