"""
Decides which messages a consumer wants: by tags, by properties, or by a user's predicate. Pure,
apart from that predicate.

    pulled ─▶ matches? ─┬─ yes ─▶ handled
                        ├─ no ──▶ acked without a handler
                        ╰─ predicate raised ─▶ FilterError: a failed attempt, as in a handler

Invariant
    A message is acked without a handler only if the filter rejected that very message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from types import CodeType
from typing import Any

from ..protocol.errors import ConfigError, CorruptBatchError, FilterError
from ..protocol.limits import FILTER_CHARS_MAX, TAG_BYTES_MAX, TAGS_WANTED_MAX
from ..protocol.message import Message
from ..protocol.text import collect_items
from .predicate import call_predicate, check_predicate
from .settings import Filter, PropertyFilter

_TEXT_CHARS_MAX = FILTER_CHARS_MAX - 40


class MessageFilter:
    """
    Filters messages by tags, and by properties or a predicate.

    Args:
        tags: a message needs at least one of these tags; None: no condition.
        wanted: the required property values, or a synchronous predicate; None: no condition.

    Raises:
        ConfigError: no message can have such a tag or property, or the predicate cannot accept
            a message, see `check_predicate`.
    """

    __slots__ = ("_predicate", "_properties", "_tag_bytes", "tags", "text")

    def __init__(self, tags: Collection[str] | None = None, wanted: Filter | None = None) -> None:
        self.tags = () if tags is None else check_tags(tags)
        """The tags, sorted; a message needs at least one of them."""
        self._tag_bytes = tuple(tag.encode() for tag in self.tags)
        self._properties: dict[str, str | bytes] = {}
        self._predicate: Callable[[Message[Any]], object] | None = None
        if isinstance(wanted, Mapping):
            self._properties = _check_properties(wanted)
        elif wanted is not None:
            check_predicate(
                wanted, "filter is a plain function of a message, or a dict of properties"
            )
            self._predicate = wanted
        self.text = self._describe()
        """The filter's identity in comparisons: equal for filters that reject the same messages, as
        far as this can be determined. A function is identified by its name, a lambda by its code.
        """

    def _describe(self) -> str:
        parts = [f"tags {', '.join(self.tags)}"] if self.tags else []
        parts += [f"{name} = {value!r}" for name, value in sorted(self._properties.items())]
        if self._predicate is not None:
            parts.append(f"function {_function_name(self._predicate)}")
        text = "; ".join(parts).encode(errors="backslashreplace").decode()
        if len(text) > _TEXT_CHARS_MAX:
            digest = blake2b(text.encode(), digest_size=8).hexdigest()
            text = f"{text[:_TEXT_CHARS_MAX]}… ({digest})"
        return text

    def matches(self, message: Message[Any]) -> bool:
        """
        Return True if the filter accepts a message.

        Raises:
            FilterError: the predicate raised, or the message's properties cannot be decoded.
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
            raise _filter_error(message, error.message) from error
        return self._predicate is None or call_predicate(self._predicate, message, _filter_error)

    def rejects(self, message: Message[Any]) -> bool:
        """Return True if the filter rejects a message, or False if it accepts it or fails."""
        try:
            return not self.matches(message)
        except FilterError:
            return False


def build_filter(tags: Collection[str] | None, wanted: Filter | None) -> MessageFilter | None:
    """Return the filter for a program's arguments, or None if both are None. Raises ConfigError."""
    return None if tags is None and wanted is None else MessageFilter(tags, wanted)


def check_tags(tags: Collection[str]) -> tuple[str, ...]:
    """
    Return the tags sorted and without duplicates.

    Raises:
        ConfigError: there are no tags or more than TAGS_WANTED_MAX, or one is not a non-empty
            string without commas of at most TAG_BYTES_MAX bytes.
    """
    items = collect_items(tags)
    for tag in items:
        if not isinstance(tag, str) or not tag or "," in tag or not _is_short_tag(tag):
            raise ConfigError(
                f"a tag is text without commas, of at most {TAG_BYTES_MAX} bytes, not {tag!r:.80}"
            )
    if not 0 < len(items) <= TAGS_WANTED_MAX:
        raise ConfigError(
            f"tags are 1 to {TAGS_WANTED_MAX} texts, as tags=['paid'], not {tags!r:.80}"
        )
    return tuple(sorted(set(items)))


def _function_name(function: Callable[..., object]) -> str:
    """
    Return a function's name. A lambda's name is followed by a digest of its code, because all
    lambdas have the same name.

    The digest is independent of the lambda's location in the source and of the variables it
    captures; it changes between minor versions of Python.
    """
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    if not name.endswith("<lambda>") or not isinstance(code, CodeType):
        return name
    encoded = _serialize_code(code).encode(errors="backslashreplace")
    return f"{name} {blake2b(encoded, digest_size=8).hexdigest()}"


def _serialize_code(code: CodeType) -> str:
    """Return a text for a function's code that does not depend on source locations or on the order
    of sets.
    """
    constants = [
        _serialize_code(constant)
        if isinstance(constant, CodeType)
        else str(sorted(map(repr, constant)))
        if isinstance(constant, frozenset)
        else repr(constant)
        for constant in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars)
    return f"{code.co_code.hex()} {names} {constants}"


def _is_short_tag(tag: str) -> bool:
    try:
        return len(tag.encode()) <= TAG_BYTES_MAX
    except UnicodeEncodeError:
        return False


def _check_properties(properties: PropertyFilter) -> dict[str, str | bytes]:
    """Return a copy of valid property conditions. Raises ConfigError if they are invalid."""
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str | bytes):
            raise ConfigError(
                f"filter maps names of properties to text or bytes, not {name!r:.40} to "
                f"{value!r:.40}"
            )
    if not properties:
        raise ConfigError("filter={} names no property: leave it out to get every message")
    return dict(properties)


def _filter_error(message: Message[Any], why: str) -> FilterError:
    return FilterError(
        f"the filter failed for message {message.offset} of partition "
        f"{message.partition_id}: {why:.500}",
        partition_id=message.partition_id,
        offset=message.offset,
    )
