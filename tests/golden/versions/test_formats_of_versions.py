"""No format is newer than version 0.1: what is listed here, every member of a cluster reads."""

from __future__ import annotations

import json
import re
import typing
from pathlib import Path

from keylane.broker.scheduled import records
from keylane.broker.storage import identity, opening
from keylane.metaserver.backup.file import FORMAT as BACKUP_FORMAT
from keylane.protocol import frames
from keylane.protocol.record import FLAG_NUMBERED, VERSION, Compression, Kind
from keylane.protocol.reprocess.manifest import FORMAT as MANIFEST_FORMAT

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs"


def tags(union: object) -> dict[str, int]:
    """Frame → its number."""
    return {kind.__name__: kind.__struct_config__.tag for kind in typing.get_args(union)}


def formats() -> dict[str, object]:
    """All that this version writes to disks and wires."""
    return {
        "frames": tags(frames.Request) | tags(frames.Answer),
        "record": VERSION,
        "record kinds": {kind.name: kind.value for kind in Kind},
        "record flags": [FLAG_NUMBERED],
        "compressions": {each.name: each.value for each in Compression},
        "scheduled": [records.MAGIC.decode(), records.MAGIC_2.decode()],
        "identity": identity.FORMAT,
        "opening": opening.FORMAT,
        "backup": BACKUP_FORMAT,
        "manifest": MANIFEST_FORMAT,
    }


def test_formats_are_those_of_the_first_version() -> None:
    """
    A format that is added fails here.

    Enter it under a list of its own version, and have its writer ask whether the cluster's version has it
    (`Registration.cluster_version`, decision 60): a member of the version before does not read it.
    """
    assert formats() == json.loads((HERE / "formats_0_1.json").read_text())


def test_every_frame_is_in_the_document() -> None:
    text = (DOCS / "FORMATS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    told = {name: int(number) for number, name in rows}
    assert told == tags(frames.Request) | tags(frames.Answer)
