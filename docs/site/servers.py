"""Generates pages about the servers from the code: their settings, metrics, HTTP calls, and the
limits. Nothing here needs MkDocs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NamedTuple

from keylane.broker.settings import BrokerSettings
from keylane.metaserver.settings import MetaserverSettings
from keylane.protocol import endpoints, limits
from keylane.rpc.settings import flag_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS: dict[str, Any] = {"broker": BrokerSettings, "metaserver": MetaserverSettings}
CALLS = {"broker": endpoints.BROKER, "metaserver": endpoints.METASERVER}
UNITS = {"_ms": "ms", "_s": "s", "_bytes": "bytes", "_bytes_max": "bytes", "_ms_max": "ms"}
"""The end of a setting's name → the unit of its value."""
METRIC_FOLDERS = ("rpc", "broker", "metaserver", "metrics.py")
METRIC_KINDS = {
    "gauge": "gauge",
    "counter": "counter",
    "histogram": "histogram",
    "histograms": "histogram",
}
"""The function that makes a metric → its kind; `labelled` makes a gauge or a counter."""
LIMITS = (
    ("key", "KEY_BYTES_MAX", "bytes"),
    (
        "key, value and properties of a message; a subject may have a lower limit",
        "MESSAGE_BYTES_MAX",
        "bytes",
    ),
    ("properties of a message", "PROPERTIES_BYTES_MAX", "bytes"),
    ("tag", "TAG_BYTES_MAX", "bytes"),
    ("tags in the filter of a consumer", "TAGS_WANTED_MAX", ""),
    ("partitions of a subject", "PARTITIONS_MAX", ""),
    ("messages of a partition, over its lifetime", "PARTITION_MESSAGES_MAX", ""),
    ("consumer groups of a subject", "GROUPS_PER_SUBJECT_MAX", ""),
    (
        "producers that a partition remembers, to store a repeated batch once",
        "PRODUCERS_PER_PARTITION_MAX",
        "",
    ),
    (
        "ranges of acked messages above a cursor; then the consumer stops pulling",
        "ACK_RANGES_MAX",
        "",
    ),
    ("shortest ttl of a consumer", "TTL_MS_MIN", "ms"),
    ("longest ttl of a consumer", "TTL_MS_MAX", "ms"),
    ("time in flight of a message of a shared group", "IN_FLIGHT_MS_MAX", "ms"),
    (
        "messages of a partition in flight at one member of a shared group",
        "IN_FLIGHT_PER_SESSION_MAX",
        "",
    ),
    ("connections of clients to a broker, by default", "CONNECTIONS_MAX", ""),
    ("plain HTTP connections of a broker, by default", "HTTP_CONNECTIONS_MAX", ""),
    ("messages in one HTTP request that sends", "POSTED_MESSAGES_MAX", ""),
    ("messages in one HTTP answer", "READ_MESSAGES_MAX", ""),
)
"""What is limited, the constant in protocol/limits.py, and its unit."""


class MetricFacts(NamedTuple):
    """A metric of a server: its name, kind, description, and the folder of the code it is in."""

    name: str
    kind: str
    text: str
    folder: str


def table_cell(text: str) -> str:
    """Escape a text for a table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def setting_lines() -> Iterator[str]:
    """Yield the lines of the page of the servers' settings."""
    yield "# Settings of the servers"
    yield ""
    yield "A setting is a flag, a variable of the environment, or a line of a TOML file, in this"
    yield "order: `--retention-ms 3600000`, `KEYLANE_BROKER_RETENTION_MS=3600000`, and"
    yield "`retention_ms = 3600000` under `[broker]` of the file that `--config` or"
    yield "`KEYLANE_CONFIG` names. `keylane config show broker` shows the values, and where they"
    yield "come from."
    for program, kind in PROGRAMS.items():
        yield f"\n## keylane {program} run\n"
        yield "| setting | default | unit | |"
        yield "| --- | --- | --- | --- |"
        for field in fields(kind):
            text = table_cell(field.metadata.get("doc", ""))
            cells = f"{_default(field)} | {unit_of(field.name)} | {text}"
            yield f"| `{flag_of(field.name)}` | {cells} |"


def _default(field: Any) -> str:
    if field.default is MISSING and field.default_factory is MISSING:
        return "must be given"
    default = field.default if field.default is not MISSING else field.default_factory()
    if default in {None, "", ()}:
        return "–"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    is_number = isinstance(default, int) and not isinstance(default, bool)
    return f"{default:,}" if is_number else f"`{str(default).lower()}`"


def unit_of(name: str) -> str:
    """Return the unit of a setting, which its name ends with; "" if it has none."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "")


def metrics() -> list[MetricFacts]:
    """Return the metrics that the code of the servers makes, in the order of their names."""
    found: dict[str, MetricFacts] = {}
    for folder in METRIC_FOLDERS:
        place = ROOT / folder
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and (metric := _metric(node, folder)):
                    found.setdefault(metric.name, metric)
    return sorted(found.values())


def _metric(call: ast.Call, folder: str) -> MetricFacts | None:
    """Return the metric that a call makes, or None if it makes none."""
    function = call.func.id if isinstance(call.func, ast.Name) else ""
    if function not in {*METRIC_KINDS, "labelled"} or len(call.args) < 2:
        return None
    name, text = call.args[:2]
    if not (isinstance(name, ast.Constant) and str(name.value).startswith("keylane_")):
        return None
    kind = METRIC_KINDS.get(function, "gauge")
    if any(keyword.arg == "counts" for keyword in call.keywords):
        kind = "counter"
    shown = str(text.value) if isinstance(text, ast.Constant) else ast.unparse(text)
    return MetricFacts(str(name.value), kind, shown, folder)


def metric_lines() -> Iterator[str]:
    """Yield the lines of the page of the servers' metrics."""
    yield "# Metrics"
    yield ""
    yield "Brokers and metaservers serve `/metrics` in the text format of Prometheus. Times are in"
    yield "seconds, sizes in bytes. A program adds those of its producers and consumers to its own"
    yield "by `keylane.metrics.register()`."
    titles = {
        "rpc": "Every server",
        "broker": "Brokers",
        "metaserver": "Metaservers",
        "metrics.py": "Clients",
    }
    for folder, title in titles.items():
        yield f"\n## {title}\n"
        yield "| metric | kind | |"
        yield "| --- | --- | --- |"
        for metric in metrics():
            if metric.folder == folder:
                yield f"| `{metric.name}` | {metric.kind} | {table_cell(metric.text)} |"


def http_lines() -> Iterator[str]:
    """Yield the lines of the page of the servers' HTTP calls."""
    yield "# HTTP"
    yield ""
    yield "Each server describes its calls at `/v1/openapi.json`, with the types of their bodies."
    yield "[Messages by HTTP](../OPERATING.md#messages-by-http) shows some with curl."
    for program, calls in CALLS.items():
        yield f"\n## {program.capitalize()}\n"
        yield "| call | parameters | right | |"
        yield "| --- | --- | --- | --- |"
        for each in sorted(calls, key=lambda each: (each.path, each.method)):
            parameters = ", ".join(f"`{name}`" for name in (*each.query, *each.headers))
            text = table_cell(each.summary)
            yield f"| `{each.method} {each.path}` | {parameters} | {each.rights.value} | {text} |"


def limit_lines() -> Iterator[str]:
    """Yield the lines of the page of limits."""
    yield "# Limits"
    yield ""
    yield "Everything has a limit; beyond it, a call is refused with an error that names the limit."
    yield "[Parked keys](../PARKING.md#limits) have limits of their own, and so has what is"
    yield "[scheduled](../OPERATING.md#later-delivery). Limits of a server are among its"
    yield "[settings](settings.md)."
    yield ""
    yield "| | limit | constant |"
    yield "| --- | --- | --- |"
    for what, name, unit in LIMITS:
        yield f"| {what} | {f'{getattr(limits, name):,} {unit}'.strip()} | `{name}` |"
    yield ""
    yield "No copy of a broker's data takes over by itself. There are no transactions over several"
    yield "subjects. Programs in other languages send and read over HTTP; consumer groups are for"
    yield "Python."
