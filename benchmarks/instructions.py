"""Counts the instructions that a client executes for a message, by callgrind; prints JSON.

A count depends on other work of the machine only through the size of batches, so two versions can
be compared on a busy one. Each figure is the difference of a long and a short run, so the start of
the client is left out. Needs valgrind; `--roles send,handle` measures only these, and takes three
minutes a role.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import uvloop
from machine import machine
from main_path import BenchCluster

from keylane import Consumer, ConsumerSettings, Message, Producer

SHORT, LONG = 20_000, 120_000
VALUE = bytes(range(100))
KEYS = [b"key-%05d" % number for number in range(10_000)]


async def send(meta: str, subject: str, count: int) -> None:
    """Send messages, and wait for their acks every 500."""
    async with Producer(meta) as producer:
        for start in range(0, count, 500):
            for number in range(start, start + 500):
                producer.send(subject, VALUE, key=KEYS[number % 10_000])
            await asyncio.sleep(0)
            await producer.drain()
        await producer.flush()


async def send_all(meta: str, subject: str, count: int) -> None:
    """Send messages by `send_all`, 10,000 a call."""
    messages = [(key, VALUE) for key in KEYS]
    async with Producer(meta) as producer:
        for _ in range(count // 10_000):
            await producer.send_all(subject, messages)


async def handle(meta: str, subject: str, count: int) -> None:
    """Handle messages, one coroutine for each."""
    handled = 0
    done = asyncio.Event()

    async def on_message(message: Message) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    async with Consumer(meta, subject=subject, group=f"handle-{count}", handler=on_message):
        await done.wait()


async def handle_batches(meta: str, subject: str, count: int) -> None:
    """Handle messages, up to 500 a call."""
    handled = 0
    done = asyncio.Event()

    async def on_batch(messages: list[Message]) -> None:
        nonlocal handled
        handled += len(messages)
        if handled == count:
            done.set()

    async with Consumer(
        meta,
        subject=subject,
        group=f"batches-{count}",
        batch_handler=on_batch,
        settings=ConsumerSettings(max_records=500),
    ):
        await done.wait()


async def iterate(meta: str, subject: str, count: int) -> None:
    """Take messages one by one from a loop, which acks each."""
    handled = 0
    async with Consumer(meta, subject=subject, group=f"loop-{count}") as consumer:
        async for message in consumer:
            await message.ack()
            handled += 1
            if handled == count:
                return


ROLES: dict[str, Callable[[str, str, int], Awaitable[None]]] = {
    "send": send,
    "send_all": send_all,
    "handle": handle,
    "handle_batches": handle_batches,
    "iterate": iterate,
}


def count_instructions(role: str, meta: str, subject: str, count: int) -> int:
    """Run a role under callgrind, and return the number of instructions executed."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"--callgrind-out-file={folder}/out"
        client = [sys.executable, __file__, "--client", role, meta, subject, str(count)]
        result = subprocess.run(
            ["valgrind", "--tool=callgrind", out, *client],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    collected = re.search(r"Collected : (\d+)", result.stderr)
    assert collected is not None, result.stderr
    return int(collected[1])


def measure(roles: list[str]) -> dict[str, float]:
    """Return instructions a message by role."""
    counts: dict[tuple[str, int], int] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        cluster = BenchCluster(Path(folder), stack)
        for count in (SHORT, LONG):
            for role in ("send", "send_all"):
                cluster.create(f"{role}-{count}")
            for role in dict.fromkeys(["send", *roles]):  # consumers read what `send` sent
                subject = f"send_all-{count}" if role == "send_all" else f"send-{count}"
                counts[role, count] = count_instructions(role, cluster.meta, subject, count)
    return {
        f"{role}_instructions": (counts[role, LONG] - counts[role, SHORT]) / (LONG - SHORT)
        for role in roles
    }


def main() -> None:
    """Parse the arguments, measure, and print the result."""
    if sys.argv[1:2] == ["--client"]:
        role, meta, subject, count = sys.argv[2:]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(ROLES[role](meta, subject, int(count)))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roles", default=",".join(ROLES), help="of " + ", ".join(ROLES))
    roles = parser.parse_args().roles.split(",")
    if unknown := [role for role in roles if role not in ROLES]:
        parser.error(f"unknown roles: {', '.join(unknown)}; choose of {', '.join(ROLES)}")
    if shutil.which("valgrind") is None:
        parser.error("valgrind is not installed; on Debian: apt-get install valgrind")
    print(json.dumps({"machine": machine(), **measure(roles)}, indent=1))


if __name__ == "__main__":
    main()
