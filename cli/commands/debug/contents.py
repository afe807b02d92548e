"""What a debug bundle may contain: parts within a size, without values, keys and secrets. Pure.

    answer of a server ─▶ without fields that may hold a user's data ─▶ secrets masked ─▶ part

Only control calls are asked, and these never return messages. Two kinds of their fields may still
hold a user's data, and are left out or digested here: the texts of errors that handlers raised, and
the keys of parked messages. The texts of servers are masked as well, since one may quote a URL.
Digests of keys, also those in texts and logs, are hashed with a salt that is thrown away:
otherwise whoever guesses a key could see that it is there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypedDict

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ....protocol.control import PartitionStatus
from ....protocol.parked import FailingMessage, ParkedView
from ....protocol.text import key_digest, mask_password, printable

PART_BYTES_MAX = 16 << 20
BUNDLE_BYTES_MAX = 64 << 20
"""The largest size of all parts before they are compressed."""
MASK = "***"
SECRET_CHARS_MIN = 6
"""A shorter text is not masked in other texts, where it may be a part of any word."""
_SECRET_NAMES = ("token", "password", "passwd", "secret", "hash", "credential")
_KEY_DIGEST = re.compile("key digest [0-9a-f]{16}")
_LOG_FIELDS = ("time", "level", "logger", "message", "program", "broker_group", "pid")
"""The fields of a server's log line that are taken. `error` is a traceback, whose last line may
quote anything.
"""


class BundlePart(Struct, frozen=True, kw_only=True):
    """A part of a bundle."""

    name: str
    size_bytes: int
    what: str


class Missing(Struct, frozen=True, kw_only=True):
    """Something that a bundle does not have."""

    what: str
    reason: str


class WrittenBundle(TypedDict):
    """The result of `keylane debug bundle`, as JSON."""

    file: str
    size_bytes: int
    entries: list[BundlePart]
    missing: list[Missing]


class Contents:
    """
    Collects the parts of a bundle.

    Args:
        secrets: texts that are masked wherever they occur.
        salt: random bytes of this bundle, with which digests of keys are made.
    """

    def __init__(
        self, secrets: Iterable[str] = (), *, salt: bytes, bytes_max: int = BUNDLE_BYTES_MAX
    ) -> None:
        self.parts: dict[str, bytes] = {}
        self.entries: list[BundlePart] = []
        self.missing: list[Missing] = []
        self._salt = salt
        self._secrets = {each for each in secrets if len(each) >= SECRET_CHARS_MIN}
        self._bytes_left = bytes_max

    def add(self, name: str, what: str, value: object) -> None:
        """
        Add a part, or note that there is no room for it.

        Args:
            name: its file name in the bundle.
            value: lines of text, if it is text; else structs, dicts and lists, for JSON.
        """
        if isinstance(value, str):
            lines = (printable(self._masked(line)) for line in value.splitlines())
            data = "".join(f"{line}\n" for line in lines).encode()
        else:
            text = json.dumps(self._masked_values(msgspec.to_builtins(value)), indent=1)
            data = f"{text}\n".encode()
        if len(data) > min(PART_BYTES_MAX, self._bytes_left):
            self.miss(name, f"there is no room in the bundle for its {len(data):,} bytes")
            return
        self._bytes_left -= len(data)
        self._put(name, what, data)

    def add_listing(self, promise: str, *, made_at: str) -> None:
        """Add the list of all parts, for which there is always room, and sort them by name."""
        self.entries.sort(key=lambda part: part.name)
        listing = {
            "made_at": made_at,
            "promise": promise,
            "entries": msgspec.to_builtins(self.entries),
            "missing": msgspec.to_builtins(self.missing),
        }
        what = "what is in the bundle, and what is not"
        self._put("contents.json", what, f"{json.dumps(listing, indent=1)}\n".encode())

    def _put(self, name: str, what: str, data: bytes) -> None:
        self.parts[name] = data
        self.entries.append(BundlePart(name=name, size_bytes=len(data), what=what))

    def miss(self, what: str, reason: str) -> None:
        """Note that something is not in the bundle."""
        self.missing.append(Missing(what=what, reason=self._masked(reason)))

    def _masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        text = _KEY_DIGEST.sub(self._salted, text)
        return mask_password(text) if "://" in text else text

    def _salted(self, digest: re.Match[str]) -> str:
        salted = blake2b(digest[0].encode(), key=self._salt, digest_size=8)
        return f"salted key digest {salted.hexdigest()}"

    def _masked_values(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._masked(value)
        if isinstance(value, dict):
            return {
                self._masked(str(name)): self._masked_values(each) for name, each in value.items()
            }
        return [*map(self._masked_values, value)] if isinstance(value, list | tuple) else value


def file_name(text: str) -> str:
    """Return a name, or an address, as the name of a file."""
    return "".join(
        each if each.isascii() and (each.isalnum() or each in "._-") else "_" for each in text
    )


def status_without_values(status: PartitionStatus) -> PartitionStatus:
    """Return the status of a partition without the texts of errors."""
    return replace(
        status,
        groups=tuple(
            group
            if group.failing is None
            else replace(group, failing=_failing_without_text(group.failing))
            for group in status.groups
        ),
    )


def _failing_without_text(failing: FailingMessage) -> FailingMessage:
    return replace(failing, text="", others=tuple(map(_failing_without_text, failing.others)))


def parked_without_values(view: ParkedView) -> dict[str, object]:
    """Return a parked key with its digest, and with the class of its error but not the text."""
    failure = view.failure
    return {
        "key": None if view.key_hex is None else key_digest(bytes.fromhex(view.key_hex)),
        "state": view.state,
        "messages": view.messages,
        "since_ms": view.since_ms,
        "first_source": view.first_source,
        "first_offset": view.first_offset,
        "tries": view.tries,
        "next_ms": view.next_ms,
        "failure": None
        if failure is None
        else {
            "kind": failure.kind,
            "client": failure.client,
            "at_ms": failure.at_ms,
            "attempts": failure.attempts,
        },
    }


def variables_without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return keylane's variables of an environment; those that hold a secret as `***`."""
    return {
        name: MASK if is_secret(name) else value
        for name, value in sorted(environment.items())
        if name.startswith("KEYLANE_")
    }


def is_secret(name: str) -> bool:
    """Return True if a variable or setting of this name holds a secret, rather than the path of a
    file.
    """
    lower = name.lower()
    return not lower.endswith("_file") and any(each in lower for each in _SECRET_NAMES)


def log_lines(lines: Collection[str]) -> tuple[list[str], int]:
    """
    Return the lines of a log that a server of keylane wrote, and how many others there are.

    Only lines of JSON with `program` and a logger of keylane are taken, since consumers log the
    errors of handlers, and lines of text cannot be distinguished from theirs. Of a message with
    several lines, the first is taken.
    """
    taken = []
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if not isinstance(fields, dict) or fields.get("program") not in {"broker", "metaserver"}:
            continue
        if not str(fields.get("logger", "")).startswith("keylane."):
            continue
        kept = {name: fields[name] for name in _LOG_FIELDS if name in fields}
        kept["message"] = str(kept.get("message", "")).partition("\n")[0]
        taken.append(json.dumps(kept))
    return taken, len(lines) - len(taken)
