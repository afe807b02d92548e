"""Event loops that take the first step of a task inside of the call that makes it, on every version
of Python.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any


def _eager_tasks(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Future[Any]:
    """A task factory as `asyncio.eager_task_factory`, which Python 3.11 has not; the first step
    counts to the caller's task.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:
        ended = loop.create_future()
        ended.set_result(end.value)
        return ended
    return asyncio.Task(_rest(work, awaited), loop=loop, **options)


eager_tasks: Any = getattr(asyncio, "eager_task_factory", _eager_tasks)


@coroutine
def _rest(work: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """What comes after the first step, which waits for `awaited`."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001 - the work decides
            step = (work.throw, error)
        else:
            step = (work.send, sent)
        try:
            awaited = step[0](step[1])
        except StopIteration as end:
            return end.value
