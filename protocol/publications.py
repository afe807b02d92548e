"""Hidden subjects and their publication: requests and answers.  Pure.

    hide ─▶ a hidden subject: sent to and read by its name, no groups ──publish──▶ its partitions are the target's

Publishing is one change of the target's route: what was stored before stays before, in the order of each key.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from .control import MessageBytesMax
from .ids import MAX_I64, NAME_CHARS_MAX
from .limits import GROUPS_PER_SUBJECT_MAX, MESSAGE_BYTES_MAX, PARTITIONS_MAX
from .operations import OperationState

HIDDEN = ".hidden-"
"""Stands between the name of the target and the name of the job, in names that clients make."""


class HideSubject(Struct, frozen=True, kw_only=True):
    """
    Create a hidden subject whose messages are to be published in `subject` of the path; a repeat changes nothing.

    It gets the settings and ranges of its target.  If there is no target, publishing creates it.
    """

    hidden: str
    partitions: Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)] = 0
    """Of a target that does not exist; 0: it must exist."""
    static: bool = False
    """As `partitions`."""
    message_bytes_max: MessageBytesMax = MESSAGE_BYTES_MAX
    """As `partitions`."""


class PublishSubject(Struct, frozen=True, kw_only=True):
    """Publish a hidden subject in its target; a repeat changes nothing."""

    target: str
    replace: bool = False
    """The target's present messages are deleted: the hidden subject takes the name."""
    starts: Annotated[
        dict[
            Annotated[str, Meta(max_length=NAME_CHARS_MAX)],
            dict[int, Annotated[int, Meta(ge=0, le=MAX_I64)]],
        ],
        Meta(max_length=GROUPS_PER_SUBJECT_MAX),
    ] = {}
    """With `replace`: consumer group → partition id → first offset that it has not handled."""


class Publication(Struct, frozen=True, kw_only=True):
    """A publication, and how far it is."""

    hidden: str
    target: str
    operation_id: int = 0
    """The operation on the target's partitions; 0: there was no target, and nothing is left to do."""
    state: OperationState = OperationState.DONE
    problem: str = ""
    """Why it waits."""


def hidden_name(target: str, job: str) -> str:
    """The name of the hidden subject of a job; the target's name is cut if the whole were too long."""
    return f"{target[: NAME_CHARS_MAX - len(HIDDEN) - len(job)]}{HIDDEN}{job}"
