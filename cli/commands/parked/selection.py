"""Which parked keys a user names, and whether a change of them is meant."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import typer

from ....admin import ParkedKeyView
from ....protocol.errors import ConfigError
from ....protocol.http.message_json import bytes_field
from ....protocol.parked import Failure
from ....protocol.reading.instants import ago_ms
from ....protocol.text import plain_number

KEY_CHARS_SHOWN = 60
FAILURE_CHARS_SHOWN = 80
SECONDS_MAX = 999_999_999_999


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that say which keys."""

    key: str | None = None
    key_hex: str | None = None
    no_key: bool = False
    dead: bool = False
    partition: int | None = None
    older_than: str | None = None
    error: str | None = None
    among_dead: bool | None = None
    """True: dead letters alone; False: all others; None: both."""

    def wanted_key(self) -> bytes | EllipsisType | None:
        """
        The key; b"": messages without one; None: dead letters; `...`: none was named.

        Raises:
            ConfigError: two of them, or a key that cannot be.
        """
        said = [self.key is not None, self.key_hex is not None, self.no_key, self.dead]
        if sum(said) > 1:
            raise ConfigError("give one of --key, --key-hex, --no-key and --dead")
        if self.dead:
            return None
        if self.no_key:
            return b""
        if self.key_hex is not None:
            return _not_empty(_bytes_of(self.key_hex))
        return ... if self.key is None else _not_empty(self.key.encode(errors="surrogateescape"))

    @property
    def older_than_ms(self) -> int | None:
        """The age in milliseconds.  Raises ConfigError."""
        if self.older_than is None:
            return None
        age_ms = ago_ms(f"-{self.older_than}")
        seconds = plain_number(self.older_than)
        if seconds is not None and seconds <= SECONDS_MAX:
            age_ms = seconds * 1_000
        if age_ms is None:
            raise ConfigError(
                f"--older-than {self.older_than[:40]!r}: give it as 90, 15m, 1h or 2d"
            )
        return age_ms

    @property
    def asked(self) -> dict[str, Any]:
        """What the calls of an admin take.  Raises ConfigError."""
        return {
            "key": self.wanted_key(),
            "dead": self.among_dead,
            "partition_id": self.partition,
            "older_than_ms": self.older_than_ms,
            "error": self.error,
        }

    @property
    def by_key(self) -> bool:
        """True if one key is named."""
        return self.wanted_key() is not ...

    @property
    def said(self) -> bool:
        """True if anything says which keys."""
        others = (self.partition, self.older_than, self.error)
        return self.by_key or any(other is not None for other in others)


def _bytes_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"--key-hex {text[:80]!r}: not hexadecimal") from None


def _not_empty(key: bytes) -> bytes:
    if not key:
        raise ConfigError("an empty key: messages without a key are --no-key")
    return key


def skipped_count(first: int | None, *, all_messages: bool) -> int | None:
    """How many messages of each key are skipped; None: all.  Raises ConfigError: both options."""
    if all_messages and first is not None:
        raise ConfigError("--all is every message: leave --first out")
    return None if all_messages else first or 1


def key_text(key: bytes | None) -> str:
    """A key for people."""
    if not key:
        return "(dead letters)" if key is None else "(no key)"
    text = key.decode(errors="backslashreplace")
    return text if len(text) <= KEY_CHARS_SHOWN else f"{text[:KEY_CHARS_SHOWN]}…"


def failure_text(failure: Failure) -> str:
    """The type and the text of a failure for people."""
    text = f"{failure.kind}: {failure.text}".removesuffix(": ")
    return text if len(text) <= FAILURE_CHARS_SHOWN else f"{text[:FAILURE_CHARS_SHOWN]}…"


def failure_facts(failure: Failure | None) -> dict[str, object] | None:
    """A failure as names and values for programs."""
    if failure is None:
        return None
    return {name: getattr(failure, name) for name in failure.__struct_fields__}


def key_facts(view: ParkedKeyView) -> dict[str, object]:
    """A parked key as names and values for programs; `key` is missing for dead letters of any key, and for retries."""
    return {
        "partition_id": view.partition_id,
        "dead": view.is_dead,
        **({} if view.key is None else bytes_field("key", view.key)),
        "state": view.state,
        "messages": view.messages,
        "since_ms": view.since_ms,
        "failure": failure_facts(view.failure),
        "first_source": view.first_source,
        "first_offset": view.first_offset,
        **({} if view.tries is None else {"tries": view.tries, "next_ms": view.next_ms}),
    }


def confirm(question: str, *, yes: bool) -> None:
    """
    Ask on a terminal.  Exits with status 1 if the answer is no.

    Raises:
        ConfigError: there is no terminal, and no --yes.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question}  Without a terminal, say --yes.")
    typer.confirm(question, abort=True, err=True)
