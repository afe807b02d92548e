"""Impossible settings, and the refusals: answers of servers and clients that nothing was done.
Pure.
"""

from __future__ import annotations

from .base import Detail, Fate, KeylaneError, RetryRule


class ConfigError(KeylaneError):
    """Settings or arguments that cannot work; nothing was started."""

    code = 1001
    summary = "the settings cannot work"
    hint = "Nothing was started.  Fix everything that the message names, then try again."
    problems = Detail(int)
    """The number of problems."""
    path = Detail(str)
    """The settings file that cannot be read."""


class HandlerTypeError(ConfigError, TypeError):
    """
    A handler whose body would never run: a generator function, a function of other arguments than
    one message, or one that returns something that must be run.
    """

    code = 1010
    summary = "not a handler"
    hint = (
        "Give a function that takes one message and does its work when called or awaited: not a "
        "generator, no yield."
    )


class WorkerCancelledError(KeylaneError):
    """All tasks of the event loop were cancelled, those that run handlers too, and the program went
    on.
    """

    code = 1011
    summary = "a task that runs handlers was cancelled, and not by its consumer"
    hint = (
        "The consumer has ended.  Code of the program must not cancel every task of the event loop "
        "and then go on."
    )


class RefusedError(KeylaneError):
    """Root of the refusals.  Raised itself for an error code of a newer version."""

    code = 1100
    summary = "refused"
    hint = (
        "Nothing was done.  If the answer comes from a newer program, use a client of its version."
    )


class InvalidNameError(RefusedError):
    """A name of a subject or group is illegal."""

    code = 1101
    summary = "illegal name"
    hint = (
        "Names match ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$: letters, digits, dots, hyphens and "
        "underscores, "
        "with a letter or a digit first."
    )
    kind = Detail(str)
    name = Detail(str)
    """The first 80 characters of the name as it was given."""


class OffsetInvalidError(RefusedError):
    """A value cannot be an offset of a message."""

    code = 1102
    summary = "not an offset"
    hint = "Offsets are whole numbers in [0, 2**63)."
    offset = Detail(str)


class MessageTooLargeError(RefusedError):
    """A message is over a limit; nothing was queued or stored."""

    code = 1103
    summary = "message too large: key, value and properties count together"
    hint = "Store the large part elsewhere and send a reference to it, or split it."
    size_bytes = Detail(int)
    limit_bytes = Detail(int)


class InvalidRequestError(RefusedError):
    """A request is invalid in every state of the system."""

    code = 1104
    summary = "the request makes no sense"
    hint = "Nothing was done.  Fix what the message names, then try again."
    partition_id = Detail(int)
    address = Detail(str)
    unknown_call = Detail(int)
    """1 if the server does not have the call."""


class OriginError(RefusedError):
    """A browser calls for a web page of another site."""

    code = 1105
    summary = "a web page of another site may not call this server"
    hint = "Call it from a program, without an Origin header, or through your own server."
    origin = Detail(str)


class ForeignHostError(RefusedError):
    """A request names a host that is not this server, as after DNS rebinding."""

    code = 1106
    summary = "the request is for another host"
    hint = "Call the server as localhost, by its loopback address, or by the name it listens on."
    host = Detail(str)


class RequestTooSlowError(RefusedError):
    """The whole body of a request did not arrive in time."""

    code = 1107
    retry = RetryRule.LATER
    summary = "the request did not arrive whole in time"
    hint = "Nothing was done.  Send the request in one go."
    limit_ms = Detail(int)


class HandshakeError(RefusedError):
    """What came to a TLS port began no TLS connection: other bytes, another version, or a
    certificate that is refused.
    """

    code = 1392
    summary = "no TLS connection was made"
    hint = (
        "Connect with TLS 1.3; where tls_client_ca is set, also with a certificate it has signed."
    )
    reason = Detail(str)
    """In OpenSSL's words."""


class BrokerAddressError(RefusedError):
    """A broker reports an address that means no machine, or that is not loopback where the
    metaserver serves no TLS.
    """

    code = 1108
    summary = "a broker's address must be one that the cluster may use"
    hint = (
        "Start the broker on 127.0.0.1, ::1 or localhost, or give the metaserver "
        "and all brokers TLS."
    )
    address = Detail(str)


class SubjectUnknownError(RefusedError):
    """The subject was never created, and the metaserver's setting `auto_create` does not have the
    first message do it.
    """

    code = 1110
    summary = "no such subject"
    hint = (
        "Check the name: keylane subject list shows all subjects, keylane subject create NAME "
        "creates one."
    )
    subject = Detail(str)


class SubjectExistsError(RefusedError):
    """Created again with other settings."""

    code = 1111
    summary = "the subject exists already, with other settings"
    hint = "keylane subject describe NAME shows its settings."
    subject = Detail(str)
    order_strategy = Detail(str)
    partitions = Detail(int)
    retention = Detail(str)
    static = Detail(bool)


class GroupUnknownError(RefusedError):
    """No consumer has ever joined the group."""

    code = 1112
    summary = "no such consumer group on this subject"
    hint = (
        "A group begins to exist with its first consumer, or with keylane group "
        "create SUBJECT NAME."
    )
    subject = Detail(str)
    group = Detail(str)


class PartitionUnknownError(RefusedError):
    """The broker that was asked does not host the partition."""

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


class StaleRouteError(RefusedError):
    """An append to a partition that is sealed."""

    code = 1120
    summary = "the partition is sealed, the route has moved on"
    retry = RetryRule.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the route again; nothing of this batch was stored."
    partition_id = Detail(int)
    end_offset = Detail(int)
    """The end of the partition."""


class WrongBrokerError(RefusedError):
    """A request for a partition of another broker group."""

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
    """The highest token that the broker has seen; None if it does not know the caller's."""


class SessionUnknownError(RefusedError):
    """The metaserver does not know the session, or no longer."""

    code = 1131
    summary = "the session is unknown, or its ttl has passed"
    hint = "Join again with a new session; the old leases have ended."
    session = Detail(str)


class InstanceTakenError(RefusedError):
    """A process that was started later has this consumer's instance name in its group."""

    code = 1267
    summary = "another process has taken this consumer's instance name"
    hint = "Give each consumer of a group its own instance name; the one started last continues."
    instance = Detail(str)
    subject = Detail(str)
    group = Detail(str)


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
    """A batch has sequences that are stored already, and is no repeat of a batch that the broker
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


class IdempotencyKeyReusedError(RefusedError):
    """A request has the idempotency key of an earlier request with other messages."""

    code = 1146
    summary = "the idempotency key was used for other messages"
    hint = (
        "Nothing of this request was stored there.  Use a new key for a new request; a repeat must "
        "have the same messages."
    )
    partition_id = Detail(int)
    base_offset = Detail(int)
    """Offset of the first message that was stored under the key."""


class StrategyMismatchError(RefusedError):
    """The order strategy of a producer is not the subject's."""

    code = 1150
    summary = "the strategy differs from the one stored for the subject"
    hint = "Leave the strategy out, or use the stored one; keylane subject describe NAME shows it."
    subject = Detail(str)
    stored = Detail(str)
    asked = Detail(str)


class NotEnoughBrokersError(RefusedError):
    """No available broker group can take the partitions."""

    code = 1151
    summary = "no broker group is available"
    retry = RetryRule.LATER
    hint = (
        "Start a broker, free space on its disk, or uncordon one: keylane broker list shows why a "
        "broker gets no partitions."
    )
    subject = Detail(str)
    broker_group = Detail(str)


class NoPartitionError(RefusedError):
    """A message was refused because its logical partition has no open partition now."""

    code = 1152
    summary = "no open partition for this message now"
    retry = RetryRule.AFTER_NEW_ROUTE
    hint = (
        "Send it again: its partitions are being changed.  keylane subject "
        "operations NAME shows how."
    )


class OperationRunningError(RefusedError):
    """A change of partitions is requested while another one runs on the subject."""

    code = 1153
    summary = "another operation on this subject is not finished"
    retry = RetryRule.LATER
    hint = "keylane subject operations NAME shows its progress and what it waits for."
    subject = Detail(str)
    operation_id = Detail(int)


class BrokerGroupUnknownError(RefusedError):
    """The broker group has never reported itself."""

    code = 1154
    summary = "no such broker group"
    hint = "keylane broker list shows all broker groups."
    broker_group = Detail(str)


class GroupStrategyError(RefusedError):
    """A consumer joins with another consume strategy than the group's."""

    code = 1155
    summary = "the group consumes in another way"
    hint = (
        "Join with the group's strategy, or change it: keylane group switch SUBJECT GROUP STRATEGY"
    )
    stored = Detail(str)
    asked = Detail(str)


class OperationUnknownError(RefusedError):
    """The operation does not exist."""

    code = 1156
    summary = "no such operation"
    hint = "keylane subject operations NAME lists the latest operations of a subject."
    operation_id = Detail(int)


class OperationForwardError(RefusedError):
    """An operation cannot be canceled, because it may have sealed a partition."""

    code = 1157
    summary = "the operation may have sealed something, and only goes forward"
    hint = "Wait until it is done; keylane subject operations NAME says what it waits for."
    operation_id = Detail(int)
    state = Detail(str)


class CreationRunningError(RefusedError):
    """A broker group cannot be evacuated while a subject is created with partitions on it."""

    code = 1159
    summary = "a subject is still being created with partitions there"
    retry = RetryRule.LATER
    hint = "The creation finishes by itself once its brokers answer; then try again."
    subject = Detail(str)
    broker_group = Detail(str)


class BrokerCordonedError(RefusedError):
    """A partition cannot move to a broker group that an operator has cordoned."""

    code = 1158
    summary = "the broker group is cordoned"
    hint = "Choose another broker group, or: keylane broker uncordon GROUP"
    broker_group = Detail(str)


class OffsetOutOfRangeError(RefusedError):
    """A read is outside of the stored offsets."""

    code = 1160
    summary = "no such offset in the partition"
    hint = "Read within [first_offset, next_offset)."
    partition_id = Detail(int)
    offset = Detail(int)
    """The requested offset."""
    first_offset = Detail(int)
    """The first offset that is still stored."""
    next_offset = Detail(int)
    """One past the last offset that may be read."""


class CorruptBatchError(RefusedError):
    """A checksum or the lengths of a batch do not fit its bytes."""

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


class BrokerReadOnlyError(RefusedError):
    """The disk is nearly full, or a write failed; the message says which."""

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
    """The limit that is reached."""
    retry_after_ms = Detail(int)
    cursor = Detail(int)
    """The cursor of a group that has too many ranges acked above it."""
    subjects = Detail(int)


class AnswerNotTakenError(OverloadedError):
    """A client has taken no part of its answer in time, and is disconnected; what it asked for may
    be done.
    """

    code = 1391
    fate = Fate.UNKNOWN
    summary = "the client does not take its answer"
    hint = "Read answers as they arrive, or ask for less at once."


class LeaseLostError(RefusedError):
    """Raised by `Message.ack` after the lease has ended."""

    code = 1180
    summary = "the lease of this message's partition has ended"
    hint = "Stop handling it: another consumer will handle the message."
    partition_id = Detail(int)
    offset = Detail(int)


class QueueFullError(RefusedError):
    """Raised by `Producer.send` without await while the queue is full; the message is not
    queued.
    """

    code = 1181
    summary = "the producer's queue is full"
    retry = RetryRule.LATER
    hint = (
        "Await each send, or await producer.drain() and send it again.  A "
        "cancelled send stays queued."
    )
    queued_bytes = Detail(int)


class CodecError(RefusedError):
    """A codec failed: raised by `Producer.send`, which has queued nothing, and by
    `Message.decode`.
    """

    code = 1149
    summary = "a codec failed"
    hint = "The cause is the codec's own error.  Sender and receiver need the same codec."
    codec = Detail(str)
    subject = Detail(str)
    partition_id = Detail(int)
    offset = Detail(int)


class StaticSubjectError(RefusedError):
    """A call would merge or rearrange the logic queues of a static subject."""

    code = 1190
    summary = "a static subject keeps its queues: it can only be given more"
    hint = (
        "Split queues with keylane subject grow NAME; move them with keylane subject move "
        "PARTITION --to GROUP"
    )
    subject = Detail(str)
    queues = Detail(int)


class SubjectNotStaticError(RefusedError):
    """A call needs logic queues, and the subject is not static."""

    code = 1191
    summary = "the subject has no fixed logic queues"
    hint = "Only a static subject has queues: keylane subject create NAME --static --queues N"
    subject = Detail(str)


class QueueUnknownError(RefusedError):
    """The subject does not have the logic queue."""

    code = 1192
    summary = "no such logic queue"
    hint = "keylane subject queues NAME lists the queues."
    subject = Detail(str)
    queue = Detail(int)


class GroupBusyError(RefusedError):
    """A group's progress cannot be set under its live consumers."""

    code = 1193
    retry = RetryRule.LATER
    summary = "the consumer group has live consumers"
    hint = "Stop these consumers, or wait until the ttl of those that died has passed."
    left_ms = Detail(int)
    """How long a running reset may still take."""
    sessions = Detail(int)
    """The number of live consumers."""


class FolderBehindError(RefusedError):
    """A data folder lacks messages that the broker group had."""

    code = 1220
    summary = "the data folder is an older copy of the broker group's"
    hint = (
        "Start the broker on the folder that was last in use.  If that folder is lost, and you "
        "give up what this one lacks: keylane broker accept GROUP"
    )
    broker_group = Detail(str)
    address = Detail(str)
    log_end = Detail(int)
    known_log_end = Detail(int)


class DatabaseEmptyError(RefusedError):
    """The metaserver's database lacks what brokers have: it is empty beside their partitions, or it
    went back.
    """

    code = 1221
    summary = "the metaserver's database lacks what brokers have"
    retry = RetryRule.LATER
    hint = (
        "Start the metaservers with the database that was in use, or stop them and make an empty "
        "one from the brokers: "
        "keylane meta rebuild.  keylane meta verify shows each difference."
    )
    broker_group = Detail(str)
    partitions = Detail(int)


class PartitionInUseError(InvalidRequestError):
    """A new partition has the id of a partition that the broker has in use."""

    code = 1222
    summary = "the broker has this partition in use already"
    hint = (
        "The number was already assigned: the metaserver's database is older than the broker.  "
        "keylane meta verify compares them, keylane meta rebuild rebuilds the database."
    )
    next_offset = Detail(int)


class CreationFailedError(RefusedError):
    """A broker refused a partition of a new subject, and a repeat cannot help."""

    code = 1223
    summary = "the subject could not be created"
    hint = (
        "Nothing was opened; create it again once the cause is fixed.  keylane meta verify "
        "compares database and brokers."
    )
    subject = Detail(str)


class FolderGivenUpError(RefusedError):
    """A broker is started on a data folder whose loss an operator has accepted."""

    code = 1224
    summary = "the loss of this data folder was accepted, and others go on without it"
    hint = "Keep the folder for inspection, and start the broker with an empty one."
    broker_group = Detail(str)


class AcceptedAsLostError(RefusedError):
    """A message may have been stored in a partition whose loss was accepted."""

    code = 1225
    fate = Fate.UNKNOWN
    summary = "the message may have been in a partition that was accepted as lost"
    hint = (
        "It may have been handled before the loss.  Send it again only if handling it "
        "twice does no harm."
    )
    partition_id = Detail(int)
