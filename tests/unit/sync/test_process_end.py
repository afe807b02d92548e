"""A client that is open at the end of its process is closed, also in each kind of child of
`multiprocessing`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from keylane.sync.loop_thread import ExitHook

def tell(what):
    print(what, flush=True)

def work():
    global kept
    kept = ExitHook(lambda: tell("closed"))
    kept.enable()
    dropped = ExitHook(lambda: tell("closed before"))
    dropped.enable()
    dropped.disable()

if __name__ == "__main__":
    method, kind = sys.argv[1:]
    context = multiprocessing.get_context(method)
    if kind == "process":
        process = context.Process(target=work)
        process.start()
        process.join()
    elif kind == "executor":
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(work).result()
    else:
        work()
    tell("ended")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["process", "executor"])
def test_call_is_made_once_when_a_child_of_multiprocessing_ends(
    tmp_path: Path, method: str, kind: str
):
    """Before Python 3.13 a forked child calls nothing of atexit: what an open producer had queued
    was lost.
    """
    assert _said(tmp_path, method, kind) == ["closed", "ended"]


def test_call_is_made_once_when_the_program_ends(tmp_path: Path):
    assert _said(tmp_path, "fork", "program") == ["ended", "closed"]


def _said(folder: Path, *words: str) -> list[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("\n")[:-1]
