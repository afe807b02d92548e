"""The plugin runs async tests that take the fixture in virtual time, and leaves every other test alone."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.testing import VirtualCluster


@pytest.mark.keylane(brokers=2)
async def test_orders_stay_in_order_when_a_consumer_is_killed(keylane_cluster: VirtualCluster):
    """Ten minutes of virtual time in a fraction of a second of real time."""
    handled = []

    async def bill(name: str) -> None:
        async def handle(message: Message) -> None:
            await asyncio.sleep(0.1)
            handled.append((name, message.value))

        await Consumer(
            keylane_cluster.address, subject="orders", group="billing", handler=handle
        ).run()

    await keylane_cluster.create_subject("orders", partitions=1)
    first = keylane_cluster.start(bill, "first")
    async with Producer(keylane_cluster.address) as producer:
        await producer.send("orders", b"1", key=b"a")
        await keylane_cluster.until(lambda: handled)
        first.kill()
        keylane_cluster.start(bill, "second")
        for number in range(2, 6):
            await producer.send("orders", b"%d" % number, key=b"a")
    await asyncio.sleep(600)
    values = [value for _, value in handled]
    assert values in ([b"1", b"2", b"3", b"4", b"5"], [b"1", b"1", b"2", b"3", b"4", b"5"])
    assert {name for name, value in handled if value == b"5"} == {"second"}
    assert await keylane_cluster.lag("orders", "billing") == 0


def sections(folder: Path, text: str, *options: str) -> dict[str, str]:
    """What pytest, in a process of its own, prints of each test of a file, none of which passes."""
    test = folder / "test_user.py"
    test.write_text(text)
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options)
    run = subprocess.run(
        (*words, str(test)), capture_output=True, text=True, check=False, cwd=folder
    )
    assert run.returncode == 1
    _, *parts = re.split(
        r"^_+ (?:ERROR at setup of )?(test_\w+) _+$", run.stdout, flags=re.MULTILINE
    )
    return dict(zip(parts[::2], parts[1::2], strict=True))


REFUSED = {
    'brokers="two"': "@pytest.mark.keylane: brokers must be a whole number from 1 to 100, not 'two'",
    'seed="x"': "@pytest.mark.keylane: seed must be a whole number, or None, not 'x'",
    'limit_s="a"': "@pytest.mark.keylane: limit_s must be a number of seconds above 0, not 'a'",
    "broker=2": "unexpected keyword argument 'broker'; there are keylane(brokers=1",
}
"""Options that cannot work, and what is said of them."""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a run of pytest says of each of these options."""
    tests = (
        f"@pytest.mark.keylane({options})\nasync def test_{number}(keylane_cluster): ...\n"
        for number, options in enumerate(REFUSED)
    )
    told = sections(tmp_path_factory.mktemp("options"), "import pytest\n\n" + "\n".join(tests))
    return {options: told[f"test_{number}"] for number, options in enumerate(REFUSED)}


@pytest.mark.parametrize("options", REFUSED)
def test_option_that_cannot_work_is_told_with_the_marker(refusals: dict[str, str], options: str):
    assert REFUSED[options] in refusals[options]


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_async_fixture_is_refused_when_it_takes_the_cluster(tmp_path: Path, mode: str):
    """Its calls would go to whatever real program listens on the address of the cluster."""
    text = "import pytest\n"
    for ends in ("return", "yield"):
        text += (
            f"\n@pytest.fixture\nasync def orders_{ends}(keylane_cluster):\n"
            f"    await keylane_cluster.create_subject('orders')\n    {ends} 'orders'\n\n"
            f"async def test_{ends}(keylane_cluster, orders_{ends}): ...\n"
        )
    told = sections(tmp_path, text, "-o", f"asyncio_mode={mode}")
    for ends in ("return", "yield"):
        said = f"async fixture 'orders_{ends}' takes keylane_cluster, and would run outside"
        assert said in told[f"test_{ends}"]


def test_plugin_imports_no_cluster_before_a_test_asks_for_one():
    """Each run of pytest imports it, with keylane installed; and keylane imports nothing of it."""
    code = (
        "import sys, keylane, keylane.errors; early = 'keylane.testing' in sys.modules; "
        "import keylane.testing.plugin; "
        "print(early, sorted({'sqlalchemy', 'aiohttp', 'keylane.testing.cluster'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False []"
