"""A second chance for tests of real processes: what failed beside other work may pass alone.

With `--second-chance`, if only a few tests of these folders failed and nothing else did, they run
once more, alone, after everything else has ended. If all pass now the run passes, and says which
tests have to be mended.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

FOLDERS = ("tests/integration/", "tests/acceptance/", "tests/crash/", "tests/spark/")
TESTS_MAX = 3


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-chance",
        action="store_true",
        help="if a few tests of real processes failed and no others, run them again, alone",
    )


def configure(config: pytest.Config) -> None:
    if config.getoption("--second-chance") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondChance())


class SecondChance:
    """A plugin of the process that reports: it sees the results of all workers."""

    def __init__(self) -> None:
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(
        wrapper=True, tryfirst=True
    )  # the outermost: after the workers' end and the summary
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        failed = list(self._failed)
        if (
            session.exitstatus != pytest.ExitCode.TESTS_FAILED
            or session.shouldfail  # not all tests were run
            or len(failed) > TESTS_MAX
            or not all(nodeid.startswith(FOLDERS) for nodeid in failed)
        ):
            return
        print(f"\n{len(failed)} failed, all tests of real processes; they run again, alone:")
        sys.stdout.flush()
        whole = ["--whole"] if session.config.getoption("--whole") else []
        command = [sys.executable, "-m", "pytest", *whole, *failed]
        again = subprocess.run(command, cwd=session.config.rootpath, check=False)
        if again.returncode == 0:
            session.exitstatus = pytest.ExitCode.OK
            for nodeid in failed:
                print(f"failed under load, passed alone: mend {nodeid}")
