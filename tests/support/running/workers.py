"""How the workers of a parallel run share tests: a file at a time, in the order of the collection.

The pages of tests/acceptance/test_pages.py are taken one by one. The files of tests/tidy that read the whole tree are taken at once: what was read and parsed is kept
in the process. So are those of tests/spark: they share one Java process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    import pytest
    from xdist.workermanage import WorkerController


TIDY = "tests/tidy/"
SPARK = "tests/spark/"
PAGES = "tests/acceptance/test_pages.py"
"""Each of its tests has a cluster of its own."""
WITHOUT_TREE = frozenset(
    f"{TIDY}test_{name}.py"
    for name in ("documented_commands", "public_face", "second_chance", "workers")
)
"""They run programs, and parse nothing."""


class FileByFile(LoadScopeScheduling):
    """
    As pytest-xdist's own by module, but for a worker that dies, which a test that hangs ends in.

    The test at which it died has failed and is not run again. A worker that replaces it is given
    no work before it has collected the tests.
    """

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(SPARK):
            return SPARK
        if file == PAGES:
            return nodeid
        return TIDY if file.startswith(TIDY) and file not in WITHOUT_TREE else file

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return
        share = self.assigned_work[node]
        before = set(share)
        try:
            super()._reschedule(node)
        except OSError:  # it has just died as well: what it was to get waits for another worker
            for scope in set(share) - before:
                self.workqueue[scope] = share.pop(scope)

    def remove_node(self, node: WorkerController) -> str | None:
        """Give the rest of its work to others; the test at which it died, None if it had nothing to
        do.
        """
        work = self.assigned_work.pop(node)
        left = [test for share in work.values() for test, done in share.items() if not done]
        if not left:
            return None
        for scope, share in work.items():
            tests = {test: done for test, done in share.items() if test != left[0]}
            if not all(tests.values()):
                self.workqueue[scope] = tests
        for other in self.assigned_work:
            self._reschedule(other)
        return left[0]
