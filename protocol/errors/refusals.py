"""The refusals: settings that cannot work, and every answer that is no.  Pure."""

from __future__ import annotations

from .base import Fate, KeylaneError, Retry


class ConfigError(KeylaneError):
    """Settings or arguments that cannot work; nothing was started.  details: `problems`."""

    code = 1001
    summary = "the settings cannot work"
    hint = "Fix every setting listed, then start again."


class HandlerTypeError(ConfigError, TypeError):
    """A handler, or what it returned, is something whose body nobody would run."""

    code = 1010
    summary = "not a handler"
    hint = (
        "Give a function that does its work when it is called or awaited: no generator, no yield."
    )


class WorkerCancelledError(KeylaneError):
    """A task that runs handlers was cancelled, and not by its consumer: by a handler, or by other code of the program."""

    code = 1011
    summary = "a task that runs handlers was cancelled, and not by its consumer"
    hint = "The consumer has ended.  A handler must not cancel asyncio.current_task(), nor other code a task of the consumer."


class RefusedError(KeylaneError):
    """Root of the refusals: the answer was no.  Raised itself for a code of a newer peer."""

    code = 1100
    summary = "refused"
    hint = "Nothing was done.  If the answer is of a newer program, use a client of its version."


class InvalidNameError(RefusedError):
    """A name of a subject or group outside the rule.  details: `kind`, `name`."""

    code = 1101
    summary = "illegal name"
    hint = "Names match ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$."


class OffsetInvalidError(RefusedError):
    """A number that can be no offset of a message.  details: `offset`."""

    code = 1102
    summary = "not an offset"
    hint = "Offsets are whole numbers in [0, 2**63)."


class MessageTooLargeError(RefusedError):
    """Above a limit; nothing was queued or stored.  details: `size_bytes`, `limit_bytes`."""

    code = 1103
    summary = "message too large: key, value and properties count together"
    hint = "Store the large part elsewhere and send its address, or split it."


class InvalidRequestError(RefusedError):
    """No state of the system could satisfy it.  details: the numbers it is about, if any."""

    code = 1104
    summary = "the request makes no sense"
    hint = "Nothing was done.  Mend what the message names, then ask again."


class OriginError(RefusedError):
    """A browser calls for a web page of another site.  details: `origin`."""

    code = 1105
    summary = "a web page of another site may not call this server"
    hint = "Call it from a program, without an Origin header, or through a server of your own."


class ForeignHostError(RefusedError):
    """A request for a host name that is not this server's, as after DNS rebinding.  details: `host`."""

    code = 1106
    summary = "the request is for another host"
    hint = "Call the server as localhost, by its loopback address, or by the name it listens on."


class RequestTooSlowError(RefusedError):
    """The body of a request did not arrive whole in time.  details: `limit_ms`."""

    code = 1107
    retry = Retry.LATER
    summary = "the request did not arrive whole in time"
    hint = "Nothing was done.  Send the request in one go."


class BrokerAddressError(RefusedError):
    """A broker reports an address that is not loopback.  details: `address`."""

    code = 1108
    summary = "a broker's address must be a loopback address"
    hint = "Start the broker with --host 127.0.0.1, ::1 or localhost."


class SubjectUnknownError(RefusedError):
    """A subject that was never created.  details: `subject`."""

    code = 1110
    summary = "no such subject"
    hint = "Create it first: keylane subject create NAME"


class SubjectExistsError(RefusedError):
    """Created again with other settings.  details: `subject` and the settings it has."""

    code = 1111
    summary = "the subject exists already, with other settings"
    hint = "keylane subject describe NAME shows the settings it has."


class GroupUnknownError(RefusedError):
    """No consumer ever joined this group.  details: `subject`, `group`."""

    code = 1112
    summary = "no such consumer group on this subject"
    hint = "A group exists from its first consumer on."


class PartitionUnknownError(RefusedError):
    """Asked of a server that lacks it.  details: `partition_id`, where one is named."""

    code = 1113
    summary = "the broker does not hold this partition"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "keylane subject describe NAME lists a subject's partitions; a program asks the metaserver for the route again."


class StaleRouteError(RefusedError):
    """An append to a sealed partition.  details: `partition_id`, `end_offset`."""

    code = 1120
    summary = "the partition is sealed, the route has moved on"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the route again; nothing of this batch was stored."


class WrongBrokerError(RefusedError):
    """A broker was told of another group's partition.  details: `broker_group`, its own."""

    code = 1121
    summary = "another broker group than the caller meant"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the broker's address again."


class FencedError(RefusedError):
    """A token that is not the highest any more.  details: `token`, `current_token` if known."""

    code = 1130
    summary = "a newer owner has this partition"
    hint = "Stop handling it; what was not acked is with the newer owner."


class SessionUnknownError(RefusedError):
    """A session that the metaserver does not have any more.  details: `session`."""

    code = 1131
    summary = "the session is unknown, or its ttl has passed"
    hint = "Join again with a new session; the old leases are gone."


class TokenUnknownError(RefusedError):
    """A token that was never granted, or not to this session.  details: `token`."""

    code = 1132
    summary = "no such grant"
    hint = "Use the token of the last grant of the metaserver."


class SequenceGapError(RefusedError):
    """A batch came before an earlier one.  details: `expected`, `sequence`, `count`."""

    code = 1140
    summary = "an earlier batch of this producer is missing"
    retry = Retry.LATER
    hint = "Send the batches again from the expected sequence on."


class ProducerFencedError(RefusedError):
    """A producer id is in use with a higher epoch.  details: `epoch`, `current_epoch`."""

    code = 1141
    summary = "a newer epoch of this producer is at work"
    hint = "Close this producer."


class SequenceReusedError(RefusedError):
    """A batch under a sequence that is taken, and none of those remembered.  details: `sequence`, `count`, `expected`."""

    code = 1142
    summary = "another producer sends under this producer's id: the batch is not stored"
    hint = "Send it again under a new producer id, drawn at random; keylane's own producer does so by itself."


class ForkedError(RefusedError):
    """A producer, consumer or reader that was open when its process was forked is used in the child.  No details."""

    code = 1143
    summary = "it was open when this process was forked: its connections are the parent's"
    hint = "Open it after the fork: in each process one of its own."


class OtherLoopError(RefusedError):
    """A producer, consumer or reader is used outside of the event loop that it was opened in.  No details."""

    code = 1144
    summary = "used outside of the event loop that it was opened in"
    hint = (
        "Open one in each event loop, or come back to its loop: asyncio.run_coroutine_threadsafe."
    )


class AlreadyOpenError(RefusedError):
    """A producer, consumer or reader is opened while it is open, or not yet closed whole.  No details."""

    code = 1145
    summary = "it is open already"
    hint = "Close it first, or make another one."


class StrategyMismatchError(RefusedError):
    """A producer expects another strategy.  details: `subject`, `stored`, `asked`."""

    code = 1150
    summary = "the strategy differs from the one stored for the subject"
    hint = "Leave the strategy out, or use the stored one; keylane subject describe NAME shows it."


class NotEnoughBrokersError(RefusedError):
    """No broker can take the partitions.  details: `broker_group` or `subject`."""

    code = 1151
    summary = "no broker group is available"
    retry = Retry.LATER
    hint = "Start a broker, or wait until one has reported itself."


class NoPartitionError(RefusedError):
    """Given up before a partition took it, as by a producer that closes.  No details."""

    code = 1152
    summary = "no open partition for this message now"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Send it again, with a producer that stays open until it is acked (await `send`)."


class OperationRunningError(RefusedError):
    """A second change of partitions at once.  details: `subject`, `operation_id`."""

    code = 1153
    summary = "another operation on this subject is not finished"
    retry = Retry.LATER
    hint = "keylane subject operations NAME shows how far it is, and what it waits for."


class BrokerGroupUnknownError(RefusedError):
    """A broker group that never reported itself.  details: `broker_group`."""

    code = 1154
    summary = "no such broker group"
    hint = "keylane broker list shows the broker groups that there are."


class GroupStrategyError(RefusedError):
    """A consumer joins a group that consumes in another way than it says: exclusive, or shared."""

    code = 1155
    summary = "the group consumes in another way"
    hint = (
        "Join with the group's strategy, or change it: keylane group switch SUBJECT GROUP STRATEGY"
    )


class OperationUnknownError(RefusedError):
    """An operation on partitions is named that never was."""

    code = 1156
    summary = "no such operation"
    hint = "keylane subject operations NAME lists the latest ones of a subject."


class OperationForwardError(RefusedError):
    """An operation is to be canceled that may have sealed a partition: it can only go on."""

    code = 1157
    summary = "the operation may have sealed something, and only goes forward"
    hint = "Let it come to its end; keylane subject operations NAME says what it waits for."


class CreationRunningError(RefusedError):
    """A broker group is to be left on which a new subject is about to begin.  details: `subject`, `broker_group`."""

    code = 1159
    summary = "a subject is still being created with partitions there"
    retry = Retry.LATER
    hint = "The creation ends by itself when its brokers answer; then ask again."


class BrokerCordonedError(RefusedError):
    """A partition is to go to a broker group that takes no new ones, by an operator's word."""

    code = 1158
    summary = "the broker group is cordoned"
    hint = "Choose another one, or: keylane broker uncordon GROUP"


class OffsetOutOfRangeError(RefusedError):
    """A read outside of what is kept.  details: `offset`, `first_offset`, `next_offset`."""

    code = 1160
    summary = "no such offset in the partition"
    hint = "Read within [first_offset, next_offset)."


class CorruptBatchError(RefusedError):
    """Checksum or lengths do not fit the bytes.  details: what contradicts each other."""

    code = 1161
    summary = "the bytes of the batch are damaged"
    retry = Retry.LATER
    hint = "Send it again; if it repeats, look at the network or the memory of the machine."


class FrameError(RefusedError):
    """Bytes on the data plane that are no frame.  details: `size_bytes`, if that is wrong."""

    code = 1162
    summary = "not a frame of this protocol"
    hint = "The connection is closed; use a client of the same protocol version."


class BrokerReadOnlyError(RefusedError):
    """The disk is nearly full, or a write failed; the message says which.  No details."""

    code = 1170
    summary = "the broker takes no writes now"
    retry = Retry.LATER
    hint = "Its health page says why: keylane broker health ADDRESS"


class OverloadedError(RefusedError):
    """A server holds as much as it may.  details: the `limit`, or `retry_after_ms`."""

    code = 1171
    summary = "too much in flight"
    retry = Retry.LATER
    hint = "Wait for answers before sending more."


class LeaseLostError(RefusedError):
    """`Message.ack` after the lease has ended.  details: `partition_id`, `offset`."""

    code = 1180
    summary = "the lease of this message's partition has ended"
    hint = "Do not go on with it: another consumer will handle the message."


class QueueFullError(RefusedError):
    """`Producer.send`, not awaited, while its queue is full; nothing is queued.  details: `queued_bytes`."""

    code = 1181
    summary = "the producer's queue is full"
    retry = Retry.LATER
    hint = "Await each send, or await producer.drain() and send it again."


class StaticSubjectError(RefusedError):
    """A change of the number of queues of a static subject.  details: `subject`, `queues`."""

    code = 1190
    summary = "the number of queues of a static subject never changes"
    hint = "Its queues can go elsewhere: keylane subject move PARTITION --to GROUP"


class SubjectNotStaticError(RefusedError):
    """Queues asked of a subject without fixed ones.  details: `subject`."""

    code = 1191
    summary = "the subject has no fixed logic queues"
    hint = "Only a subject made with them has: keylane subject create NAME --static --queues N"


class QueueUnknownError(RefusedError):
    """A queue that the subject does not have.  details: `queue`."""

    code = 1192
    summary = "no such logic queue"
    hint = "keylane subject queues NAME shows them."


class GroupBusyError(RefusedError):
    """A group's progress cannot be set under its live consumers."""

    code = 1193
    retry = Retry.LATER
    summary = "the consumer group has live consumers"
    hint = (
        "Stop them, or wait until the ttl of those that died has passed, and no other reset runs."
    )


class FolderBehindError(RefusedError):
    """A broker's data folder lacks what the broker group had.  details: `broker_group`, `address`, `log_end`, `known_log_end`."""

    code = 1220
    summary = "the data folder is an older copy of the broker group's"
    hint = (
        "Start the broker on the folder that was in use last.  If that is gone, and what this one lacks is given up: "
        "keylane broker accept GROUP"
    )


class DatabaseEmptyError(RefusedError):
    """The metaserver's database knows no subject, and a broker has partitions.  details: `broker_group`, `partitions`."""

    code = 1221
    summary = "the metaserver's database is empty, and a broker has partitions"
    retry = Retry.LATER
    hint = (
        "Start the metaserver with the database that was in use, or make it anew from the brokers: "
        "keylane meta rebuild"
    )


class PartitionInUseError(InvalidRequestError):
    """A new partition has the number of one that its broker has in use.  details: `partition_id` and what it has."""

    code = 1222
    summary = "the broker has this partition in use already"
    hint = (
        "The number was given away before: the metaserver's database is older than the broker.  keylane meta verify "
        "compares them, keylane meta rebuild makes the database anew."
    )


class CreationFailedError(RefusedError):
    """A broker refused a new subject's partition for good.  details: `subject`."""

    code = 1223
    summary = "the subject could not be created"
    hint = "Nothing is open; create it again once the reason is gone.  keylane meta verify compares database and brokers."


class LossAcceptedError(RefusedError):
    """A data folder comes back whose loss an operator has accepted.  details: `broker_group`."""

    code = 1224
    summary = "the loss of this data folder was accepted, and others go on without it"
    hint = "Keep the folder to look into it, and start the broker with an empty one."


class AcceptedAsLostError(RefusedError):
    """A message may have been stored on a disk whose loss was accepted.  details: `partition_id`."""

    code = 1225
    fate = Fate.UNKNOWN
    summary = "the message may have been in a partition that was accepted as lost"
    hint = "It may have been handled before the loss.  Send it again if handling it twice does no harm."
