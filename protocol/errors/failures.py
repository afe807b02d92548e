"""The errors that are not refusals: unreachable servers, disks, addresses, bugs and so on. Pure."""

from __future__ import annotations

from typing import Self

from .base import Detail, KeylaneError
from .reasons import Fate, RetryRule


class DeliveryError(KeylaneError):
    """The base class of errors for messages that a producer gave up. `fate` is the fate of the
    message.
    """

    code = 1182
    summary = "the message was given up"
    hint = "Its fate says whether it may be stored: not_done or unknown."
    partition_id = Detail(int)
    row_id = Detail(int)
    stored = Detail(int)
    messages = Detail(int)
    queued = Detail(int)
    """The number of messages that were queued before it."""


class GivenUpError(DeliveryError):
    """Raised by `flush` and `close` if the futures of given-up messages were never awaited."""

    code = 1183
    summary = "messages were given up, and their futures were never awaited"
    hint = (
        "Await the futures that `send` returned to learn which ones failed: each raises its own "
        "error, with its fate."
    )
    messages = Detail(int)
    unknown = Detail(int)
    """The number of messages that may be stored."""


class DeliveryTimeoutError(DeliveryError):
    """A message was not acked within its timeout. The text names the condition that it was waiting
    for.
    """

    code = 1184
    retry = RetryRule.LATER
    summary = "the message was not acked in its time"
    hint = (
        "Nothing newer of its key is sent until producer.resume(error); "
        "then send again what was refused, the oldest first."
    )
    subject = Detail(str)
    key = Detail(bytes)
    value = Detail(bytes)
    properties = Detail(dict)


class KeyHaltedError(DeliveryError):
    """A message was not sent, because an older message of its key timed out."""

    code = 1185
    retry = RetryRule.LATER
    summary = "not sent: an older message of its key timed out"
    hint = "producer.resume(error), then send again what was refused, the oldest first."
    subject = Detail(str)
    key = Detail(bytes)
    value = Detail(bytes)
    properties = Detail(dict)


class TableError(DeliveryError):
    """Raised by `send_arrow` if rows of a table were not sent or not stored."""

    rows = Detail[list[int]](list)
    """The numbers of the first hundred rows."""
    sent = Detail(int)
    """The number of rows that were sent before; 0 unless the table is a stream."""
    messages = Detail(int)
    unknown = Detail(int)
    """The number of messages that may be stored."""
    stored = Detail(int)
    """The number of stored rows."""


class UnreachableError(KeylaneError):
    """The base class of errors for calls that received no response, or only a partial one."""

    code = 1200
    fate = Fate.UNKNOWN
    retry = RetryRule.LATER
    summary = "no answer"
    hint = "Check that the server is running, and that this is its address."
    subject = Detail(str)
    partition_id = Detail(int)
    start = Detail(int)
    end = Detail(int)
    offset = Detail(int)
    """The offset of the first message that did not arrive."""
    seconds = Detail(int)
    """The number of seconds without any data from the server."""


class NotSentError(UnreachableError):
    """No connection could be made, so the request was not sent."""

    code = 1201
    fate = Fate.NOT_DONE
    summary = "cannot reach the server"
    hint = "Check that it is running, and that this is its address."
    address = Detail(str)
    is_refused: bool = False
    """True if the machine has answered that no program listens at the address."""
    broker_group = Detail(str)
    partition_id = Detail(int)

    @classmethod
    def of_group(cls, broker_group: str, partition_id: int | None = None) -> Self:
        """Return the error for an unavailable broker group, for a caller that does not know its
        address.
        """
        place = {} if partition_id is None else {"partition_id": partition_id}
        text = f"broker group {broker_group!r} is not available now"
        error = cls(text, broker_group=broker_group, **place)
        error.hint = "Is its broker running?  keylane broker list shows all groups."
        return error


class OutcomeUnknownError(UnreachableError):
    """The request was sent, but no response arrived. For a request that only reads, the fate is
    NOT_DONE.
    """

    code = 1202
    summary = "the connection ended before the answer"
    hint = "The call may have taken effect: check before you repeat it."

    @classmethod
    def of_read(cls, text: str) -> Self:
        """Return the error for a request that changes nothing even if it was executed."""
        error = cls(text)
        error.fate = Fate.NOT_DONE
        error.hint = "It only reads, so nothing was changed: ask again."
        return error


class UnfinishedError(UnreachableError):
    """Only a part of the call was done. Repeating the call finishes it."""

    partitions = Detail(int)
    partitions_set = Detail(int)
    subject = Detail(str)
    partitions_hosted = Detail(int)


class ForeignServerError(UnreachableError):
    """The program at the address is not a keylane server, or its responses cannot be decoded by
    this version.
    """

    code = 1204
    retry = RetryRule.NEVER
    summary = "the answer is no keylane server's"
    hint = (
        "Check which program listens there, then give the address of a keylane server: HOST:PORT."
    )
    address = Detail(str)


class StoryError(KeylaneError):
    """A virtual cluster was used outside its story, or in a way that a story does not allow."""

    code = 1285
    summary = "this is not possible outside of the story"
    hint = "A VirtualCluster runs one story; start, kill and query its programs inside that story."
    virtual_s = Detail(float)
    call = Detail(str)
    program = Detail(str)
    within_s = Detail(float)


class FilterError(KeylaneError):
    """A consumer's `filter` failed for a message. Its exception is the cause of this error."""

    code = 1286
    summary = "the consumer's filter failed"
    hint = (
        "Fix `filter`: a plain function that takes a message and returns True or False. The "
        "message is retried, as after an error in a handler."
    )
    partition_id = Detail(int)
    offset = Detail(int)


class SparkProcessError(KeylaneError):
    """A Spark process cannot run keylane: a package or Java is missing, or has the wrong
    version.
    """

    code = 1296
    summary = "a process of Spark cannot run keylane"
    hint = "docs/SPARK.md says what each machine of a cluster needs."
    python = Detail(str)
    """The Python interpreter that runs the process."""
    missing = Detail(str)
    """The module that is missing from this Python."""


class StorageError(KeylaneError):
    """The base class of errors from disks and databases."""

    code = 1300
    retry = RetryRule.LATER  # a database that restarts or fails over will be back soon
    summary = "the disk answered with an error"
    hint = "Check the disk or the database that the message names, then the server's log."
    operation = Detail(str)
    path = Detail(str)


class CorruptLogError(StorageError):
    """The log is damaged, and not only by an incomplete write at its end."""

    code = 1301
    retry = RetryRule.NEVER
    summary = "the commit log is damaged"
    hint = "Nothing was cut. keylane broker verify DIR shows what is affected."
    partition_id = Detail(int)
    position = Detail(int)
    offset = Detail(int)
    """The offset of the first damaged message."""
    end_offset = Detail(int)
    """The offset that follows the last damaged message."""


class DiskFullError(StorageError):
    """A write did not fit on the disk."""

    code = 1302
    summary = "the disk is full"
    hint = "Free some space; nothing of this write was stored."


class FlushFailedError(StorageError):
    """A flush failed: it is unknown whether the last writes are on the disk."""

    code = 1303
    fate = Fate.UNKNOWN
    retry = RetryRule.NEVER
    summary = "a write could not be made durable"
    hint = (
        "The broker stops writing, because after a failed flush the state of the "
        "last writes is unknown."
    )


class DataFolderError(StorageError):
    """The folder is not writable, is in use, or belongs to another server."""

    code = 1304
    retry = RetryRule.NEVER
    summary = "the data folder cannot be used"
    hint = (
        "Give a folder that this user may write to, on a disk that is not mounted read-only, and "
        "that no other server uses."
    )
    broker_group = Detail(str)


class CorruptIndexError(CorruptLogError):
    """The index is damaged, but the commit log is not."""

    code = 1305
    summary = "the index of the commit log is damaged"
    hint = "Restart the broker: it rebuilds its index from the log, and nothing is lost."


class CheckpointMismatchError(KeylaneError):
    """The offsets in a stream's checkpoint do not belong to the subjects that it reads."""

    code = 1307
    summary = "the checkpoint is of another stream"
    hint = (
        "Give this stream its own checkpointLocation, or read the subject that the checkpoint "
        "belongs to."
    )
    checkpoint_of = Detail(str)
    """The subjects to which the checkpoint belongs."""
    reads = Detail(str)
    """The subjects that the stream reads."""
    partition_id = Detail(int)
    offset = Detail(int)
    """The next offset in the checkpoint, which lies beyond the end of the partition."""
    next_offset = Detail(int)


class HandlerTimeoutError(KeylaneError):
    """A handler did not return within `handler_timeout_ms`. It was cancelled, and the attempt
    counts as failed.
    """

    code = 1378
    summary = "the handler did not return in time"
    hint = (
        "Give what the handler waits for a limit of its own; or set a longer handler_timeout_ms, "
        "or 0 for none, if it needs "
        "that long."
    )
    timeout_ms = Detail(int)


class AddressError(KeylaneError):
    """A server cannot listen on the port: it is in use, not permitted, or invalid."""

    code = 1400
    summary = "cannot listen there"
    hint = "Choose another port with --port, or --port 0 for any free one."
    port = Detail(int)
    host = Detail(str)


class ClosedError(KeylaneError):
    """A producer, consumer or message was used while it was not open, or a producer gave up a
    message because it was closed.
    """

    code = 1402
    summary = "used after close"
    hint = "Use it inside its `async with` block."


class InputError(KeylaneError):
    """A command cannot read the rest of its input."""

    code = 1405
    summary = "the input cannot be read"
    hint = "Check the terminal, the pipe or the file that the command reads."
    line = Detail(int)
    stored = Detail(int)
    lines = Detail(str)
    """The lines that are not stored, as ranges: "7,9-"."""


class InternalError(KeylaneError):
    """A bug in keylane, in a server or in the demo."""

    code = 1500
    fate = Fate.UNKNOWN
    summary = "the server met a fault of its own"
    hint = "Its log has the details; please report it."


_FILES_HINT = (
    "Raise the limit of open files: `ulimit -n 65536` in the shell that starts it, "
    "`LimitNOFILE=65536` in a systemd unit."
)


def open_files_error(text: str, *, operation: str, path: str) -> StorageError:
    """Return the error for a disk or database operation that failed because the process cannot open
    more files.
    """
    error = StorageError(
        f"{text}: too many open files of this process or machine", operation=operation, path=path
    )
    error.hint = _FILES_HINT
    return error


def few_files_error(allowed: int, needed: int) -> StorageError:
    """Return the error for a process that refuses to start because its limit on open files is too
    low.
    """
    error = StorageError(
        f"this process may have {allowed} open files and connections, and needs at least {needed}: "
        f"its data takes some "
        "dozens, and each client one or two"
    )
    error.hint = _FILES_HINT
    return error
