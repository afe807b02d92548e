"""Formats a server's log: text for people at a terminal, JSON for log collectors.

    {"time": "2026-11-23T22:15:36.123Z", "level": "WARNING", "logger": "keylane.broker",
     "message": …, "program": …}

Every JSON line starts with the same fields, followed by the program's fields (`broker_group`,
`pid`), by `request_id` if it is about an HTTP request, and by `error` if there is a traceback. The
audit log adds the fields in a record's FIELDS attribute. A message with line breaks is one line of
JSON. In text, its other lines are indented like tracebacks, so that no text from a caller can pass
for a log line. Other control characters are escaped in both formats, because they could control a
terminal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TextIO

from ...protocol.text import json_printable, printable
from ..access.audit import FIELDS
from ..request_ids import REQUEST_ID

LOG_FORMATS = ("auto", "text", "json")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
TEXT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_problems(values: Mapping[str, object]) -> list[str]:
    """Return the problems with the settings `log_level` and `log_format`, as sentences."""
    problems = []
    if values.get("log_level", "INFO") not in LEVELS:
        problems.append(f"log_level is one of {', '.join(LEVELS)}, not {values['log_level']!r:.40}")
    if values.get("log_format", "auto") not in LOG_FORMATS:
        problems.append(
            f"log_format is one of {', '.join(LOG_FORMATS)}, not {values['log_format']!r:.40}"
        )
    return problems


class TextLines(logging.Formatter):
    """Formats each record as a line of text. Further lines and the traceback are indented."""

    def __init__(self) -> None:
        super().__init__(TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted lines, without a final line break."""
        text = super().format(record)
        if fields := getattr(record, FIELDS, None):
            text += f" {json.dumps(fields, ensure_ascii=False)}"
        return "\n    ".join(map(printable, text.split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line without a traceback."""
        request_id = REQUEST_ID.get()
        return super().formatMessage(record) + (f" (request {request_id})" if request_id else "")


class JsonLines(logging.Formatter):
    """Formats each record as a line of JSON that also contains `fields`."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted line, without a line break."""
        timestamp = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            "pid": record.process,
            **getattr(record, FIELDS, {}),
        }
        if request_id := REQUEST_ID.get():
            line["request_id"] = request_id
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_printable(json.dumps(line, ensure_ascii=False, default=str))


def log_to(
    stream: TextIO, *, level: str, log_format: str = "auto", fields: Mapping[str, object]
) -> None:
    """
    Write this process's log to `stream`, instead of any earlier destination.

    Args:
        log_format: "text", "json", or "auto" for text on a terminal and JSON elsewhere.
        fields: additional fields for every JSON line, such as the name of the program.
    """
    is_text = log_format == "text" or (log_format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextLines() if is_text else JsonLines(fields))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("keylane").setLevel(level)  # libraries say more at INFO than anybody reads
