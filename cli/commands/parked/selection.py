"""The options of `keylane parked` and `keylane dead`, which select keys and messages, and describe
edits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, cast

from msgspec.structs import asdict

from ....protocol.errors import ConfigError, InputError
from ....protocol.http.message_json import KeyField, key_field
from ....protocol.parked import Failure, ParkState
from ....protocol.reading.instants import parse_ago_ms
from ....protocol.text import key_text as text_of_key
from ....protocol.text import parse_number
from ...parameters import Option

if TYPE_CHECKING:
    from ....admin import ParkedKeyView

KEY_CHARS_SHOWN = 60
FAILURE_CHARS_SHOWN = 80
SELECTORS = "--key, --key-hex, --no-key, --dead, --older-than, --error or --partition"
SECONDS_MAX = 999_999_999_999
KEYLESS_ADVICE = (
    "a message without a key is named by --partition and --offset, which `show --no-key` shows"
)


YesOption = Annotated[
    bool, Option("--yes", "-y", help="Do not ask; required if the input is not a terminal.")
]
FirstOption = Annotated[
    int, Option(min=1, help="Number of messages of each key, beginning with the oldest.")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """The options that select keys."""

    key: Annotated[str | None, Option(metavar="TEXT", help="Only this order key.")] = None
    key_hex: Annotated[
        str | None, Option(metavar="HEX", help="Only this order key, in hexadecimal.")
    ] = None
    no_key: Annotated[bool, Option("--no-key", help="Only messages without a key.")] = False
    dead: Annotated[bool, Option("--dead", help="Only dead letters, of any key.")] = False
    partition: Annotated[
        int | None, Option(min=1, metavar="ID", help="Only on the partition with this id.")
    ] = None
    older_than: Annotated[
        str | None,
        Option(
            metavar="AGE",
            help="Only messages that were parked this long ago or longer: 90 (seconds), 15m, 1h, "
            "2d.",
        ),
    ] = None
    error: Annotated[
        str | None,
        Option(
            metavar="TEXT",
            help="Only messages with this in the type or text of their last failure.",
        ),
    ] = None
    among_dead: bool | None = None
    """True selects only dead letters, False everything except dead letters, and None both."""

    def selected_key(self) -> bytes | EllipsisType | None:
        """
        Return the selected key: b"" for messages without one, None for dead letters, `...` if no
        key is named.

        Raises:
            ConfigError: more than one of the options was given, or the key is invalid.
        """
        options = [self.key is not None, self.key_hex is not None, self.no_key, self.dead]
        if sum(options) > 1:
            raise ConfigError("give one of --key, --key-hex, --no-key and --dead")
        if self.dead:
            return None
        if self.no_key:
            return b""
        if self.key_hex is not None:
            return _require_nonempty(_parse_hex(self.key_hex))
        return (
            ...
            if self.key is None
            else _require_nonempty(self.key.encode(errors="surrogateescape"))
        )

    @property
    def older_than_ms(self) -> int | None:
        """The minimum age in milliseconds. Raises ConfigError."""
        if self.older_than is None:
            return None
        age_ms = parse_ago_ms(f"-{self.older_than}")
        seconds = parse_number(self.older_than)
        if seconds is not None and seconds <= SECONDS_MAX:
            age_ms = seconds * 1_000
        if age_ms is None:
            raise ConfigError(
                f"--older-than {self.older_than[:40]!r}: pass an age such as 90, 15m, 1h or 2d"
            )
        return age_ms

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for calls of the admin client. Raises ConfigError."""
        return {
            "key": self.selected_key(),
            "dead": self.among_dead,
            "partition_id": self.partition,
            "older_than_ms": self.older_than_ms,
            "error": self.error,
        }

    @property
    def by_key(self) -> bool:
        """True if an option names a key."""
        return self.selected_key() is not ...

    @property
    def is_limited(self) -> bool:
        """True if any option restricts the selection."""
        other_options = (self.partition, self.older_than, self.error)
        return self.by_key or any(other is not None for other in other_options)


def named_key(key: str | None, key_hex: str | None) -> bytes | None:
    """Return the order key that --key or --key-hex names; None if neither is given. Raises
    ConfigError.
    """
    found = Selection(key, key_hex).selected_key()
    return None if isinstance(found, EllipsisType) else found


@dataclass(frozen=True, slots=True)
class DeadSelection(Selection):
    """The options that select dead letters."""

    dead: bool = False
    among_dead: bool | None = True


@dataclass(frozen=True, slots=True)
class RedriveOptions:
    """The options of `redrive` besides the selection."""

    all_keys: Annotated[bool, Option("--all-keys", help="Every parked key.")] = False
    yes: YesOption = False


@dataclass(frozen=True, slots=True)
class DeadRedriveOptions(RedriveOptions):
    """The options of `redrive` for dead letters, without --all-keys."""

    all_keys: bool = False


@dataclass(frozen=True, slots=True)
class SkipOptions:
    """The options of `skip` besides the selection, which say how many messages of each key are
    skipped.
    """

    first: Annotated[
        int | None,
        Option(
            min=1, help="Number of messages of each key, beginning with the oldest.  [default: 1]"
        ),
    ] = None
    all_messages: Annotated[
        bool, Option("--all-messages", help="Skip every parked message of each selected key.")
    ] = False
    yes: YesOption = False

    @property
    def count(self) -> int | None:
        """The number of messages to skip per key; None for all. Raises ConfigError if both options
        were given.
        """
        if self.all_messages and self.first is not None:
            raise ConfigError("--all-messages means every message: remove --first")
        return None if self.all_messages else self.first or 1


@dataclass(frozen=True, slots=True)
class DeadSkipOptions(SkipOptions):
    """The options of `skip` for dead letters."""

    all_messages: Annotated[
        bool, Option("--all-messages", help="Skip every selected dead letter.")
    ] = False


@dataclass(frozen=True, slots=True)
class MessageOptions:
    """The options that identify one message."""

    key: Annotated[
        str | None,
        Option(metavar="TEXT", help="The oldest parked message of this order key."),
    ] = None
    key_hex: Annotated[
        str | None, Option(metavar="HEX", help="The same, for a key in hexadecimal.")
    ] = None
    partition: Annotated[
        int | None,
        Option(
            min=1,
            metavar="ID",
            help="The partition of the message, see `show`; with a key, the partition on which it "
            "is parked.",
        ),
    ] = None
    offset: Annotated[
        int | None, Option(min=0, help="The offset of the message in this partition.")
    ] = None
    dead: bool | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments for calls of the admin client. Raises ConfigError."""
        if "" in {self.key, self.key_hex}:
            raise ConfigError(f"the key is empty: {KEYLESS_ADVICE}")
        key = Selection(self.key, self.key_hex).selected_key()
        if isinstance(key, EllipsisType) or key is None:
            if self.partition is None or self.offset is None:
                raise ConfigError(
                    f"identify the message: --key, or --partition and --offset; {KEYLESS_ADVICE}"
                )
            return {"partition_id": self.partition, "offset": self.offset}
        if self.offset is not None:
            raise ConfigError("a key selects its oldest message: remove --offset, or --key")
        return {"key": key, "partition_id": self.partition, "dead": self.dead}


@dataclass(frozen=True, slots=True)
class DeadMessageOptions(MessageOptions):
    """The options that identify one dead letter."""

    key: Annotated[
        str | None, Option(metavar="TEXT", help="The oldest dead letter of this order key.")
    ] = None
    dead: bool | None = True


@dataclass(frozen=True, slots=True)
class EditOptions:
    """The options that edit a message."""

    value: Annotated[str | None, Option(metavar="TEXT", help="The new value.")] = None
    value_file: Annotated[
        Path | None, Option(metavar="FILE", help="A file with the new value.")
    ] = None
    in_editor: Annotated[
        bool, Option("--editor", help="Edit the value, which is text, in $EDITOR.")
    ] = False
    header: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="A property; all given ones replace those of the message; may be repeated.",
        ),
    ] = None
    """Properties as `name=value`, which replace all existing ones; if there are none, the existing
    ones are kept.
    """

    @property
    def new_value(self) -> bytes | None:
        """
        The new value; None if it is unchanged or to be entered in the editor.

        Raises:
            ConfigError: there is nothing to change, or the value is given by more than one option.
            InputError: the file cannot be read.
        """
        if (self.value is not None) + (self.value_file is not None) + self.in_editor > 1:
            raise ConfigError("give one of --value, --value-file and --editor")
        if self.value_file is not None:
            return _read_file(self.value_file)
        if self.value is None and not (self.in_editor or self.header):
            raise ConfigError("pass a change: --value, --value-file, --editor or --header")
        return None if self.value is None else self.value.encode(errors="surrogateescape")


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"--key-hex {text[:80]!r}: not hexadecimal") from None


def _require_nonempty(key: bytes) -> bytes:
    if not key:
        raise ConfigError("the key is empty: use --no-key for messages without a key")
    return key


def key_text(key: bytes | None) -> str:
    """Format a key for display, cut to KEY_CHARS_SHOWN characters."""
    text = "(dead letters)" if key is None else text_of_key(key)
    return text if len(text) <= KEY_CHARS_SHOWN else f"{text[:KEY_CHARS_SHOWN]}…"


def failure_text(failure: Failure) -> str:
    """Format the type and text of a failure for display."""
    text = f"{failure.kind}: {failure.text}".removesuffix(": ")
    return text if len(text) <= FAILURE_CHARS_SHOWN else f"{text[:FAILURE_CHARS_SHOWN]}…"


class FailureFields(TypedDict):
    """A failure, as JSON."""

    kind: str
    text: str
    client: str
    at_ms: int
    attempts: int


def failure_fields(failure: Failure | None) -> FailureFields | None:
    """Return a failure as JSON fields."""
    return None if failure is None else cast(FailureFields, asdict(failure))


def count_tries(view: ParkedKeyView) -> int | None:
    """Return the number of failed tries, as the last failure counted them; None if unknown."""
    return view.tries or (None if view.failure is None else view.failure.attempts)


def state_text(view: ParkedKeyView) -> str:
    """Return the state that tables and JSON show; for unordered messages, it says why they are set
    aside.
    """
    if view.being_adopted:
        return "being taken over"
    if view.state is not ParkState.PARKED:
        return view.state
    if view.tries:
        return "waits for retry"
    return ParkState.DEAD if view.key is None else view.state


class ParkedKeyFields(KeyField):
    """A parked key, as JSON. `key` is null for messages without a key, for dead letters of any key
    and for messages that wait for retry; `state` and `dead` tell these apart.
    """

    partition_id: int
    dead: bool
    state: str
    messages: int
    since_ms: int
    failure: FailureFields | None
    first_source: int
    first_offset: int
    tries: int | None
    next_ms: int | None


def key_fields(view: ParkedKeyView) -> ParkedKeyFields:
    """Return a parked key as JSON fields."""
    return {
        "partition_id": view.partition_id,
        "dead": view.is_dead,
        **key_field(view.key),
        "state": state_text(view),
        "messages": view.messages,
        "since_ms": view.since_ms,
        "failure": failure_fields(view.failure),
        "first_source": view.first_source,
        "first_offset": view.first_offset,
        "tries": count_tries(view),
        "next_ms": view.next_ms,
    }
