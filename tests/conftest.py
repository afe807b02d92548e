"""What every test may rely on, which tests run, and in what order workers take them."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane.rpc.program import allow_open_files
from support.browser import BROWSERS, find_browser, is_needed
from support.cluster import Cluster
from support.running import second_chance
from support.running.examples import choose_examples, has_examples
from support.running.stack_dumps import StackDumps
from support.shelves import Shelves

if TYPE_CHECKING:
    from support.running.workers import FileByFile

# Some tests end a broker in their own process as a kill does: its files stay open.
allow_open_files()

# A shell that runs the tests in the background has SIGINT ignored, and children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEFT_OUT = pytest.StashKey[int]()
"""How many tests with a browser are left out."""
LONG_FIRST = (
    "tests/sim/test_simulation.py",
    "tests/spark/",
    "tests/tidy/",
    "tests/acceptance/",
    "tests/crash/",
    "tests/integration/",
    "tests/browser/",
    "tests/property/broker/test_storage_damage.py",
    "tests/property/",
    "tests/proof/",
    "tests/judge/",
    "tests/unit/rpc/",
    "tests/unit/checker/",
    "tests/unit/cli/",
)
"""
The order in which workers take tests; files of other folders come last.

Simulation, Spark and type checkers need the processor most. Programs that are killed, with leases
of seconds, follow them.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="the tests marked `whole` as well")
    second_chance.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    # until all tests are collected: they stay, and a collection goes through all of them
    gc.disable()
    second_chance.configure(config)
    config.pluginmanager.register(StackDumps())
    choose_examples(whole=config.getoption("--whole"))


@pytest.hookimpl(tryfirst=True)  # marks are given before `-m` asks for them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        for item in filter(has_examples, items):
            item.add_marker("whole")
    else:
        left_out = [item for item in items if item.get_closest_marker("whole")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("whole")]
    _leave_out_browser(config, items)
    items.sort(key=lambda item: _rank(item.nodeid))


def _leave_out_browser(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests with a browser on a machine that has none, unless they must run."""
    if find_browser() is not None:
        return
    with_browser = [item for item in items if item.get_closest_marker("browser")]
    if with_browser and is_needed():
        raise pytest.UsageError(f"no Chromium: {', '.join(BROWSERS)}; apt-get install chromium")
    if with_browser:
        config.hook.pytest_deselected(items=with_browser)
        items[:] = [item for item in items if not item.get_closest_marker("browser")]
        config.stash[LEFT_OUT] = len(with_browser)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(
            f"left out {count} tests of the console, because this machine has no Chromium: "
            "apt-get install chromium"
        )


def pytest_collection_finish() -> None:
    """Exempt the thousands of collected tests from garbage collection: a collection that a test
    asks for is quick.
    """
    gc.freeze()
    gc.enable()


def _rank(nodeid: str) -> int:
    return next(
        (rank for rank, start in enumerate(LONG_FIRST) if nodeid.startswith(start)), len(LONG_FIRST)
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileByFile:
    from support.running.workers import FileByFile

    return FileByFile(config, log)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that no test kills; each test makes subjects of its own."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def file_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster of the test file's own that no test kills, with the options of the file's mark
    `cluster`.
    """
    with Cluster(tmp_path_factory.mktemp("cluster"), **_cluster_options(request)) as cluster:
        yield cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of the test's own, to be killed and restarted, with the options of its mark
    `cluster`.
    """
    with Cluster(tmp_path, **_cluster_options(request)) as cluster:
        yield cluster


def _cluster_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    mark = request.node.get_closest_marker("cluster")
    return mark.kwargs if mark else {}


@pytest.fixture
def shelves() -> Iterator[Shelves]:
    """A stand-in for a metaserver and a broker, for tests of the Spark reader."""
    shelves = Shelves()
    shelves.start()
    yield shelves
    shelves.stop()
