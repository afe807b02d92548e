"""Encodes the offset of a stream as the JSON that Spark writes to its checkpoint. Pure.

    {"keylane": 2, "subjects": {"flights": 7}, "keys": "", "offsets": {"3": 120, "4": 80},
    "waiting": {"9": 5}}

    keylane    version of this format; 1 has no `keys`
    subjects   ids of the subjects, which distinguish a subject from a later one of the same name
    keys       the order keys whose messages are read, as a count and a digest; "": all keys
    offsets    for partitions that are being read: the first unread offset
    waiting    for partitions that existed when the stream started: the offset from which they are
               read after their parents
    initial    true: the start of batch 0, which Spark requests again when it replays that batch
    origin     in the end of batch 0: where that batch started

A partition that is in neither map is read from its first message after its parents, unless it has
already been read to its end, in which case one of its descendants is in `offsets`.

Invariants
    Equal offsets have equal JSON, because Spark compares strings.
    An offset counts messages of all keys, even if only some keys are read, so a stream of other
    keys would treat their messages as already read.
    The end of batch 0 records where the batch started, so that "latest" means the same when the
    batch is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import xxhash

from ...protocol.errors import CheckpointMismatchError
from ...protocol.ids import MAX_I64
from ...protocol.text import counted

VERSION, WITHOUT_KEYS = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """The progress of a stream. The module docstring describes the fields."""

    subjects: Mapping[str, int]
    offsets: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)
    initial: bool = False
    origin: StreamOffset | None = None
    keys: str | None = None
    """The result of `describe_keys`; None if the offset has none, and therefore matches any
    keys.
    """

    def at(self, partition_id: int) -> int:
        """Return the next offset to read in a partition that has not been read to its end."""
        first_offset = self.waiting.get(partition_id, 0)
        return self.offsets.get(partition_id, first_offset)


def to_json(offset: StreamOffset) -> dict[str, Any]:
    """Return the offset as the JSON object that Spark stores, without empty fields."""
    version = WITHOUT_KEYS if offset.keys is None else VERSION
    document: dict[str, Any] = {
        "keylane": version,
        "subjects": dict(sorted(offset.subjects.items())),
    }
    if offset.keys is not None:
        document["keys"] = offset.keys
    document |= _encode_offsets(offset)
    if offset.initial:
        document["initial"] = True
    if offset.origin is not None:
        document["origin"] = _encode_offsets(offset.origin)
    return document


def from_json(document: object) -> StreamOffset:
    """
    Parse an offset that Spark has read from its checkpoint.

    Raises:
        CheckpointMismatchError: the offset was written by another source or a newer version of
            keylane.
    """
    if not isinstance(document, Mapping) or "keylane" not in document:
        raise CheckpointMismatchError(
            f"the checkpoint is not one of keylane's streams: its offset is {document!r:.200}"
        )
    if document["keylane"] not in (VERSION, WITHOUT_KEYS):
        raise CheckpointMismatchError(
            f"the checkpoint has offsets of version {document['keylane']!r:.40}, and this keylane "
            f"reads versions up to {VERSION}"
        )
    try:
        encoded = msgspec.convert(dict(document), _EncodedOffset)
    except msgspec.ValidationError as error:
        raise CheckpointMismatchError(
            f"the offset in the checkpoint is damaged: {error}"
        ) from error
    offset = _decode_offsets(encoded, encoded.subjects)
    if encoded.origin is not None:
        offset = replace(offset, origin=_decode_offsets(encoded.origin, encoded.subjects))
    return replace(offset, initial=encoded.initial, keys=encoded.keys)


def describe_keys(keys: Collection[bytes] | None) -> str:
    """Return a text that identifies the selected order keys in an offset; "" means all keys."""
    if keys is None:
        return ""
    digest = xxhash.xxh3_64()
    for key in sorted(keys):
        digest.update(len(key).to_bytes(4, "little") + key)
    return f"{counted(len(keys), 'key')}, digest {digest.hexdigest()}"


def check_keys(offset: StreamOffset, keys: str) -> None:
    """Check that the offset has the same order keys as `keys`, a result of `describe_keys`. Raises
    CheckpointMismatchError.
    """
    if offset.keys is not None and offset.keys != keys:
        raise CheckpointMismatchError(
            f"the checkpoint is of {offset.keys or 'all keys'}, and the stream reads "
            f"{keys or 'all keys'}: the checkpoint counts the messages of every key as read, so "
            "use the same option `keys` as before, or another checkpointLocation",
            checkpoint_of=offset.keys or "all keys",
            reads=keys or "all keys",
        )


def check_subjects(offset: StreamOffset, subjects: Mapping[str, int]) -> None:
    """
    Check that the offset belongs to these subjects.

    Args:
        subjects: the ids of the subjects by name; 0 if unknown.

    Raises:
        CheckpointMismatchError: the offset belongs to other subjects, or one of them was deleted
            and recreated.
    """
    if offset.subjects.keys() != subjects.keys():
        raise CheckpointMismatchError(
            f"the checkpoint is of {', '.join(sorted(offset.subjects))}, and the stream reads "
            f"{', '.join(sorted(subjects))}",
            checkpoint_of=", ".join(sorted(offset.subjects)),
            reads=", ".join(sorted(subjects)),
        )
    for subject, subject_id in subjects.items():
        known_id = offset.subjects[subject]
        if known_id and subject_id and known_id != subject_id:
            raise CheckpointMismatchError(
                f"the checkpoint is of an earlier subject {subject}, which was deleted: its id was "
                f"{known_id}, and the present subject has id {subject_id}",
                checkpoint_of=f"{subject} {known_id}",
                reads=f"{subject} {subject_id}",
            )


class _OffsetMaps(msgspec.Struct, forbid_unknown_fields=True):
    offsets: dict[str, int]
    waiting: dict[str, int] = {}


class _EncodedOffset(msgspec.Struct, forbid_unknown_fields=True):
    keylane: int
    subjects: dict[str, int]
    offsets: dict[str, int]
    waiting: dict[str, int] = {}
    initial: bool = False
    origin: _OffsetMaps | None = None
    keys: str | None = None


def _encode_offsets(offset: StreamOffset) -> dict[str, Any]:
    maps = {"offsets": _string_keys(offset.offsets)}
    return maps | ({"waiting": _string_keys(offset.waiting)} if offset.waiting else {})


def _string_keys(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(partition_id): offsets[partition_id] for partition_id in sorted(offsets)}


def _decode_offsets(
    maps: _OffsetMaps | _EncodedOffset, subjects: Mapping[str, int]
) -> StreamOffset:
    return StreamOffset(
        subjects=subjects,
        offsets=_parse_partition_ids(maps.offsets),
        waiting=_parse_partition_ids(maps.waiting),
    )


def _parse_partition_ids(offsets: Mapping[str, int]) -> dict[int, int]:
    for name, offset in offsets.items():
        if not name.isascii() or not name.isdigit() or not 0 <= offset <= MAX_I64:
            raise CheckpointMismatchError(
                f"the offset in the checkpoint is damaged: {name!r:.40}: {offset}"
            )
    return {int(name): offset for name, offset in offsets.items()}
