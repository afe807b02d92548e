"""The types of the system's names and numbers, and checks of names and offsets. Pure.

Invariants
    A name that passed `check_name` is safe in a URL, a log line and a table. No name is used as a
    path on disk.
    An `Offset` counts messages, and a `Position` counts bytes; the type checker keeps them apart.
"""

from __future__ import annotations

import re
from typing import NewType

from .errors import InvalidRequestError, Reason

Subject = NewType("Subject", str)
ConsumerGroup = NewType("ConsumerGroup", str)
BrokerGroup = NewType("BrokerGroup", str)
PartitionName = NewType("PartitionName", str)
SessionId = NewType("SessionId", str)

PartitionId = NewType("PartitionId", int)
"""The number of a physical partition, from 1. It is assigned by the metaserver, and unique in the
cluster.
"""
LogicalPartition = NewType("LogicalPartition", int)
QueueNumber = NewType("QueueNumber", int)
"""The number of a logic queue within its subject, from 0."""
Offset = NewType("Offset", int)
Position = NewType("Position", int)
FencingToken = NewType("FencingToken", int)
RouteVersion = NewType("RouteVersion", int)
ProducerId = NewType("ProducerId", int)
ProducerEpoch = NewType("ProducerEpoch", int)
Sequence = NewType("Sequence", int)
"""The index of a message among those that one producer has sent to one partition, from 0."""

MAX_I64 = 2**63 - 1
NO_PRODUCER = 0
"""The producer id of a batch without a producer, which the broker does not deduplicate."""
KEYED_IDS = 1 << 63
"""The lowest producer id that is derived from an idempotency key. Producers draw lower ones."""
NAME_CHARS_MAX = 200
PARTITION_NAME_CHARS_MAX = 240
"""The length of the longest partition name: a subject's name with the suffix that `partition_name`
adds.
"""
HIDDEN = ".hidden-"
"""Separates the target's name from the job's name in the names of hidden subjects."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PARTITION_NUMBER = re.compile(r"\.p([0-9]{1,9})\Z")
_PARTITION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,239}")


def check_name(kind: str, text: object) -> str:
    """
    Check that a name is valid, and return it.

    Args:
        kind: the kind of name, for the error message: "subject", "consumer group" or "broker
            group".
        text: the name as given by the user.

    Raises:
        InvalidRequestError: `text` does not match `^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$`.
    """
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        raise _illegal_name_error(kind, text)
    return text


def check_partition_name(text: str) -> str:
    """Check the name of a partition like `check_name`, but allow 240 characters. Raises
    InvalidRequestError.
    """
    if _PARTITION_NAME.fullmatch(text) is None:
        raise _illegal_name_error("partition name", text)
    return text


def _illegal_name_error(kind: str, name: object) -> InvalidRequestError:
    """Return the error for an invalid name. The message quotes the name, so that spaces and control
    characters are visible; the detail is the name itself.
    """
    text = f"{Reason.NAME_INVALID.summary} (kind={kind}, name={name!r:.80})"
    return InvalidRequestError(Reason.NAME_INVALID, text, kind=kind, name=str(name)[:80])


def partition_name(subject: str, number: int) -> PartitionName:
    """Return the name of a subject's partition, such as `subject.p8`. Children have higher numbers
    than their parents.
    """
    return PartitionName(f"{subject}.p{number}")


def partition_number(name: str) -> int | None:
    """Return the number in a partition's name, or None if the name was not made by
    `partition_name`.
    """
    match = _PARTITION_NUMBER.search(name)
    return None if match is None else int(match[1])


def check_offset(value: object) -> Offset:
    """Check that an offset is in `[0, 2**63)`, and return it. Raises InvalidRequestError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_I64:
        quoted_value = f"{value!r:.40}"
        raise InvalidRequestError(
            Reason.OFFSET_INVALID,
            f"{Reason.OFFSET_INVALID.summary}: {quoted_value}",
            offset=quoted_value,
        )
    return Offset(value)
