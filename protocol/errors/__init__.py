"""Every error that is raised on purpose, with a code that never changes, a fate and a hint. Also
converts errors for the wire. Pure.

A class stands for one way in which a program can react to an error. If a class has several causes,
`reasons.py` has a row for each: `error.reason`.

    KeylaneError                       .code .reason .fate .retry .hint .details
    ├── ConfigError                    invalid settings; lists all problems
    │   ├── HandlerTypeError           a handler whose body would never run; also a TypeError
    │   └── MissingExtraError          a package of an extra is not installed; also an ImportError
    ├── RefusedError                   the answer was no; nothing was done
    │   ├── InvalidRequestError, MessageTooLargeError     wrong in every state of the system
    │   ├── UsageError                 a client is used where it is not open, or in two ways
    │   ├── UnauthenticatedError, CapabilityEndedError    the caller is not known, or no longer
    │   ├── AccessDeniedError
    │   ├── QuotaExceededError, ConnectionQuotaError      a limit of the caller
    │   ├── OverloadedError, QueueFullError               a limit of the server, of the producer
    │   ├── BusyError, UnavailableError, BrokerReadOnlyError    try later
    │   ├── NotFoundError, SubjectUnknownError, GroupUnknownError, PartitionUnknownError
    │   ├── SubjectDeletedError, GroupDeletedError        a later one of this name is another
    │   ├── ConflictError              it contradicts what is stored
    │   ├── VersionError, SchemaError  programs, or tables, of another version
    │   ├── StaleRouteError, WrongBrokerError             ask for a new route
    │   ├── FencedError, SessionUnknownError, TokenUnknownError   stop: another session is the owner
    │   ├── LeaseLostError, EffectDoneError               the message is another consumer's
    │   ├── SequenceGapError, ProducerFencedError, SequenceReusedError    batches of a producer
    │   ├── OffsetOutOfRangeError
    │   │   └── DataLossError          retention has removed rows of a range that is read
    │   ├── CorruptBatchError, FrameError
    │   │   └── UnpackError            a batch was packed wrongly
    │   ├── CodecError
    │   ├── FolderRefusedError         a broker must no longer use this data folder
    │   └── PublishError, RowsError, JobError             hidden subjects, writes and jobs of Spark
    ├── UnreachableError               no answer of a keylane server
    │   ├── NotSentError               nothing was done
    │   ├── OutcomeUnknownError        it may have been done
    │   ├── ForeignServerError         the program at that address is not a keylane server
    │   └── UnfinishedError            a part of it was done; repeating it finishes it
    ├── DeliveryError                  a producer gave up on messages
    │   ├── GivenUpError               raised by flush and close for unawaited futures
    │   ├── DeliveryTimeoutError, KeyHaltedError    producer.resume(error) resumes the key
    │   └── TableError                 by send_arrow
    ├── FilterError, HandlerTimeoutError            a failed attempt for a message
    ├── StorageError                   .operation .path
    │   ├── CorruptLogError, DiskFullError, FlushFailedError, DataFolderError
    │   └── CorruptIndexError          the next start rebuilds the index from the log
    ├── AddressError                   port in use, or not a port
    ├── SparkProcessError, CheckpointMismatchError
    ├── StoryError                     a test in virtual time
    ├── InputError                     a command's input
    ├── InternalError                  a bug of keylane
    └── ClosedError                    used after close (yours, not the peer's)

`fate` says whether the failed request may have been done. A request that is NOT_DONE may always be
repeated. One that is UNKNOWN may be repeated if the receiver recognises the repeat, as a broker
does by (producer id, epoch, sequence). Names of classes may change; a code never does (golden
test). Modelled on Kafka's Errors table, Maelstrom's definite and indefinite errors, and
litestream's hints.
"""

from __future__ import annotations

from typing import Any

from .base import KIND_BY_CODE, KINDS, create_error, format_hint
from .base import KeylaneError as KeylaneError
from .failures import *  # noqa: F403 - the rest of the tree
from .reasons import Fate as Fate
from .reasons import Reason as Reason
from .reasons import RetryRule as RetryRule
from .refusals import *  # noqa: F403 - the rest of the tree
from .refusals import RefusedError

TEXT_CHARS_MAX = 4_096
"""The maximum length of a text, in characters. It keeps an error that quotes its input smaller than
a frame.
"""
HINT_CHARS_MAX = 1_024
"""The maximum length of a hint, in characters, even if another server sent it: a line or two."""


_REASON_BY_CODE = {reason.code: reason for reason in Reason}


def error_class_of(code: int) -> type[KeylaneError] | None:
    """Return the error class for a code, or None if the code belongs to a newer version."""
    reason = _REASON_BY_CODE.get(code)
    return KIND_BY_CODE.get(code) if reason is None else KINDS[reason.kind]


def codes() -> dict[int, str]:
    """Return the class name for each code, followed by the name of the reason if there is one. For
    the golden test.
    """
    names = {code: kind.__name__ for code, kind in KIND_BY_CODE.items()}
    names |= {code: f"{each.kind} {each.name}" for code, each in _REASON_BY_CODE.items()}
    return dict(sorted(names.items()))


def wire_text(text: str) -> str:
    """Make `text` decodable by every peer: truncate it to TEXT_CHARS_MAX characters, and replace
    lone surrogates.
    """
    return text[:TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def wire_details(error: KeylaneError) -> dict[str, Any]:
    """Return the details of `error` for JSON and msgpack: numbers are unchanged, and all other
    values become text.
    """
    return {
        wire_text(name): value
        if isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64)
        else wire_text(str(value))
        for name, value in error.details.items()
    }


def wire_hint(error: KeylaneError) -> str:
    """Return the hint of `error` for the wire, with at most HINT_CHARS_MAX characters."""
    return wire_text(error.hint)[:HINT_CHARS_MAX]


def specific_hint(error: KeylaneError) -> str:
    """Return the hint of `error` for the wire, or "" if it is the default hint for its code."""
    usual = format_hint(error.reason or type(error), error.details)
    return "" if error.hint == usual else wire_hint(error)


def error_from_wire(
    code: int, message: str, details: dict[str, Any], hint: str = ""
) -> KeylaneError:
    """
    Create the error that was sent by a peer. Its class is that of its code, or RefusedError if the
    code is unknown.

    A nonempty `hint` replaces the default hint of the code. It is truncated to HINT_CHARS_MAX.
    """
    kind, reason = error_class_of(code) or RefusedError, _REASON_BY_CODE.get(code)
    error = create_error(kind, reason, message, details)
    if hint and hint != (reason or kind).hint:
        error.hint = hint[:HINT_CHARS_MAX]
    return error


__all__ = sorted(["Fate", "Reason", "RetryRule", *KINDS])
