"""Every error raised on purpose, with a code that never changes, a fate and advice; errors on the
wire.  Pure.

    KeylaneError                       .code .fate .retry .hint .details
    ├── ConfigError                    settings impossible, all problems at once
    │   ├── HandlerTypeError           a handler whose body would never run; also a TypeError
    │   │   └── CallbackTypeError      on_assigned and its like cannot be called with partition ids
    │   ├── HandlerTwiceError          two functions of one consumer for a subject and a group
    │   ├── CertificateFileError, CertificateKeyError      files of a certificate and its key
    │   ├── BackupFileError, DatabaseInUseError    a backup that cannot be made or restored
    │   ├── SchemaTooNewError          a database of a newer keylane, which this one cannot use
    │   └── TokenInvalidError          a token that cannot be one, or a file of it that cannot be read
    ├── WorkerCancelledError           the tasks that run handlers were cancelled, and not by their consumer
    ├── RefusedError                   the answer was no; nothing was done
    │   ├── InvalidNameError, OffsetInvalidError, MessageTooLargeError, InvalidRequestError
    │   │   └── TokenInUrlError                            a token stands in a URL
    │   ├── UnauthenticatedError, CapabilityEndedError     the caller is not known, or not any more
    │   ├── AccessDeniedError, TokenIdUnknownError, AccessOffError
    │   ├── OriginError, ForeignHostError                  a web page of another site
    │   ├── ClientTooOldError, ServerTooOldError           more than one minor version apart
    │   ├── OtherClusterError                              a database or metaserver of another cluster
    │   ├── UpgradeSkippedError, MemberTooOldError    a server that the cluster's version does not allow
    │   ├── RequestTooSlowError                            the whole request did not arrive in time
    │   ├── HandshakeError                                 no TLS connection was made
    │   ├── BrokerAddressError                             a broker names an address that is not loopback
    │   ├── SubjectUnknownError, SubjectExistsError, GroupUnknownError, PartitionUnknownError
    │   ├── SubjectDeletedError, GroupDeletedError         a namesake is another subject or group
    │   ├── StaleRouteError, WrongBrokerError              ask for a new route
    │   ├── FencedError, SessionUnknownError, TokenUnknownError   stop: another session owns the partition
    │   ├── InstanceTakenError                             stop: the instance was started anew
    │   ├── SequenceGapError, ProducerFencedError          an earlier batch is missing
    │   ├── SequenceReusedError                            two producers under one id
    │   ├── IdempotencyKeyReusedError                      other messages under an idempotency key
    │   ├── ForkedError, OtherLoopError, AlreadyOpenError  raised by the client: not open here
    │   ├── ForkReturnedError                              ends the child of a fork
    │   ├── OtherTaskError, MixedUseError                  raised by a consumer without a handler
    │   ├── SeekRefusedError                               a consumer does not set the progress of its group
    │   ├── GroupFilterError                               another member of the group leaves other messages out
    │   ├── StrategyMismatchError, NotEnoughBrokersError, NoPartitionError
    │   ├── OperationRunningError, OperationUnknownError, OperationForwardError, GroupStrategyError
    │   ├── BrokerGroupUnknownError, BrokerCordonedError, CreationRunningError
    │   ├── OffsetOutOfRangeError, CorruptBatchError (UnpackError), FrameError
    │   │   └── DataLossError          retention has removed rows of a range that is read
    │   ├── BrokerReadOnlyError, OverloadedError           try later
    │   │   └── AnswerNotTakenError        a client takes no answer; its fate is UNKNOWN
    │   ├── FolderBehindError, FolderGivenUpError          this data folder must not be used any more
    │   ├── DatabaseEmptyError, CreationFailedError, PartitionInUseError    the database lacks what brokers have
    │   ├── AcceptedAsLostError                            raised by the client; its fate is UNKNOWN
    │   ├── OutboxMissingError, OutboxOlderError, OutboxNewerError    the tables of an outbox
    │   ├── SinkMissingError, SinkOlderError, SinkNewerError    the tables of fenced effects
    │   ├── EffectDoneError                                committed by another transaction meanwhile
    │   ├── OutboxRowFailedError                           its fate is UNKNOWN
    │   ├── OutboxSubjectExistsError                       waiting rows stay while their subject exists
    │   ├── DeliverAtError, DeliverAtKeyError, ScheduleFullError,
    │   ├── ScheduledUnknownError, ScheduledTakenError     later delivery
    │   ├── ParkFullError, ParkMovedError, ParkedKeyUnknownError    parked messages
    │   ├── GroupExistsError, PolicyInvalidError, RetryPolicyError, SuspendedClientsError    settings of a consumer group
    │   ├── ResetCanceledError, ResetForwardError          a reset that was canceled, or cannot be
    │   ├── ParkedMessageUnknownError, ParkedKeyAmbiguousError, EditsFullError, ParkedRedrivenError    edits of them
    │   ├── ManifestError, JobChangedError, CutOverError, CompareError   a folder of reprocessed messages
    │   ├── SubjectHiddenError, PublishTargetError, PublishOutdatedError, PublishGroupsError,
    │   ├── PublishBehindError, PublishCursorsError, HiddenTakenError    hidden subjects
    │   ├── RowsDifferError, RowsRemovedError, RowOrderError, RowsInvalidError, CommitUnknownError    writes of Spark
    │   ├── StaticSubjectError, SubjectNotStaticError, QueueUnknownError, GroupBusyError
    │   ├── QueueFullError, CodecError                     raised by the client
    │   └── LeaseLostError                                 raised by the client: another session owns the partition
    │       └── EffectFencedError                          the user's database has seen a higher token
    ├── UnreachableError               no answer of a keylane server
    │   ├── NotSentError               nothing was done
    │   │   ├── CertificateNameError, CertificateEndedError, CertificateEarlyError, CertificateUnknownError
    │   │   └── TlsNeededError, TlsMissingError, ClientCertificateError    only one side has TLS, or a certificate
    │   ├── OutcomeUnknownError        it may have been done
    │   ├── ForeignServerError         the program at that address is no keylane server
    │   └── ResetUnfinishedError, GroupStartUnfinishedError, CreationUnfinishedError    a part of it was done; a repeat finishes it
    ├── PartlyStoredError              some messages of an HTTP request are stored, others are not
    ├── DeliveryError                  a producer gave messages up
    │   ├── GivenUpError                                   by flush and close: messages whose futures were never awaited
    │   ├── DeliveryTimeoutError, KeyHaltedError           by `await send`; producer.resume(error) resumes the key
    │   ├── PartlyQueuedError                              by send_all
    │   └── RowsRefusedError, RowsGivenUpError, RowsUnfinishedError    by send_arrow
    ├── RangeUnreadableError           a broker was away for longer than a reader of a range waits
    ├── JsonValueError                 a value does not fit the schema of a reader
    ├── ReadFilterError                the `where` of a reader failed
    ├── FilterError                    the `filter` of a consumer failed: a failed try of that message
    ├── HandlerTimeoutError            a handler did not return within `handler_timeout_ms`: a failed try of its message
    ├── StorageError                   .operation .path
    │   ├── CorruptLogError, DiskFullError, FlushFailedError
    │   ├── CorruptIndexError          the next start makes the index anew from the log
    │   └── DataFolderError            not writable, in use, or another broker's
    ├── AddressError                   port in use, or no port
    │   └── HostError                  other machines reach it, and there is no TLS
    ├── JavaMissingError, SparkProcessError, JobFailedError
    ├── NotStreamableError, CheckpointMismatchError    a stream of Spark ends
    ├── StoryError, StoryStuckError, ConditionNotMetError, ProgramFailedError, RealWorldError   a test in virtual time
    ├── InputError, InputUnfinishedError   a command's input cannot be read; not every line of it is stored
    ├── ClusterFolderError             the folder for a new cluster is not empty
    └── ClosedError                    used after close (yours, not the peer's)

`fate` says whether the failed request may have been done.  A request that is NOT_DONE may always be
repeated.  One that is UNKNOWN may be repeated if the receiver recognises the repeat, as a broker
does by (producer id, epoch, sequence). The names may change; a code may not (golden test).  Source:
Kafka's Errors table, Maelstrom's definite and indefinite errors, litestream's hints.
"""

from __future__ import annotations

from typing import Any

from .access import *  # noqa: F403 - the rest of the tree
from .base import KIND_BY_CODE, hint_of
from .base import Fate as Fate
from .base import KeylaneError as KeylaneError
from .base import RetryRule as RetryRule
from .consuming import *  # noqa: F403 - the rest of the tree
from .deletions import *  # noqa: F403 - the rest of the tree
from .failures import *  # noqa: F403 - the rest of the tree
from .groups import *  # noqa: F403 - the rest of the tree
from .homes import *  # noqa: F403 - the rest of the tree
from .outbox import *  # noqa: F403 - the rest of the tree
from .parked import *  # noqa: F403 - the rest of the tree
from .publications import *  # noqa: F403 - the rest of the tree
from .reading import *  # noqa: F403 - the rest of the tree
from .refusals import *  # noqa: F403 - the rest of the tree
from .refusals import RefusedError
from .reprocess import *  # noqa: F403 - the rest of the tree
from .scheduled import *  # noqa: F403 - the rest of the tree
from .sink import *  # noqa: F403 - the rest of the tree
from .streaming import *  # noqa: F403 - the rest of the tree
from .testing import *  # noqa: F403 - the rest of the tree
from .transport import *  # noqa: F403 - the rest of the tree
from .versions import *  # noqa: F403 - the rest of the tree

TEXT_CHARS_MAX = 4_096
"""An error that quotes its input stays smaller than a frame."""
HINT_CHARS_MAX = 1_024
"""A hint is a line or two, also that of a foreign server."""


def kind_of(code: int) -> type[KeylaneError] | None:
    """The class of a code; None for a code of a newer version."""
    return KIND_BY_CODE.get(code)


def codes() -> dict[int, str]:
    """Every code and the name of its class, for the golden test and the docs."""
    return {code: kind.__name__ for code, kind in sorted(KIND_BY_CODE.items())}


def wire_text(text: str) -> str:
    """`text` as every peer can decode it: at most TEXT_CHARS_MAX characters, without lone
    surrogates.
    """
    return text[:TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def wire_details(error: KeylaneError) -> dict[str, Any]:
    """The details of `error` as JSON and msgpack carry them: numbers, and every other value as
    text.
    """
    return {
        wire_text(name): value
        if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
        else wire_text(str(value))
        for name, value in error.details.items()
    }


def wire_hint(error: KeylaneError) -> str:
    """The hint of `error` as the wire carries it, at most HINT_CHARS_MAX characters."""
    return wire_text(error.hint)[:HINT_CHARS_MAX]


def own_hint(error: KeylaneError) -> str:
    """The hint that `error` was given, as the wire carries it; "" if it has that of its class and
    details.
    """
    return "" if error.hint == hint_of(type(error), error.details) else wire_hint(error)


def error_from_wire(
    code: int, message: str, details: dict[str, Any], hint: str = ""
) -> KeylaneError:
    """
    The error that a peer sent, of its code's class; a plain RefusedError if the code is unknown.

    `hint` goes before that of the class, if the peer sent one; it is cut to HINT_CHARS_MAX.
    """
    kind = kind_of(code) or RefusedError
    error = kind(message, **details)
    if hint and hint != kind.hint:
        error.hint = hint[:HINT_CHARS_MAX]
    return error


__all__ = sorted(["Fate", "RetryRule"] + [kind.__name__ for kind in KIND_BY_CODE.values()])
