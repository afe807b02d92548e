"""The options of `keylane parked` and `keylane dead`, which select messages, describe changes of
them, and confirm.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....protocol.errors import ConfigError, InputError
from ....protocol.parked import Failure
from ....protocol.reading.instants import ago_ms
from ....protocol.text import plain_number

if TYPE_CHECKING:
    from ....admin import ParkedKeyView

KEY_CHARS_SHOWN = 60
FAILURE_CHARS_SHOWN = 80
SECONDS_MAX = 999_999_999_999


YesOption = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask; required if the input is no terminal.")
]
FirstOption = Annotated[
    int, typer.Option(min=1, help="Number of messages of each key, beginning with the oldest.")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that select keys."""

    key: Annotated[str | None, typer.Option(metavar="TEXT", help="Only this order key.")] = None
    key_hex: Annotated[
        str | None, typer.Option(metavar="HEX", help="Only this order key, in hexadecimal.")
    ] = None
    no_key: Annotated[bool, typer.Option("--no-key", help="Only messages without a key.")] = False
    dead: Annotated[bool, typer.Option("--dead", help="Only dead letters, of any key.")] = False
    partition: Annotated[
        int | None, typer.Option(min=1, metavar="ID", help="Only on the partition with this id.")
    ] = None
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Only messages that were parked this long ago or longer: 90 (seconds), 15m, 1h, "
            "2d.",
        ),
    ] = None
    error: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Only messages with this in the type or text of their last failure.",
        ),
    ] = None
    among_dead: bool | None = None
    """True: only dead letters; False: all but dead letters; None: both."""

    def wanted_key(self) -> bytes | EllipsisType | None:
        """
        Return the key; b"" for messages without one, None for dead letters, `...` if none is named.

        Raises:
            ConfigError: two of the options are given, or the key is invalid.
        """
        given = [self.key is not None, self.key_hex is not None, self.no_key, self.dead]
        if sum(given) > 1:
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
        """The age in milliseconds; raises ConfigError."""
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
    def arguments(self) -> dict[str, Any]:
        """The arguments for the calls of an admin client; raises ConfigError."""
        return {
            "key": self.wanted_key(),
            "dead": self.among_dead,
            "partition_id": self.partition,
            "older_than_ms": self.older_than_ms,
            "error": self.error,
        }

    @property
    def by_key(self) -> bool:
        """True if a key is named."""
        return self.wanted_key() is not ...

    @property
    def is_limited(self) -> bool:
        """True if an option limits which keys are selected."""
        others = (self.partition, self.older_than, self.error)
        return self.by_key or any(other is not None for other in others)


@dataclass(frozen=True, slots=True)
class DeadSelection(Selection):
    """The options that select among dead letters."""

    dead: bool = False
    among_dead: bool | None = True


@dataclass(frozen=True, slots=True)
class Redriving:
    """The options of `redrive` besides the selection."""

    all_keys: Annotated[bool, typer.Option("--all", help="Every parked key.")] = False
    yes: YesOption = False


@dataclass(frozen=True, slots=True)
class DeadRedriving(Redriving):
    """The options of `redrive` for dead letters, without --all."""

    all_keys: bool = False


@dataclass(frozen=True, slots=True)
class Skipping:
    """The options of `skip` besides the selection: how many messages of each key are skipped."""

    first: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of messages of each key, beginning with the oldest.  [default: 1]"
        ),
    ] = None
    all_messages: Annotated[
        bool, typer.Option("--all", help="Skip every parked message of the key.")
    ] = False
    yes: YesOption = False

    @property
    def count(self) -> int | None:
        """The number of messages of each key that are skipped; None: all. Raises ConfigError if
        both options are given.
        """
        if self.all_messages and self.first is not None:
            raise ConfigError("--all means every message: remove --first")
        return None if self.all_messages else self.first or 1


@dataclass(frozen=True, slots=True)
class DeadSkipping(Skipping):
    """The options of `skip` for dead letters."""

    all_messages: Annotated[bool, typer.Option("--all", help="Skip every dead letter.")] = False


@dataclass(frozen=True, slots=True)
class ParkedPlace:
    """The options that name one message."""

    key: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The oldest parked message of this order key."),
    ] = None
    key_hex: Annotated[
        str | None, typer.Option(metavar="HEX", help="The same, for a key in hexadecimal.")
    ] = None
    partition: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="ID",
            help="The partition of the message, see `show`; with a key, the partition on which it "
            "is parked.",
        ),
    ] = None
    offset: Annotated[
        int | None, typer.Option(min=0, help="The offset of the message in this partition.")
    ] = None
    dead: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for the calls of an admin client; raises ConfigError."""
        wanted = Selection(self.key, self.key_hex).wanted_key()
        if isinstance(wanted, EllipsisType) or wanted is None:
            if self.partition is None or self.offset is None:
                raise ConfigError("say which message: --partition and --offset, or --key")
            return {"partition_id": self.partition, "offset": self.offset}
        if self.offset is not None:
            raise ConfigError("a key names its oldest message: remove --offset, or --key")
        return {"key": wanted, "partition_id": self.partition, "dead": self.dead}


@dataclass(frozen=True, slots=True)
class DeadPlace(ParkedPlace):
    """The options that name one dead letter."""

    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The oldest dead letter of this order key.")
    ] = None
    dead: bool | None = True


@dataclass(frozen=True, slots=True)
class Change:
    """The options that change a message."""

    value: Annotated[str | None, typer.Option(metavar="TEXT", help="The new value.")] = None
    value_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the new value.")
    ] = None
    in_editor: Annotated[
        bool, typer.Option("--editor", help="Edit the value, which is text, in $EDITOR.")
    ] = False
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A property; all given ones replace those of the message; may be repeated.",
        ),
    ] = None
    """Properties in the form `name=value`, which replace all earlier ones; without any, they
    stay.
    """

    @property
    def new_value(self) -> bytes | None:
        """
        The new value; None if it stays, or is edited.

        Raises:
            ConfigError: nothing is to be changed, or two options give the value.
            InputError: the file cannot be read.
        """
        if (self.value is not None) + (self.value_file is not None) + self.in_editor > 1:
            raise ConfigError("give one of --value, --value-file and --editor")
        if self.value_file is not None:
            return _content(self.value_file)
        if self.value is None and not (self.in_editor or self.header):
            raise ConfigError("say what is new: --value, --value-file, --editor, --header")
        return None if self.value is None else self.value.encode(errors="surrogateescape")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _bytes_of(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"--key-hex {text[:80]!r}: not hexadecimal") from None


def _not_empty(key: bytes) -> bytes:
    if not key:
        raise ConfigError("an empty key: messages without a key are --no-key")
    return key


def key_text(key: bytes | None) -> str:
    """Return a key as text for people."""
    if not key:
        return "(dead letters)" if key is None else "(no key)"
    text = key.decode(errors="backslashreplace")
    return text if len(text) <= KEY_CHARS_SHOWN else f"{text[:KEY_CHARS_SHOWN]}…"


def failure_text(failure: Failure) -> str:
    """Return the type and the text of a failure for people."""
    text = f"{failure.kind}: {failure.text}".removesuffix(": ")
    return text if len(text) <= FAILURE_CHARS_SHOWN else f"{text[:FAILURE_CHARS_SHOWN]}…"


def failure_facts(failure: Failure | None) -> dict[str, object] | None:
    """Return a failure as names and values for programs."""
    if failure is None:
        return None
    return {name: getattr(failure, name) for name in failure.__struct_fields__}


def key_facts(view: ParkedKeyView) -> dict[str, object]:
    """Return a parked key as names and values for programs; `key` is missing for dead letters of
    any key, and for retries.
    """
    from ....protocol.http.message_json import bytes_field

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
    Ask on a terminal, and exit with status 1 if the answer is no.

    Raises:
        ConfigError: there is no terminal, and no --yes.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question}  This is not a terminal: pass --yes to confirm.")
    typer.confirm(question, abort=True, err=True)
