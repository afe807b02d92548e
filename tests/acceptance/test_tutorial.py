"""The tutorial does what it says: its programs and commands are run in its order, and print what the
page shows.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keylane.cli.commands.dev import ORDER
from keylane.outbox import create_tables
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


def test_dev_suggests_an_order_that_the_tutorial_can_bill():
    (billing,) = [block for block in blocks_of(TUTORIAL) if block.title == "billing.py"]
    order = json.loads(ORDER)
    read = set(re.findall(r'order\["(\w+)"\]', billing.text))
    assert read == set(order)
    assert int(order["total"]) > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_sender_of_the_tutorial_ends_quietly_at_a_signal(tmp_path: Path, number: signal.Signals):
    (sender,) = [block for block in blocks_of(TUTORIAL) if block.title == "sender.py"]
    (tmp_path / "sender.py").write_text(sender.text)
    asyncio.run(create_tables(f"sqlite:///{tmp_path / 'shop.db'}"))
    with subprocess.Popen(
        [sys.executable, "-P", "-u", "sender.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "sending what the shop commits\n"
        process.send_signal(number)
        rest = process.stdout.read()
    assert (process.returncode, rest) == (0, "")
