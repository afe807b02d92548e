"""What a release promised stays: formats, frames, endpoints, names and error codes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from golden.versions.release import ADVICE, changes, frame_tags, lines, recorded
from keylane.protocol.membership.versions import VERSION

DOCS = Path(__file__).parents[3] / "docs"
NOW = lines()
RELEASES = recorded()
NEWEST = list(RELEASES)[-1]


@pytest.mark.parametrize("version", RELEASES)
def test_release_keeps_what_it_promised(version: str) -> None:
    """A later version may only add; the newest record is compared to the letter."""
    found = changes(RELEASES[version], NOW, additions=version == NEWEST)
    assert not found, (
        f"what users of {version} rely on has changed. Semantic Versioning: a "
        f"patch version changes "
        "none of it; a minor version adds, and takes away only what was "
        "announced one minor version "
        "before. If that is meant, raise the version and record it: "
        "PYTHONPATH=tests python -m golden.versions.release\n" + "\n".join(found)
    )


def test_newest_record_is_of_this_version() -> None:
    assert NEWEST == VERSION


def test_change_of_a_promise_is_found_with_its_advice() -> None:
    then = {
        "frame Ack": [4, "a"],
        "name keylane.Gone": "",
        "error 1104": "A",
        "field X.y": "optional",
    }
    now = {
        "frame Ack": [4, "a", "b"],
        "error 1104": "B",
        "field X.y": "required",
        "name keylane.New": "",
    }
    assert changes(then, now, additions=False) == [
        f"gone: name keylane.Gone ({ADVICE['name']})",
        f"changed: error 1104: A -> B ({ADVICE['error']})",
        f"changed: field X.y: optional -> required ({ADVICE['field']})",
    ]
    assert f"new: name keylane.New ({ADVICE['name']})" in changes(then, now, additions=True)
    moved = {"frame Ack": [4, "b", "a"]}
    assert len(changes({"frame Ack": [4, "a", "b"]}, moved, additions=False)) == 1


def test_every_frame_is_in_the_document() -> None:
    text = (DOCS / "FORMATS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE)
    assert {name: int(number) for number, name in rows} == frame_tags()
