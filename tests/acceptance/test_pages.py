"""The code of the pages for users is run, page by page, as their reader would type it.

A page says why a block is not run; the tutorial and the tests of docs/TESTING.md have tests of their
own. What a page leaves to its reader is in the folder pages/, in a file of the page's name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.access.guarded import GuardedCluster
from support.cluster import Cluster
from support.page_run import PageRun
from support.page_steps import steps_of
from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance

STAND_INS = Path(__file__).parent / "pages"
NOT_FOR_USERS = ("decisions", "tutorial", ".zh")
"""Parts of the names of pages that are not read here. The tutorial has a test of its own, and a
translation has the code of its original.
"""
PAGES = {
    page.relative_to(ROOT).as_posix(): page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if not any(part in page.as_posix().removeprefix(ROOT.as_posix()) for part in NOT_FOR_USERS)
    and any(not step.left_out for step in steps_of(page))
}
GUARDED = {"docs/ACCESS.md"}
"""Pages about a cluster with access control."""
PARTITIONS = {"docs/do/grow-and-move.md": 4}
"""Partitions of the subject `orders` where a page says how many it has."""
SPARK_PAGES = {"docs/SPARK.md", "docs/do/reprocess-with-spark.md"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.spark] * (name in SPARK_PAGES)) for name in PAGES],
)
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
        first, second = (broker.address for broker in cluster.brokers)
        replaced = {
            "127.0.0.1:7000": cluster.meta,
            "127.0.0.1:7101": first,
            "127.0.0.1:7102": second,
            "/data/": f"{tmp_path}/reader/",
        }
        stand_in = STAND_INS / f"{PAGES[name].stem}.py"
        run = PageRun(PAGES[name], tmp_path / "reader", environment, replaced)
        run.follow(stand_in if stand_in.exists() else STAND_INS / "any_page.py")
