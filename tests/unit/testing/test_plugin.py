"""The plugin runs async tests that take the fixture in virtual time, and leaves every other test
alone.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from keylane import Consumer, Message, Producer
from keylane.testing import VirtualCluster

pytest_plugins = ["pytester"]


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
    'brokers="two"': "@pytest.mark.keylane: brokers must be a whole number from "
    "1 to 100, not 'two'",
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


ANOTHER_PLUGIN = """
import asyncio, inspect
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        names = pyfuncitem._fixtureinfo.argnames
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
        return True
"""
"""Runs async tests in real time, as the plugin of anyio; registered later, its hook comes before
ours.
"""


def test_async_test_runs_in_virtual_time_when_the_hook_of_another_plugin_comes_first(
    pytester: pytest.Pytester,
):
    pytester.makeconftest(ANOTHER_PLUGIN)
    pytester.makepyfile(
        """
        import asyncio

        async def test_of_ours(keylane_cluster):
            await asyncio.sleep(2)
            assert keylane_cluster.now_s > 2

        class TestMethods:
            async def test_of_ours(self, keylane_cluster, tmp_path):
                assert type(asyncio.get_running_loop()).__module__.startswith("keylane.")

        async def test_of_theirs():
            assert type(asyncio.get_running_loop()).__module__.startswith("asyncio")
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_async_test_of_hypothesis_is_refused_when_it_takes_the_cluster(tmp_path: Path, mode: str):
    """It was run in real time: its calls would go to whatever program listens on the address of the
    cluster.
    """
    text = (
        "from hypothesis import HealthCheck, given, settings, strategies\n"
        "@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])\n"
        "@given(number=strategies.integers())\n"
        "async def test_examples(keylane_cluster, number): ...\n"
    )
    told = sections(tmp_path, text, "-o", f"asyncio_mode={mode}")
    assert "call keylane.testing.run in a plain test" in told["test_examples"]


def test_plugin_imports_no_cluster_before_a_test_asks_for_one():
    """Each run of pytest imports it, with keylane installed; and keylane imports nothing of it."""
    code = (
        "import sys, keylane, keylane.errors; early = 'keylane.testing' in sys.modules; "
        "import keylane.testing.plugin; "
        "print(early, sorted({'sqlalchemy', 'aiohttp', 'keylane.testing.cluster'} & "
        "{*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False []"
