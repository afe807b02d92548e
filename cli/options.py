"""Options shared by several commands, and parsers for their values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, ClassVar

from ..protocol.errors import ConfigError
from .completion import complete_group, complete_subject
from .parameters import Argument, Option
from .template import Template

BROKERS_MAX = 32
ROWS_TOTAL = 336_776
"""Number of rows in the demo's data file."""
ROWS_MIN = 1_000
"""Minimum number of rows. With fewer, the killed consumer might have no unhandled messages."""


class InputFormat(enum.StrEnum):
    """The input format of `keylane produce`."""

    LINES = "lines"
    JSON = "json"
    CSV = "csv"
    NDJSON = "ndjson"


WAIT_S = ContextVar("WAIT_S", default=0.0)
"""The value of --wait-s: how long, in seconds, each client waits for a metaserver that is still
starting.
"""


class OutputFormat:
    """
    The output format of a command: tables for people, or JSON or a template for programs.

    TABLE and JSON are singletons; every other object has a template.
    """

    TABLE: ClassVar[OutputFormat]
    JSON: ClassVar[OutputFormat]

    def __init__(self, name: str, template: Template | None = None) -> None:
        self.template = template
        self._name = name

    def __str__(self) -> str:
        return self._name

    @classmethod
    def parse(cls, value: str | OutputFormat) -> OutputFormat:
        """Return the format for a value of --output. Raises ConfigError."""
        name = str(value)
        known = {str(each): each for each in (cls.TABLE, cls.JSON)}
        return known.get(name) or cls("template", Template(name))


OutputFormat.TABLE = OutputFormat("table")
OutputFormat.JSON = OutputFormat("json")


MetaOption = Annotated[
    str,
    Option(
        "--meta",
        envvar="KEYLANE_META",
        metavar="HOST:PORT",
        help="Address of the metaserver; several are separated by commas.",
    ),
]
OutputOption = Annotated[
    OutputFormat,
    Option(
        "--output",
        "-o",
        parser=OutputFormat.parse,
        metavar="table|json|TEMPLATE",
        help="For people, for programs, or a line for each row: text with fields of the JSON in "
        "braces; '{}' lists them.",
        complete=lambda _ctx, _param, _incomplete: ["table", "json"],
    ),
]

DryRunOption = Annotated[bool, Option("--dry-run", help="Show the plan, change nothing.")]
WaitOption = Annotated[
    bool, Option("--wait/--no-wait", help="Wait until it is done, and show the progress.")
]

LiveOption = Annotated[
    bool,
    Option(
        "--live",
        help="Also with live consumers: they release their partitions, and continue at the new "
        "offsets.",
    ),
]
CancelOption = Annotated[
    bool,
    Option("--cancel", help="Cancel a --live reset that still waits for consumers."),
]
ForceOption = Annotated[bool, Option("--force", help="Even with live consumers, which end.")]
CountOption = Annotated[
    int | None, Option("--count", "-n", min=1, help="Stop after this many messages.")
]
TagOption = Annotated[
    list[str] | None,
    Option("--tag", metavar="TAG", help="Only messages with this tag; may be repeated."),
]
AllPartitionsOption = Annotated[
    bool, Option("--all", help="Also show partitions that are sealed and drained.")
]
YesOption = Annotated[bool, Option("--yes", "-y", help="Do not ask on a terminal.")]
SubjectArgument = Annotated[
    str,
    Argument(metavar="SUBJECT", help="Name of the subject.", complete=complete_subject),
]
ConsumerGroupArgument = Annotated[
    str,
    Argument(metavar="GROUP", help="Name of the consumer group.", complete=complete_group),
]
KeyFieldOption = Annotated[
    str | None,
    Option(help="Column or field of the order key, in the formats csv and ndjson."),
]
KeylessOption = Annotated[
    bool, Option("--keyless", help="Send lines without a key too; they have no order.")
]
HeaderOption = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=VALUE",
        help="Property of every message, properties= in Python; may be repeated.",
    ),
]
DeliverAtOption = Annotated[
    str | None,
    Option(
        metavar="TIME",
        help="Deliver the message then: 2030-01-31T08:00:00Z, or milliseconds since 1970. Only "
        "without a key.",
    ),
]
DelayOption = Annotated[
    float | None,
    Option(min=0.001, metavar="SECONDS", help="Deliver each message this long after it was read."),
]
FileOption = Annotated[Path | None, Option(help="Read this file instead of standard input.")]
FormatOption = Annotated[
    InputFormat | None,
    Option(
        help='json: each line is {"key": …, "value": …, "properties": …}. csv has a header; each '
        "row of csv and ndjson is sent as a JSON object.",
        show_default="by the file's suffix, else lines",
    ),
]


END_MS = 253_402_300_800_000
"""Start of the year 10000 in UTC, the first time that a datetime cannot represent."""


def parse_time(text: str) -> int:
    """
    Convert an ISO 8601 date and time, in UTC unless it has a time zone, to milliseconds since 1970.

    Raises:
        ConfigError: the text is not a time, or the time is before 1970 or after 9999 in UTC.
    """
    from datetime import UTC, datetime

    from ..protocol.reading.instants import since_1970_ms

    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is not None:
        at_ms = since_1970_ms(time if time.tzinfo else time.replace(tzinfo=UTC))
        if 0 <= at_ms < END_MS:
            return at_ms
    raise ConfigError(f"not a time such as 2024-05-31T12:00:00: {text[:80]!r}")


def parse_headers(texts: Sequence[str]) -> dict[str, str]:
    """Parse `name=value` texts into properties. Raises ConfigError if one is invalid or
    repeated.
    """
    properties: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not name or not sign:
            raise ConfigError(f"--header is name=value, not {text[:80]!r}")
        if name in properties:
            raise ConfigError(f"--header {name!r} is given twice")
        properties[name] = value
    return properties
