"""Decides which messages a consumer wants: by tags, by equal properties, or by a function of the
program. Pure except for that function.

    pulled ─▶ matches? ─┬─ yes ─▶ handled
                        ├─ no ──▶ counts as handled: it is acked without a handler
                        ╰─ the function raised ─▶ FilterError: a failed try, as in a handler

Invariant
    A message counts as handled without a handler only if the filter has rejected this message.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from types import CodeType
from typing import Any

from ...protocol.errors import ConfigError, CorruptBatchError, FilterError
from ...protocol.limits import FILTER_CHARS_MAX, TAG_BYTES_MAX, TAGS_WANTED_MAX
from ...protocol.message import Message
from ...protocol.text import items_of
from ..settings import Filter, PropertyFilter

_SHORT = FILTER_CHARS_MAX - 40


class MessageFilter:
    """
    The filter of a consumer.

    Args:
        tags: a message needs one of them; None: any message passes.
        wanted: properties that a message needs with these values, or a plain function of a message;
            None: no condition.

    Raises:
        ConfigError: a tag or a property that no message can have, or a function that cannot be
            called with one.
    """

    __slots__ = ("_predicate", "_properties", "_tag_bytes", "tags", "text")

    def __init__(self, tags: Collection[str] | None = None, wanted: Filter | None = None) -> None:
        self.tags = () if tags is None else check_tags(tags)
        """The tags of which a message needs one, sorted."""
        self._tag_bytes = tuple(tag.encode() for tag in self.tags)
        self._properties: dict[str, str | bytes] = {}
        self._predicate: Callable[[Message[Any]], object] | None = None
        if isinstance(wanted, Mapping):
            self._properties = _checked(wanted)
        elif wanted is not None:
            if not callable(wanted) or inspect.iscoroutinefunction(wanted):
                raise ConfigError(
                    f"filter is a plain function of a message, or a dict of properties, not "
                    f"{wanted!r:.60}"
                )
            self._predicate = wanted
        self.text = self._described()
        """A text that is equal for two filters that leave the same messages out, as far as a
        function can be identified: by its name, or a lambda by its code.
        """

    def _described(self) -> str:
        parts = [f"tags {', '.join(self.tags)}"] if self.tags else []
        parts += [f"{name} = {value!r}" for name, value in sorted(self._properties.items())]
        if self._predicate is not None:
            parts.append(f"function {_name_of(self._predicate)}")
        text = "; ".join(parts).encode(errors="backslashreplace").decode()
        if len(text) > _SHORT:
            digest = blake2b(text.encode(), digest_size=8).hexdigest()
            text = f"{text[:_SHORT]}… ({digest})"
        return text

    def matches(self, message: Message[Any]) -> bool:
        """
        Return whether the consumer wants a message.

        Raises:
            FilterError: the answer is unknown: the function raised, or the properties of the
                message are not readable.
        """
        if self._tag_bytes and not any(tag in message.packed_properties for tag in self._tag_bytes):
            return False
        try:
            if self.tags and not any(tag in self.tags for tag in message.tags):
                return False
            if self._properties:
                properties = message.properties
                for name, value in self._properties.items():
                    if properties.get(name) != value:
                        return False
        except CorruptBatchError as error:
            raise _error(message, error.message) from error
        if self._predicate is None:
            return True
        try:
            kept = self._predicate(message)
        except Exception as error:
            raise _error(message, f"{type(error).__name__}: {error}") from error
        if inspect.isawaitable(kept):
            if inspect.iscoroutine(kept):
                kept.close()
            raise _error(message, "it is async")
        return bool(kept)

    def rejects(self, message: Message[Any]) -> bool:
        """Return True if the consumer certainly does not want a message."""
        try:
            return not self.matches(message)
        except FilterError:
            return False


def filter_of(tags: Collection[str] | None, wanted: Filter | None) -> MessageFilter | None:
    """Return the filter that a program gave, or None if it gave none. Raises ConfigError."""
    return None if tags is None and wanted is None else MessageFilter(tags, wanted)


def check_tags(tags: Collection[str]) -> tuple[str, ...]:
    """
    Return the wanted tags, sorted, each once.

    Raises:
        ConfigError: the tags are not a collection of texts without commas, are empty or more than
            TAGS_WANTED_MAX, or one is over TAG_BYTES_MAX.
    """
    listed = items_of(tags)
    for tag in listed:
        if not isinstance(tag, str) or not tag or "," in tag or not _fits(tag):
            raise ConfigError(
                f"a tag is text without commas, of at most {TAG_BYTES_MAX} bytes, not {tag!r:.80}"
            )
    if not 0 < len(listed) <= TAGS_WANTED_MAX:
        raise ConfigError(
            f"tags are 1 to {TAGS_WANTED_MAX} texts, as tags=['paid'], not {tags!r:.80}"
        )
    return tuple(sorted(set(listed)))


def _name_of(function: Callable[..., object]) -> str:
    """
    Return the name of a function, with a digest of its code if it is a lambda, because all lambdas
    share a name.

    The digest does not depend on the place of the lambda. It differs in another minor version of
    Python, and does not include the values that the lambda takes from its surroundings.
    """
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if not name.endswith("<lambda>") or not isinstance(code, CodeType):
        return name
    return (
        f"{name} "
        f"{blake2b(_code_text(code).encode(errors='backslashreplace'), digest_size=8).hexdigest()}"
    )


def _code_text(code: CodeType) -> str:
    """Return the text of a function's code, without its place and the order of its sets."""
    constants = [
        _code_text(each)
        if isinstance(each, CodeType)
        else str(sorted(map(repr, each)))
        if isinstance(each, frozenset)
        else repr(each)
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {names} {constants}"


def _fits(tag: str) -> bool:
    try:
        return len(tag.encode()) <= TAG_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _checked(properties: PropertyFilter) -> dict[str, str | bytes]:
    """Return the properties, checked. Raises ConfigError."""
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str | bytes):
            raise ConfigError(
                f"filter maps names of properties to text or bytes, not {name!r:.40} to "
                f"{value!r:.40}"
            )
    if not properties:
        raise ConfigError("filter={} names no property: leave it out to get every message")
    return dict(properties)


def _error(message: Message[Any], why: str) -> FilterError:
    return FilterError(
        f"the filter failed for message {message.offset} of partition "
        f"{message.partition_id}: {why:.500}",
        partition_id=message.partition_id,
        offset=message.offset,
    )
