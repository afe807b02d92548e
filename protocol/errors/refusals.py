"""Errors for invalid settings, and refusals: a server or a client has rejected a call without doing
anything. Pure.
"""

from __future__ import annotations

from .base import Detail, KeylaneError
from .reasons import RetryRule


class ConfigError(KeylaneError):
    """The settings or arguments are invalid. Nothing was started."""

    code = 1001
    summary = "the settings cannot work"
    hint = "Nothing was done. Fix everything that the message names, then try again."
    problems = Detail(int)
    """The number of problems."""
    path = Detail(str)
    """The settings file that cannot be read."""
    subject = Detail(str)
    group = Detail(str)
    revision = Detail(str)
    reader = Detail(str)


class HandlerTypeError(ConfigError, TypeError):
    """The body of a handler would never run: it is a generator function, does not take one message,
    or returns something that must be iterated or called.
    """

    code = 1010
    summary = "not a handler"
    hint = (
        "Give a def or async def of one message as handler=, or of one list of messages as "
        "batch_handler=, without yield. Its return acks; to have messages retried, it raises "
        "keylane.Retry or returns keylane.NACK. Other results are ignored."
    )


_EXTRA_BY_DRIVER = {"aiosqlite": "server", "asyncmy": "mysql", "asyncpg": "postgresql"}
"""The extra that brings each driver of a database."""
_URL_BY_OTHER_DRIVER = {
    "MySQLdb": ("mysql+asyncmy://", "mysql"),
    "psycopg": ("postgresql+asyncpg://", "postgresql"),
    "psycopg2": ("postgresql+asyncpg://", "postgresql"),
}
"""The URL to use instead of one whose driver no extra brings, and the extra of its driver."""


class MissingExtraError(ConfigError, ModuleNotFoundError):
    """A part of keylane needs a package that is not installed, because it belongs to an extra."""

    code = 1012
    summary = "a package is not installed"
    hint = "Install the extra that the message names into the environment of this program."
    extra = Detail(str)
    """Extra, such as "outbox" of `pip install '.[outbox]'`."""
    package = Detail(str)
    """The module that cannot be imported."""

    @classmethod
    def of(cls, error: ModuleNotFoundError, part: str, extra: str) -> ModuleNotFoundError:
        """Return the error for a part of keylane that raised `error`, or `error` itself if the
        missing module belongs to keylane.
        """
        package = (error.name or "").partition(".")[0]
        if not package or package == __name__.partition(".")[0]:
            return error
        text = (
            f'{part} needs {package}, which the extra "{extra}" brings. In your clone of keylane: '
            f"pip install '.[{extra}]'"
        )
        missing = cls(text, extra=extra, package=package)
        missing.name = package
        return missing

    @classmethod
    def of_driver(cls, error: ModuleNotFoundError) -> ConfigError:
        """Return the error for the URL of a database whose driver is not installed."""
        driver = error.name or ""
        if driver in _URL_BY_OTHER_DRIVER:
            url, other_extra = _URL_BY_OTHER_DRIVER[driver]
            return cls(
                f"the URL of the database needs {driver}, which is not installed, and which no "
                f"extra brings: begin the URL with {url}, whose driver the extra "
                f'"{other_extra}" brings. In your clone of keylane: '
                f"pip install '.[{other_extra}]'",
                extra=other_extra,
                package=driver,
            )
        extra = _EXTRA_BY_DRIVER.get(driver)
        missing = cls.of(error, "the URL of the database", extra) if extra else error
        if isinstance(missing, ConfigError):
            return missing
        return ConfigError(f"the driver in the URL of the database cannot be used: {error}")


class RefusedError(KeylaneError):
    """The base class of refusals. It is itself raised for the error codes of newer versions."""

    code = 1100
    summary = "refused"
    hint = (
        "Nothing was done. If the answer comes from a newer program, use a client of its version."
    )


class UsageError(RefusedError):
    """A client is used where it is not open, or in two mutually exclusive ways."""

    unacked = Detail(int)
    """The number of unacked messages of the other task; None if that task is waiting for a
    message.
    """
    subject = Detail(str)
    group = Detail(str)


class MessageTooLargeError(RefusedError):
    """A message exceeds a limit. Nothing was queued or stored."""

    code = 1103
    summary = "message too large: key, value and properties count together"
    hint = "Store the large part elsewhere and send a reference to it, or split it."
    size_bytes = Detail(int)
    limit_bytes = Detail(int)


class InvalidRequestError(RefusedError):
    """A request is invalid, regardless of the state of the system."""

    code = 1104
    summary = "the request makes no sense"
    hint = "Nothing was done. Fix what the message names, then try again."
    partition_id = Detail(int)
    address = Detail(str)
    unknown_call = Detail(int)
    """This is 1 if the server does not have the call."""
    kind = Detail(str)
    name = Detail(str)
    """The first 80 characters of the name that was given."""
    offset = Detail(str)
    origin = Detail(str)
    host = Detail(str)
    limit_ms = Detail(int)
    problem = Detail(str)
    """The problem that ended a TLS handshake, as worded by OpenSSL."""
    base_offset = Detail(int)
    """The offset of the first message that was stored under the key."""
    next_offset = Detail(int)
    subject = Detail(str)
    group = Detail(str)
    deliver_at_ms = Detail(int)
    now_ms = Detail(int)
    """The time of the refusal, by the wall clock of the program that refused, in milliseconds since
    1970.
    """
    option = Detail(str)


class SubjectUnknownError(RefusedError):
    """The subject does not exist, and the metaserver's setting `auto_create` does not allow it to
    be created by its first message.
    """

    code = 1110
    summary = "no such subject"
    hint = (
        "Check the name: keylane subject list shows all subjects, keylane subject create NAME "
        "creates one."
    )
    subject = Detail(str)


class ConflictError(RefusedError):
    """The request conflicts with stored settings or with the present state."""

    subject = Detail(str)
    order_strategy = Detail(str)
    partitions = Detail(int)
    retention = Detail(str)
    static = Detail(bool)
    stored = Detail(str)
    asked = Detail(str)
    operation_id = Detail(int)
    state = Detail(str)
    broker_group = Detail(str)
    queues = Detail(int)
    client = Detail(str)
    """The name of the other consumer."""
    group = Detail(str)
    begun = Detail(bool)
    """True if cursors may already be set, so the reset can no longer be canceled."""
    partition_ids = Detail(str)
    target = Detail(str)
    """The subject that will take over the messages."""
    expected = Detail(str)
    actual = Detail(str)


class GroupUnknownError(RefusedError):
    """No consumer has ever joined the group."""

    code = 1112
    summary = "no such consumer group on this subject"
    hint = (
        "Check the name: keylane group list SUBJECT shows all groups. A group begins to exist with "
        "its first consumer, or with keylane group create SUBJECT NAME."
    )
    subject = Detail(str)
    group = Detail(str)


class PartitionUnknownError(RefusedError):
    """The broker that received the request does not host the partition."""

    code = 1113
    summary = "the broker does not hold this partition"
    retry = RetryRule.AFTER_NEW_ROUTE
    hint = (
        "keylane subject describe NAME lists a subject's partitions; a program should ask the "
        "metaserver for the route again."
    )
    partition_id = Detail(int)
    subject = Detail(str)
    broker_group = Detail(str)


class SubjectDeletedError(RefusedError):
    """The subject is being deleted, or has been deleted. A new subject with the same name is a
    different one.
    """

    code = 1114
    summary = "the subject was deleted"
    hint = (
        "A subject created under this name later (keylane subject create NAME) is a different one: "
        "restart its consumers, and send its messages again."
    )
    subject = Detail(str)
    left = Detail(int)
    """The number of partitions that brokers have not dropped yet."""


class GroupDeletedError(RefusedError):
    """The consumer group is being deleted, or has been deleted. A new group with the same name is a
    different one.
    """

    code = 1115
    summary = "the consumer group was deleted"
    hint = "A consumer started now begins a new group at the first message that is still stored."
    subject = Detail(str)
    group = Detail(str)
    left = Detail(int)
    """The number of partitions whose brokers have not forgotten the group yet."""


class StaleRouteError(RefusedError):
    """The append is for a partition that is sealed."""

    code = 1120
    summary = "the partition is sealed, the route has moved on"
    retry = RetryRule.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the route again; nothing of this batch was stored."
    partition_id = Detail(int)
    end_offset = Detail(int)
    """The end offset of the partition."""


class WrongBrokerError(RefusedError):
    """The request is for a partition of another broker group."""

    code = 1121
    summary = "the request reached a broker of a different broker group"
    retry = RetryRule.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the broker's address again."
    broker_group = Detail(str)


class FencedError(RefusedError):
    """The broker has seen a higher token."""

    code = 1130
    summary = "a newer owner has this partition"
    hint = "Stop handling it: the newer owner has everything that was not acked."
    token = Detail(int)
    """The caller's token."""
    current_token = Detail(int)
    """The highest token that the broker has seen; None if the broker does not know the caller's
    token.
    """
    instance = Detail(str)
    subject = Detail(str)
    group = Detail(str)


class SessionUnknownError(RefusedError):
    """The metaserver does not know the session, or no longer knows it."""

    code = 1131
    summary = "the session is unknown, or its ttl has passed"
    hint = "Join again with a new session; the old leases have ended."
    session = Detail(str)


class TokenUnknownError(RefusedError):
    """The token was never granted, or not to this session."""

    code = 1132
    summary = "no such grant"
    hint = "Use the token of the metaserver's last grant."
    token = Detail(int)
    current_token = Detail(int)


class SequenceGapError(RefusedError):
    """A batch arrived before an earlier batch of its producer."""

    code = 1140
    summary = "an earlier batch of this producer is missing"
    retry = RetryRule.LATER
    hint = "Send the batches again, starting at the expected sequence."
    expected = Detail(int)
    sequence = Detail(int)
    count = Detail(int)


class ProducerFencedError(RefusedError):
    """The producer id is in use with a higher epoch."""

    code = 1141
    summary = "a newer epoch of this producer is at work"
    hint = "Close this producer."
    epoch = Detail(int)
    current_epoch = Detail(int)


class SequenceReusedError(RefusedError):
    """A batch has sequences that are already stored, but is not a repeat of a batch that the broker
    remembers.
    """

    code = 1142
    summary = "another producer sends under this producer's id: the batch is not stored"
    hint = (
        "Send it again under a new, random producer id; keylane's own producer does so by itself."
    )
    sequence = Detail(int)
    count = Detail(int)
    expected = Detail(int)


class CodecError(RefusedError):
    """A codec failed. Raised by `Producer.send`, which then does not queue anything, and by
    `Message.decode`.
    """

    code = 1149
    summary = "a codec failed"
    hint = "The cause is the codec's own error. Sender and receiver need the same codec."
    codec = Detail(str)
    subject = Detail(str)
    partition_id = Detail(int)
    offset = Detail(int)


class FolderRefusedError(RefusedError):
    """A metaserver refuses a broker's data folder, because the broker group has a different one."""

    broker_group = Detail(str)
    address = Detail(str)
    log_end = Detail(int)
    known_log_end = Detail(int)


class UnavailableError(RefusedError):
    """The cluster lacks something that the request needs, and that an operator must provide."""

    subject = Detail(str)
    broker_group = Detail(str)
    partitions = Detail(int)


class BusyError(RefusedError):
    """A conflicting action is in progress, and will end without intervention."""

    subject = Detail(str)
    operation_id = Detail(int)
    broker_group = Detail(str)
    left_ms = Detail(int)
    """The maximum remaining time of a running reset, in milliseconds."""
    sessions = Detail(int)
    """The number of live consumers."""
    partition_id = Detail(int)
    scheduled_id = Detail(str)


class NotFoundError(RefusedError):
    """There is no object with this name or id. There are separate errors for missing subjects,
    groups and partitions.
    """

    broker_group = Detail(str)
    operation_id = Detail(int)
    subject = Detail(str)
    queue = Detail(int)
    token_id = Detail(str)
    partition_id = Detail(int)
    offset = Detail(int)
    scheduled_id = Detail(str)


class OffsetOutOfRangeError(RefusedError):
    """A read lies outside the stored offsets."""

    code = 1160
    summary = "no such offset in the partition"
    hint = "Read within [first_offset, next_offset)."
    partition_id = Detail(int)
    offset = Detail(int)
    """Requested offset."""
    first_offset = Detail(int)
    """The first offset that is still stored."""
    next_offset = Detail(int)
    """The offset that follows the last readable one."""


class CorruptBatchError(RefusedError):
    """The checksum or the lengths of a batch do not match its bytes."""

    code = 1161
    summary = "the bytes of the batch are damaged"
    retry = RetryRule.LATER
    hint = "Send it again; if it happens again, check the network and the machine's memory."
    partition_id = Detail(int)
    offset = Detail(int)
    end_offset = Detail(int)


class FrameError(RefusedError):
    """Bytes on the data plane are not a frame."""

    code = 1162
    summary = "not a frame of this protocol"
    hint = "The connection was closed; use a client with the same protocol version."
    size_bytes = Detail(int)


class UnpackError(CorruptBatchError):
    """The checksum of a packed batch is correct, but its content does not match its lengths,
    because the sender packed it incorrectly.
    """

    code = 1163
    summary = "the packed batch does not unpack"
    retry = RetryRule.NEVER
    hint = (
        "The batch is damaged for every reader. Skip its messages: open a Reader at offset + "
        "count; for a consumer group: keylane group reset SUBJECT GROUP --partition PARTITION --to "
        "OFFSET --live"
    )
    count = Detail(int)
    """The number of messages in the batch, the first of which is at `offset`."""
    size_bytes = Detail(int)
    """Sum of its lengths, in bytes."""
    unpacked_bytes = Detail(int)


class BrokerReadOnlyError(RefusedError):
    """The broker does not accept writes, because its disk is nearly full or a write has failed. The
    text says which.
    """

    code = 1170
    summary = "the broker takes no writes now"
    retry = RetryRule.LATER
    hint = "Its health page shows the reason: keylane broker health ADDRESS"
    broker_group = Detail(str)


class OverloadedError(RefusedError):
    """A server has reached a limit."""

    code = 1171
    summary = "too much in flight"
    retry = RetryRule.LATER
    hint = "Wait for answers before sending more."
    limit = Detail(int)
    """The limit that was reached."""
    retry_after_ms = Detail(int)
    cursor = Detail(int)
    """The cursor of a group that has too many acked ranges above it."""
    subjects = Detail(int)
    broker_group = Detail(str)
    subject = Detail(str)
    pattern = Detail(str)


class LeaseLostError(RefusedError):
    """A lease ended before `Message.ack` was called."""

    code = 1180
    summary = "the lease of this message's partition has ended"
    hint = "Stop handling it: another consumer will handle the message."
    partition_id = Detail(int)
    offset = Detail(int)
    token = Detail(int)
    """The token of the message."""
    current_token = Detail(int)
    """The highest token in the user's database."""


class QueueFullError(RefusedError):
    """`Producer.send` was called without await while the queue was full. The message is not
    queued.
    """

    code = 1181
    summary = "the producer's queue is full"
    retry = RetryRule.LATER
    hint = (
        "Await each send, or await producer.drain() and send it again. A "
        "cancelled send stays queued."
    )
    queued_bytes = Detail(int)


class SchemaError(RefusedError):
    """The tables of an outbox or of fenced effects cannot be used."""

    table = Detail(str)
    version = Detail(int)
    """The version of the tables."""
    wanted = Detail(int)


class EffectDoneError(RefusedError):
    """Another transaction has already committed the effect of this message, so this one must not
    commit.
    """

    code = 1274
    summary = "another transaction has committed the effect of this message meanwhile"
    hint = "Roll back. When the message is retried, it is skipped."
    partition_id = Detail(int)
    offset = Detail(int)


class DataLossError(OffsetOutOfRangeError):
    """Retention has removed rows of a stream or of a range that is being read."""

    code = 1295
    summary = "retention has removed rows of the range"
    hint = "The option failOnDataLoss=false continues after the loss; or begin later."
    subject = Detail(str)
    lost_until = Detail(int)
    """The end of the lost offsets, which begin at `offset`; None if the end of the partition is
    unknown.
    """
    rows = Detail(int)
    """The number of lost rows; None if it is unknown."""
    stored_before_ms = Detail(int)
    """The time before which all lost rows were stored, in milliseconds since 1970."""


class PublishError(RefusedError):
    """A hidden subject cannot be filled or published."""

    subject = Detail(str)
    target = Detail(str)
    published_id = Detail(int)
    """The id of the subject that was previously published under this name; None if there was none
    or its id is unknown.
    """
    filled_by = Detail(str)
    """The name of the other job."""
    groups = Detail(str)
    """The names of the groups, separated by commas."""
    group = Detail(str)
    partition_id = Detail(int)
    from_offset = Detail(int)
    """The offset of the first message that is missing."""
    messages = Detail(int)
    """The number of messages of this partition that are missing."""


class RowsError(RefusedError):
    """The rows that Spark writes cannot be stored in order. No part of the job is published."""

    task = Detail(int)
    partition_id = Detail(int)
    subject = Detail(str)
    """The hidden subject."""
    rows = Detail(int)
    """The number of rows of this partition that retention has removed."""
    row = Detail(int)
    offset = Detail(int)
    column = Detail(str)


class JobError(RefusedError):
    """Messages cannot be reprocessed, or the output cannot be used."""

    path = Detail(str)
    partition_id = Detail(int)
    job = Detail(str)
    start = Detail(int)
    """The first offset of the piece for which the job failed."""


class UnauthenticatedError(RefusedError):
    """A server with access control cannot identify the caller."""

    code = 1350
    summary = "the caller is not known"
    hint = (
        "Give a token of this cluster: token=, KEYLANE_TOKEN_FILE or KEYLANE_TOKEN. An "
        "administrator makes one with keylane access token create PRINCIPAL. If the client's "
        "certificate has expired, replace its files, and it continues by itself."
    )
    problem = Detail(str)


class AccessDeniedError(RefusedError):
    """The caller has been identified, but does not have the required right."""

    code = 1351
    summary = "the principal has no right to do this"
    hint = "keylane access list PRINCIPAL shows what is granted."
    principal = Detail(str)
    right = Detail(str)
    subject = Detail(str)
    group = Detail(str)


class CapabilityEndedError(RefusedError):
    """A capability has expired, or the rights of its principal have changed since it was issued."""

    code = 1352
    retry = RetryRule.LATER
    summary = "the capability has ended"
    hint = (
        "keylane's clients renew it by themselves; other clients ask a metaserver for a new one: "
        "POST /v1/access/capability"
    )
    principal = Detail(str)


class QuotaExceededError(RefusedError):
    """A principal or a subject exceeds its limit by so much that the call cannot wait."""

    code = 1357
    retry = RetryRule.LATER
    summary = "the quota is used up for a while"
    hint = "Try again after retry_after_ms. keylane access quota list shows the limits."
    principal = Detail(str)
    retry_after_ms = Detail(int)
    limit = Detail(int)


class ConnectionQuotaError(QuotaExceededError):
    """A principal already has the maximum number of connections to a broker."""

    code = 1358
    summary = "the principal has too many connections"
    hint = (
        "Close a connection, or raise the quota: keylane access quota set PRINCIPAL --connections N"
    )


class VersionError(RefusedError):
    """The versions of two programs are incompatible. Nothing was changed."""

    client = Detail(str)
    server = Detail(str)
    version = Detail(str)
    cluster = Detail(str)


def too_many_groups(where: str, limit: int) -> OverloadedError:
    """
    Return the error for a new consumer group that exceeds a limit.

    Args:
        where: "the subject" or the partition that has reached its limit.
        limit: the maximum number of groups.
    """
    error = OverloadedError(
        f"too many consumer groups: {where} has {limit}, and takes no more", limit=limit
    )
    error.hint = (
        "Delete groups that no program uses: keylane group delete SUBJECT GROUP. One that clients "
        "have made at a broker alone "
        "is not listed: it is known, and can be deleted, after keylane group create SUBJECT GROUP"
    )
    return error
