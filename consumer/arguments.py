"""Checks the arguments of a `Consumer`: its names, handlers and callbacks, and where its group
begins.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ..protocol.control import SHORT_TEXT_CHARS_MAX
from ..protocol.errors import ConfigError, HandlerTypeError, JobError, Reason
from ..protocol.groups import FailurePolicy, GroupStart
from ..protocol.ids import check_name
from ..protocol.reading.instants import GroupStartOption
from ..protocol.reprocess.manifest import build_group_start, decode_manifest
from ..protocol.routing import ConsumeStrategy
from .settings import AckMode, ConsumerSettings

PREFIX = "manifest:"
MANIFEST_PATH = "_keylane/manifest.json"
"""The path of the manifest within the output folder."""
_NOT_ENCODABLE = re.compile("[\0\ud800-\udfff]")
"""NUL, and lone surrogates, which UTF-8 cannot encode."""


def check_names(
    subject: object, group: object, settings: ConsumerSettings, *, has_handler: bool
) -> None:
    """
    Check the names, which are left out if handlers are registered later, by `Consumer.on`.

    Raises:
        InvalidRequestError: the subject or the group is not a valid name.
        ConfigError: one of them is missing, there are several subjects, or metaservers do not
            accept the setting `name` as the name of a client.
    """
    if settings.broadcast and subject is None:
        raise ConfigError(
            "broadcast=True needs a subject: Consumer(meta, subject=..., settings=...)"
        )
    if subject is None and group is None:
        if has_handler:
            raise ConfigError(
                "a handler needs a subject and a group: Consumer(meta, subject=..., group=..., "
                "handler=...)"
            )
        return
    if subject is None:
        raise ConfigError(
            f"subject= is missing: Consumer(meta, subject=..., group={group!r:.40}); for several "
            "subjects, give each its group: @consumer.on(subject, group=...)"
        )
    if group is None and not settings.broadcast:
        raise ConfigError(
            f"group= is missing: Consumer(meta, subject={subject!r:.40}, group=...); or "
            "ConsumerSettings(broadcast=True), for every message that is sent once it is open"
        )
    if isinstance(subject, list | tuple | set | frozenset):
        raise ConfigError(
            "subject= takes one name; for several subjects, leave it out, and add a function for "
            "each: @consumer.on(subject, group=...)"
        )
    check_name("subject", subject)
    if not settings.broadcast:
        check_name("consumer group", group)
    name: object = settings.name
    is_short_text = isinstance(name, str) and len(name) <= SHORT_TEXT_CHARS_MAX
    if not is_short_text or _NOT_ENCODABLE.search(str(name)):
        raise ConfigError(
            f"name must be text of at most {SHORT_TEXT_CHARS_MAX} characters, without NUL, not "
            f"{name!r:.40}"
        )


def check_broadcast(group: object, start: object, settings: ConsumerSettings) -> None:
    """
    Check that a broadcast consumer has no argument that requires a group.

    Raises:
        ConfigError: an argument requires a group; the error names the alternative.
    """
    if not isinstance(settings.broadcast, bool):
        raise ConfigError(f"broadcast must be True or False, not {settings.broadcast!r:.40}")
    if not settings.broadcast:
        return
    problems = []
    if group is not None:
        problems.append("it has no group: leave group= out")
    if start is not None and start != "latest":
        problems.append("it begins at the latest message: for older ones use a Reader")
    if settings.ack is not AckMode.LINGERING:
        problems.append(f"ack={settings.ack.value!r} needs a group: its acks end with its process")
    if settings.failure_policy is not FailurePolicy.BLOCK:
        problems.append(
            f"on_failure={settings.failure_policy.value!r} needs a group: brokers set nothing "
            "aside for it; to skip a message, handle the error in the handler"
        )
    if settings.consume_strategy is ConsumeStrategy.SHARED:
        problems.append("it gets every message; use a group to divide them between consumers")
    if settings.instance:
        problems.append("instance= needs a group, in which a restart takes over the partitions")
    if problems:
        raise ConfigError("broadcast=True: " + "; ".join(problems))


def check_callbacks(**callbacks: object) -> None:
    """Raise HandlerTypeError if a callback is neither None nor callable with a list of partition
    ids.
    """
    for name, callback in callbacks.items():
        if callback is None:
            continue
        if not callable(callback) or isinstance(callback, type):
            raise HandlerTypeError(
                Reason.CALLBACK_TYPE,
                f"{name} must be a function of a list of partition ids, not {callback!r:.60}",
            )
        try:
            inspect.signature(callback, follow_wrapped=False).bind([])
        except TypeError as error:
            text = f"{name} {callback!r:.60} cannot be called with a list of partition ids: {error}"
            raise HandlerTypeError(Reason.CALLBACK_TYPE, text) from None
        except ValueError:
            continue  # a builtin does not declare its arguments


def manifest_start(text: str, *, subject: str) -> GroupStart:
    """
    Return the start of a group that continues after the backfill in the folder that `text` names.
    This call blocks.

    Args:
        text: "manifest:" and the folder.
        subject: the group's subject.

    Raises:
        JobError: there is no manifest, it is incomplete, or it belongs to another subject.
    """
    path = Path(text.removeprefix(PREFIX)) / MANIFEST_PATH
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobError(Reason.MANIFEST, f"{path}: {error.strerror}", path=str(path)) from None
    return build_group_start(
        decode_manifest(data, where=str(path)), subject=subject, where=str(path)
    )


def resolve_start(
    start: GroupStartOption | None, *, subject: str
) -> GroupStartOption | GroupStart | None:
    """Return a group's start, with `manifest:DIR` resolved to the end of that backfill. Raises
    JobError.
    """
    if isinstance(start, str) and start.startswith(PREFIX):
        return manifest_start(start, subject=subject)
    return start
