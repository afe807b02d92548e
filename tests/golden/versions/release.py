"""What users rely on, as flat lines: formats, frames, endpoints, names and error codes.

Run as a program it records the lines of this version, in `release_0_2_0.json` and so on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keylane.broker.scheduled import agenda, old_journal
from keylane.broker.storage import data_folder as identity
from keylane.broker.storage import data_folder as opening
from keylane.metaserver.backup.file import FORMAT as BACKUP_FORMAT
from keylane.protocol import frames
from keylane.protocol.endpoints import BROKER, METASERVER
from keylane.protocol.http.openapi import openapi_document
from keylane.protocol.membership.versions import VERSION
from keylane.protocol.record import FLAG_NUMBERED, Compression, Kind
from keylane.protocol.record import VERSION as RECORD_VERSION
from keylane.protocol.reprocess.manifest import FORMAT as MANIFEST_FORMAT

HERE = Path(__file__).parent
GOLDEN = HERE.parent
FACES = ("", ".admin", ".errors", ".sync", ".outbox", ".sink", ".spark", ".testing", ".arrow")
"""The modules whose public names are promised, behind `keylane`."""
ADVICE = {
    "format": "the version before does not read it: its writer asks for the cluster's version "
    "(decision 60)",
    "frame": "a new field comes last and has a default; a new frame goes to brokers "
    "of its version only",
    "endpoint": "a path, method or parameter that goes breaks scripts: announce it one minor "
    "version before",
    "field": "a new field of a request is optional; a field of an answer stays",
    "name": "a name that goes breaks programs: warn one minor version before",
    "error": "a code keeps its meaning for ever; an error that is raised no more keeps its number",
}
"""Kind of a line → what Semantic Versioning asks of a change of it."""


def lines() -> dict[str, Any]:
    """All lines of this version, each with its value; its first word is its kind."""
    return dict(sorted([*_formats(), *_frames(), *_endpoints(), *_names(), *_errors()]))


def _formats() -> Iterator[tuple[str, Any]]:
    versions = {
        "record": RECORD_VERSION,
        "record flag numbered": FLAG_NUMBERED,
        "scheduled": [old_journal.MAGIC.decode(), old_journal.MAGIC_2.decode()],
        "agenda": agenda.MAGIC.decode(),
        "identity": identity.FORMAT,
        "opening": opening.FORMAT,
        "backup": BACKUP_FORMAT,
        "manifest": MANIFEST_FORMAT,
    }
    for name, value in versions.items():
        yield f"format {name}", value
    for kind in Kind:
        yield f"format record kind {kind.name}", kind.value
    for compression in Compression:
        yield f"format compression {compression.name}", compression.value
    for path in GOLDEN.rglob("*_v[0-9]*.*"):
        digest = hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()
        yield f"format bytes of {path.relative_to(GOLDEN)}", digest


def frame_tags() -> dict[str, int]:
    """Frame → its number."""
    kinds = typing.get_args(frames.Request) + typing.get_args(frames.Answer)
    return {kind.__name__: kind.__struct_config__.tag for kind in kinds}


def _frames() -> Iterator[tuple[str, Any]]:
    for kind in typing.get_args(frames.Request) + typing.get_args(frames.Answer):
        yield f"frame {kind.__name__}", [kind.__struct_config__.tag, *kind.__struct_fields__]


def _endpoints() -> Iterator[tuple[str, Any]]:
    for program, endpoints in (("metaserver", METASERVER), ("broker", BROKER)):
        document = openapi_document(endpoints, program=program)
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                call = f"endpoint {program} {method.upper()} {path}"
                yield call, operation["x-rights"]
                for each in operation["parameters"]:
                    yield f"{call} {each['name']}", each["in"]
        for name, schema in document["components"]["schemas"].items():
            required = schema.get("required", [])
            for field in schema.get("properties", {}):
                needed = "required" if field in required else "optional"
                yield f"field {name}.{field}", needed
            for value in schema.get("enum", ()):
                yield f"field {name}={value}", "value"


def _names() -> Iterator[tuple[str, Any]]:
    for face in FACES:
        module = importlib.import_module(f"keylane{face}")
        for name in getattr(module, "__all__", None) or _own_names(module):
            yield f"name {module.__name__}.{name}", ""


def _own_names(module: types.ModuleType) -> list[str]:
    """The public names of a module without `__all__`: what it took from its own rooms."""
    of_ours = f"{module.__name__}."
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(of_ours)
    ]


def _errors() -> Iterator[tuple[str, Any]]:
    for code, name in json.loads((GOLDEN / "error_codes.json").read_text()).items():
        yield f"error {code}", name


def recorded() -> dict[str, dict[str, Any]]:
    """Version → its lines, the oldest release first."""
    files = HERE.glob("release_*.json")
    versions = {path.stem.removeprefix("release_").replace("_", "."): path for path in files}
    by_number = sorted(versions, key=lambda text: tuple(map(int, text.split("."))))
    return {version: json.loads(versions[version].read_text()) for version in by_number}


def changes(then: dict[str, Any], now: dict[str, Any], *, additions: bool) -> list[str]:
    """What was taken away, changed, or added if that counts, each with what it asks for."""
    found = []
    for line, value in then.items():
        if line not in now:
            found.append(f"gone: {line}")
        elif not _goes_on(value, now[line]):
            found.append(f"changed: {line}: {value} -> {now[line]}")
        elif additions and value != now[line]:
            found.append(f"new: {line}: {value} -> {now[line]}")
    if additions:
        found += [f"new: {line}" for line in now if line not in then]
    return [f"{each} ({ADVICE[each.split(': ')[1].split()[0]]})" for each in found]


def _goes_on(value: object, newer: object) -> bool:
    """Whether a value is the same, or the fields of a frame that got more behind them."""
    if isinstance(value, list) and isinstance(newer, list):
        return newer[: len(value)] == value
    return value == newer


if __name__ == "__main__":
    target = HERE / f"release_{VERSION.replace('.', '_')}.json"
    target.write_text(json.dumps(lines(), indent=1) + "\n")
