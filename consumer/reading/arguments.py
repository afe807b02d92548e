"""Validates the arguments of a reader, except `start` and `stop`."""

from __future__ import annotations

import inspect

from ...protocol.codecs.codec import Codec, V, check_codec
from ...protocol.errors import ConfigError
from ...protocol.settings import check_no_problems, flag_problems, is_within

_DEFERRED_KINDS = (
    inspect.iscoroutinefunction,
    inspect.isgeneratorfunction,
    inspect.isasyncgenfunction,
)
"""The kinds of functions that return a truthy object when called, without running their body."""


def check_arguments(
    *, key: object, partition: object, where: object, follow: object, codec: Codec[V] | None
) -> None:
    """Check a reader's arguments other than `start` and `stop`. Raises ConfigError."""
    check_no_problems(flag_problems(follow=follow))
    if codec is not None:
        check_codec(codec)
    if key is not None and (not isinstance(key, bytes | str) or not key):
        raise ConfigError(f"key must be non-empty bytes or text, not {key!r:.40}")
    if partition is not None and not is_within(partition, 1, 2**63 - 1):
        raise ConfigError(f"partition must be a partition id, 1 or higher, not {partition!r:.40}")
    if where is not None and (
        not callable(where) or any(is_kind(where) for is_kind in _DEFERRED_KINDS)
    ):
        raise ConfigError(f"where must be a synchronous function of a message, not {where!r:.60}")
