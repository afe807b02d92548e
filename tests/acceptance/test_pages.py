"""The code of the pages for users is run, page by page, as their reader would type it.

A page says why a block is not run; the tutorial and the tests of docs/TESTING.md have tests of
their own. What a page leaves to its reader is in the folder pages/, in a file of the page's name.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from keylane.cli.java import find_java
from support.access.guarded import GuardedCluster
from support.cluster import Cluster
from support.page_run import PageRun
from support.page_steps import REASONS, steps_of
from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance

STAND_INS = Path(__file__).parent / "pages"
NOT_FOR_USERS = ("decisions", "tutorial", ".zh")
"""Parts of the names of pages that are not read here. The tutorial has a test of its own, and a
translation has the code of its original.
"""
STEPS = {
    page.relative_to(ROOT).as_posix(): steps_of(page)
    for page in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("README.md")),
    ]
    if not any(part in page.relative_to(ROOT).as_posix() for part in NOT_FOR_USERS)
}
PAGES = [name for name, steps in STEPS.items() if any(step.runs for step in steps)]
LEFT_OUT = {
    "a cluster with access control": 3,
    "a disk has to be lost": 7,
    "a package of others": 4,
    "a server of Spark Connect": 1,
    "names of other hosts": 9,
    "servers have to be stopped": 3,
}
"""How many blocks are left out for each reason; whoever leaves out another one says so here."""
GUARDED = {"docs/ACCESS.md"}
"""Pages about a cluster with access control."""
PARTITIONS = {"docs/do/grow-and-move.md": 4}
"""Partitions of the subject `orders` where a page says how many it has."""
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A page ends before the second compiler or a parallel collector pays off."""
SPARK_PAGES = {
    "docs/SPARK.md",
    "docs/do/reprocess-with-spark.md",
    "examples/spark_reprocessing/README.md",
}


def stem_of(name: str) -> str:
    """The name of a page's stand-in; that of a project is called after its folder."""
    return Path(name).parent.name if name.startswith("examples/") else Path(name).stem


def page_param(name: str):
    """A page as a parameter, with its marks."""
    marks = [pytest.mark.spark, pytest.mark.timeout(600)] if name in SPARK_PAGES else []
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [page_param(name) for name in PAGES])
async def test_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cluster"
    folder.mkdir()
    (tmp_path / "reader").mkdir()
    guarded = name in GUARDED
    with GuardedCluster(folder, 2) if guarded else Cluster(folder) as cluster:
        environment = {"KEYLANE_META": cluster.meta, "CLUSTER_FOLDER": str(folder)}
        partitions = PARTITIONS.get(name, 2)  # two are what `keylane dev` makes
        if isinstance(cluster, GuardedCluster):
            environment["KEYLANE_TOKEN_FILE"] = str(folder / "admin.token")
            await cluster.made("orders", partitions=partitions)
        else:
            await cluster.create("orders", partitions=partitions)
        if name in SPARK_PAGES:
            environment["JAVA_HOME"] = str(find_java().path)
            environment["SPARK_SUBMIT_OPTS"] = JAVA_OPTIONS
        first, second = (broker.address for broker in cluster.brokers)
        replaced = {
            "127.0.0.1:7000": cluster.meta,
            "127.0.0.1:7101": first,
            "127.0.0.1:7102": second,
            "/data/": f"{tmp_path}/reader/",
            "/tmp/": f"{tmp_path}/reader/",
        }
        if name.startswith("examples/"):  # its reader is in the folder of the project
            shutil.copytree((ROOT / name).parent, tmp_path / "reader", dirs_exist_ok=True)
        stand_in = STAND_INS / f"{stem_of(name)}.py"
        run = PageRun(ROOT / name, tmp_path / "reader", environment, replaced)
        run.follow(stand_in if stand_in.exists() else STAND_INS / "any_page.py")


def test_pages_leave_out_what_they_say_why():
    marks = [step.mark for steps in STEPS.values() for step in steps if step.mark]
    assert Counter(marks) == LEFT_OUT
    assert set(marks) <= set(REASONS)


def test_pages_with_code_are_found():
    assert {"README.md", "docs/CONSUMING.md", "docs/OPERATING.md", "docs/SPARK.md"} <= set(PAGES)
    projects = {name for name in PAGES if name.startswith("examples/")}
    assert {Path(name).parent.name for name in projects} == {
        "django_shop",
        "spark_reprocessing",
        "warehouse",
        "web_shop",
    }
    steps = [step for name in PAGES for step in STEPS[name] if step.runs]
    assert sum(step.kind == "python" for step in steps) > 40
    assert sum(len(step.commands) for step in steps) > 130


def test_stand_in_belongs_to_a_page():
    stems = {stem_of(name) for name in PAGES}
    assert {path.stem for path in STAND_INS.glob("*.py")} <= stems | {"any_page"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("    keylane subject describe bills\n", "no such subject (subject=bills)"),
        ("    $ echo paid\n    packed\n", "expected 'packed'"),
        ("```python\nprint(7)  # 8\n```\n", "line 1: ['7']"),
        ("```python\nawait bill()\n```\n", "name 'bill' is not defined"),
        ("<!-- run: no, too long -->\n\n    keylane subject list\n", "too long"),
    ],
)
def test_page_fails_when_it_is_wrong(text, shown, shared_cluster, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    environment = {"KEYLANE_META": shared_cluster.meta}
    with pytest.raises(AssertionError) as failed:
        PageRun(page, tmp_path, environment, {}).follow(None)
    assert shown in str(failed.value)


def test_steps_of_a_page_are_in_its_order(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        """
Make it, and look: <!-- run: no, a disk has to be lost -->

    keylane broker evacuate g1 --accept-loss

1. In a list:

        pip install .
        keylane subject create orders \\
            --partitions 4    # as many as you like

```python
print(7)
```

    fails ─▶ parked

```console
$ keylane subject list
orders
```
"""
    )
    lost, listed, python, console = steps_of(page)
    assert (lost.mark, lost.runs) == ("a disk has to be lost", False)
    (created,) = listed.commands
    assert (
        created.command == "keylane subject create orders --partitions 4    # as many as you like"
    )
    assert (python.kind, python.block.text, python.runs) == ("python", "print(7)\n", True)
    assert [(each.command, each.output) for each in console.commands] == [
        ("keylane subject list", ["orders"])
    ]
