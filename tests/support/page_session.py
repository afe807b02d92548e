"""A session of Python in which the blocks of a page run one after another, as in a notebook.

    page_session.py

Steps arrive on standard input, an object of JSON in each line, and each is answered on a file of
its own:

* `{"stand_in": FILE}` runs a file of the tests that has what the page leaves to its reader, such as
  the function that bills an order. Its names are those of the page. Answer: its `REFUSED`.
* `{"hook": NAME, "text": TEXT}` calls a function of the stand-in, if it has one of that name:
  `prepare` at the beginning, `before_block` and `after_block` with a block of Python, and
  `before_command` with a command, and `at_end` after the last step. Answer: what it returns; for a
  command, what is typed in its place, such as an id that the page cannot know.
* `{"block": TEXT, "page": FILE, "line": N}` runs a block. `await` may stand outside of a function.
  What serves for ever is ended by Ctrl-C once the groups that have a member have no message left,
  or no group has one.
  A consumer that a block makes and leaves alone is run.
* `{"keylane": WORDS}` runs a command. Answer: its status.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import keylane.cli.__main__
from keylane import Admin, Consumer
from keylane.admin import GroupDescription
from keylane.errors import KeylaneError

ANSWERS = 63
"""The number of the open file for answers."""
LOOK_S = 0.1
LOOKS = 2
"""Looks without a message left, one after another, before Ctrl-C."""
LOOKS_ALONE = 300
"""Looks at which no group has a member, one after another, before Ctrl-C."""
MADE = re.compile(r"^consumer = (?:keylane\.)?Consumer\(", re.MULTILINE)

page = types.ModuleType("__main__")
"""The module in which the blocks run."""


async def wait_until_handled(ended: threading.Event) -> None:
    """Wait until a group has a member, and no group with one has an unacked message; or until no
    group has had one for so long that what serves is no consumer.
    """
    quiet = alone = 0
    async with Admin(os.environ["KEYLANE_META"]) as admin:
        while quiet < LOOKS and not ended.is_set():
            await asyncio.sleep(LOOK_S)
            try:
                idle = [is_idle(group) async for group in live_groups(admin)]
            except KeylaneError:  # a subject is being deleted, or a partition is being opened
                idle = []
            quiet = quiet + 1 if idle and all(idle) else 0
            alone = 0 if idle else alone + 1
            if alone >= LOOKS_ALONE:
                return


async def live_groups(admin: Admin) -> AsyncIterator[GroupDescription]:
    """Yield the groups that have a member."""
    for subject in await admin.list_subjects():
        for group in await admin.list_groups(subject.subject):
            if group.sessions:
                yield await admin.describe_group(subject.subject, group.group)


def is_idle(group: GroupDescription) -> bool:
    """True if members own partitions of the group, and no message is left."""
    return any(partition.owner for partition in group.partitions) and group.lag == 0


def press_ctrl_c_once_handled(ended: threading.Event) -> None:
    asyncio.run(wait_until_handled(ended))
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGINT)


def run_served(runner: asyncio.Runner, work: Any) -> None:
    """Run a function, or the coroutine that it returns, until it ends or is ended by Ctrl-C."""
    ended = threading.Event()
    watcher = threading.Thread(target=press_ctrl_c_once_handled, args=(ended,))
    with contextlib.suppress(KeyboardInterrupt):
        watcher.start()
        try:
            run(runner, work)
        finally:
            ended.set()
            watcher.join()


def run(runner: asyncio.Runner, work: Any) -> Any:
    made = work()
    return runner.run(made) if inspect.iscoroutine(made) else made


def run_keylane_here(words: list[str]) -> int:
    """Run `keylane WORDS`, and return its status."""
    sys.argv = ["keylane", *words]
    try:
        keylane.cli.__main__.main()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    return 0


def compiled(text: str, name: str, line: int) -> types.FunctionType:
    """Return a block as a function; a traceback shows the lines of the page."""
    code = compile(
        "\n" * line + text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True
    )
    return types.FunctionType(code, vars(page))


def take(step: dict[str, Any], runner: asyncio.Runner) -> Any:
    """Take one step, and return the answer."""
    if "stand_in" in step:
        text = Path(step["stand_in"]).read_text()
        run(runner, compiled(text, step["stand_in"], 0))
        return getattr(page, "REFUSED", {})
    if "hook" in step:
        hook = getattr(page, step["hook"], lambda _text: None)
        return run(runner, lambda: hook(step["text"]))
    if "keylane" in step:
        return run_keylane_here(step["keylane"])
    if "block" in step:
        run_served(runner, compiled(step["block"], step["page"], step["line"]))
        if MADE.search(step["block"]) and ".run()" not in step["block"]:
            consumer: Consumer[Any] = page.consumer
            run_served(runner, consumer.run)
    return None


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    sys.modules["__main__"] = page  # as of a notebook: Spark sends its functions whole
    sys.path.insert(0, "")
    with asyncio.Runner() as runner, open(ANSWERS, "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            answer = error = None
            try:
                answer = take(json.loads(line), runner)
            except BaseException:  # noqa: BLE001 - the test shows it, also a SystemExit
                error = traceback.format_exc()
            sys.stdout.flush()
            answers.write(json.dumps({"answer": answer, "error": error}) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
