"""The tutorial does what it says: its programs and commands are run in its order, and print what the
page shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.pages import Walk, blocks_of
from support.ports import free_port
from tidy.tree import PROJECT, ROOT

pytestmark = pytest.mark.acceptance

TUTORIAL = ROOT / "docs" / "learn" / "tutorial.md"
PAGE_PORTS = ("7000", "7001", "7002")
"""The metaserver of `keylane dev`, and its two brokers."""


def free_ports() -> dict[str, str]:
    """A free port for each of the page's; they follow each other."""
    ports = [free_port() for _ in PAGE_PORTS]
    while ports[-1] - ports[0] != len(ports) - 1:
        ports = [*ports[1:], free_port()]
    return dict(zip(PAGE_PORTS, map(str, ports), strict=True))


def test_tutorial_prints_what_it_shows(tmp_path: Path):
    ports = free_ports()
    walk = Walk(tmp_path, ports | {"keylane dev": f"keylane dev --port {ports['7000']}"})
    walk.environment["KEYLANE_META"] = f"127.0.0.1:{ports['7000']}"  # the page has the default
    try:
        walk.follow(TUTORIAL)
    finally:
        walk.close()


def test_tutorial_installs_extras_that_there_are():
    (once,) = [block for block in blocks_of(TUTORIAL) if block.title == "once"]
    (extras,) = re.findall(r"\.\[([\w,]+)\]", once.text)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
