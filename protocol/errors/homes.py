"""The refusals of a client that is used where it is not open, or by two tasks.  Pure."""

from __future__ import annotations

from .base import Detail, RetryRule
from .refusals import RefusedError


class ForkedError(RefusedError):
    """A producer, consumer or reader that was open at a fork is used in the child process."""

    code = 1143
    summary = "it was open when this process was forked: its connections are the parent's"
    hint = "Open it after the fork, one in each process."


class ForkReturnedError(RefusedError):
    """A child of a fork came back into the event loop of its parent, in which a client is open: the
    child is ended.
    """

    code = 1258
    retry = RetryRule.NEVER
    summary = (
        "this process was forked inside an event loop, and came back into it: that "
        "loop is the parent's"
    )
    hint = (
        "End a process forked in a handler with os._exit(0) when its work is done.  Or start "
        "programs with subprocess or multiprocessing, whose processes never "
        "return into the handler."
    )


class OtherLoopError(RefusedError):
    """A producer, consumer or reader is used outside of its event loop."""

    code = 1144
    summary = "used outside of the event loop that it was opened in"
    hint = (
        "Open one in each event loop, or call back into its loop with "
        "asyncio.run_coroutine_threadsafe."
    )


class AlreadyOpenError(RefusedError):
    """A producer, consumer or reader is opened while it is open or closing."""

    code = 1145
    summary = "it is open already"
    hint = "Close it first, or create another one."


class OtherTaskError(RefusedError):
    """A task asks for the next message of a consumer over which another task iterates."""

    code = 1148
    retry = RetryRule.LATER
    summary = "another task iterates over this consumer"
    hint = (
        "Iterate in one task, or take over once every message is acked.  For many messages at "
        "once, give the consumer "
        "handler= and concurrency=: it keeps the order of each key."
    )
    unacked = Detail(int)
    """Messages that the other task took and has not acked; None if it waits for one."""


class MixedUseError(RefusedError):
    """A consumer gives its messages in one way: `async for`, `getmany`, `batches`, or a handler."""

    code = 1165
    summary = "this consumer gives its messages in another way"
    hint = (
        "Use one of a loop over the consumer, getmany() and batches() for as long as it is open; a "
        "handler has them all."
    )


class SeekRefusedError(RefusedError):
    """A member of a consumer group asks for another offset: the group's progress is one, and is set
    by an operator.
    """

    code = 1166
    summary = "a consumer does not set the progress of its group"
    hint = (
        "For all members: keylane group reset SUBJECT GROUP --to ... --live, or "
        "Admin.reset_group(…, live=True).  To look at "
        "messages again without a group: keylane.Reader."
    )
