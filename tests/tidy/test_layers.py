"""Files of one folder import each other without a circle, and larger rooms have only the arrows of
docs/ARCHITECTURE.md.

An arrow between two files of different folders counts where their ways part:
`metaserver/groups/views.py` that imports `metaserver/cluster/subjects.py` is an arrow from `groups`
to `cluster`, two things that lie in `metaserver`.
"""

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tidy.tree import FILES, ROOT, Source, imports_of, tracked_files

# folder -> the folders of the same room that it may import
LAYERS: dict[str, set[str]] = {
    "metaserver/sql": set(),
    "metaserver/backup": {"metaserver/sql"},
    "metaserver/cluster": {"metaserver/sql"},
    "metaserver/groups": {"metaserver/cluster", "metaserver/sql"},
    "metaserver/catalogue": {"metaserver/cluster", "metaserver/groups", "metaserver/sql"},
    "metaserver/operations": {
        "metaserver/catalogue",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/sql",
    },
    "metaserver/resets": {
        "metaserver/catalogue",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/sql",
    },
    "metaserver/starts": {
        "metaserver/catalogue",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/operations",
        "metaserver/resets",
        "metaserver/sql",
    },
    "metaserver/publications": {
        "metaserver/catalogue",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/operations",
        "metaserver/sql",
    },
    "spark/writing": set(),
    "spark/reprocess": {"spark/writing"},
    "spark/streaming": {"spark/reprocess"},
    "metaserver/retention": {"metaserver/catalogue", "metaserver/cluster", "metaserver/sql"},
    "metaserver/removals": {
        "metaserver/catalogue",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/sql",
    },
    "metaserver/rebuild": {
        "metaserver/access",
        "metaserver/backup",
        "metaserver/cluster",
        "metaserver/groups",
        "metaserver/operations",
        "metaserver/sql",
    },
    "metaserver/verify": {"metaserver/cluster", "metaserver/operations", "metaserver/sql"},
    "console/acts": set(),
    # a page has the form of a question
    "console/views": {"console/acts", "console/lineage"},
    "broker/partition": set(),
    "broker/storage": set(),
    "broker/store": {"broker/partition", "broker/storage"},
    "broker/retention": {"broker/partition", "broker/storage", "broker/store"},
    "broker/scheduled": {"broker/storage", "broker/store"},
    "broker/copies": {"broker/storage", "broker/store"},
    "broker/offline": {
        "broker/copies",
        "broker/partition",
        "broker/scheduled",
        "broker/storage",
        "broker/store",
    },
    "broker/storage/log": {"broker/storage/index"},
    "broker/storage/index": set(),
    "producer/scheduled": set(),
    "producer/tables": set(),
    "producer/trying": set(),
    "consumer/session": set(),
    "consumer/dispatch": {"consumer/session"},
    "consumer/reading": set(),
    "consumer/group": {"consumer/dispatch", "consumer/reading", "consumer/session"},
    "cli/commands": {"cli/top"},
    "cli/demo": set(),
    "cli/top": set(),
    "cli/commands/broker": set(),
    "cli/commands/debug": {"cli/commands/cluster"},  # the same reports of servers
    "cli/commands/parked": set(),
    "cli/commands/spark": set(),
    "cli/commands/subject": {"cli/commands/broker"},
    "console/lineage": set(),
    "testing/machines": set(),
    "metaserver/access": {"metaserver/sql"},
    "broker/access": {"broker/scheduled", "broker/store"},
    "broker/answering": {"broker/partition", "broker/store"},
    "protocol/access": {"protocol/errors"},
    "protocol/codecs": {"protocol/errors"},
    "protocol/errors": set(),
    "protocol/groups": set(),
    "protocol/http": {
        "protocol/access",
        "protocol/errors",
        "protocol/reading",
        "protocol/reprocess",
    },
    "protocol/membership": {"protocol/errors"},
    "protocol/parked": {"protocol/errors"},
    "protocol/reading": {"protocol/errors", "protocol/groups"},
    "protocol/reprocess": {"protocol/errors", "protocol/groups"},
    "protocol/scheduled": {"protocol/errors"},
}

# folder -> imports that it may not have, because it decides or stores without a network
NO_NETWORK = ("broker/partition/", "broker/storage/", "checker/")

NAMES = {source.name for source in FILES}


def file_of(module: str) -> str | None:
    """The file of a module of ours, from `keylane.a.b` or from `keylane.a.b.name`."""
    path = "/".join(module.split(".")[1:])
    for name in (f"{path}.py", f"{path}/__init__.py"):
        if name.strip("/") in NAMES:
            return name.strip("/")
    return None


@cache
def arrows() -> list[tuple[Source, int, str]]:
    """(importing file, line, imported file) inside the package."""
    return list(_arrows())


def _arrows() -> Iterator[tuple[Source, int, str]]:
    for source in FILES:
        for imported in imports_of(source):
            target = file_of(imported.target) if imported.relative else None
            if target is not None and target != source.name:
                yield source, imported.line, target


def where_ways_part(file: str, other: str) -> tuple[str, str, str]:
    """The folder that two files have in common, and what of it each lies in."""
    left, right = file.split("/"), other.split("/")
    depth = 0
    while left[depth] == right[depth]:
        depth += 1
    return "/".join(left[:depth]), left[depth], right[depth]


@cache
def graphs() -> dict[str, dict[str, set[str]]]:
    """Folder -> each file or folder in it -> those of the same folder that it imports."""
    drawn: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for source, _, target in arrows():
        folder, start, end = where_ways_part(source.name, target)
        if "__init__.py" not in {start, end}:
            drawn[folder][start].add(end)
    return drawn


FOLDERS = sorted({name.rpartition("/")[0] for name in NAMES})


def test_arrows_are_found():
    """The search finds imports; an import in another form fails here."""
    assert len(arrows()) > 1_000
    assert set(LAYERS) <= {name.rpartition("/")[0] for name in NAMES}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder or "keylane")
def test_folder_has_no_circle(folder):
    """Its files and folders can be put in an order in which each imports only those before it."""
    try:
        TopologicalSorter(graphs().get(folder, {})).prepare()
    except CycleError as error:
        pytest.fail(f"{folder}: {' -> '.join(error.args[1])}")


def test_folders_import_only_the_layers_below():
    """The folders of a room, each of which is in the table."""
    rooms = {folder.rpartition("/")[0] for folder in LAYERS}
    broken = []
    for source, line, target in arrows():
        room, start, end = where_ways_part(source.name, target)
        if room in rooms and not start.endswith(".py") and not end.endswith(".py"):
            allowed = LAYERS[f"{room}/{start}"]
            if f"{room}/{end}" not in allowed:
                broken.append(f"{source.name}:{line} imports {target}: only {sorted(allowed)}")
    assert not broken, "\n" + "\n".join(broken)


def test_partitions_storage_and_checker_import_no_network():
    """Partitions, the disk and the checker."""
    broken = [
        f"{source.name}:{line} imports {target}"
        for source, line, target in arrows()
        if source.name.startswith(NO_NETWORK) and target.startswith("rpc/")
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_architecture_names_every_folder():
    """The table of folders in docs/ARCHITECTURE.md is complete."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert [folder for folder in LAYERS if f"`{folder}/`" not in text] == []


def test_unit_tests_mirror_the_folders_of_the_package():
    """Each folder of tests/unit/ is a folder of the package, or of the benchmarks."""
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit).as_posix() for path in unit.rglob("*.py")}
    names = [*NAMES, *(name for name in tracked_files() if name.startswith("benchmarks/"))]
    assert folders - {"."} <= {name.rpartition("/")[0] for name in names}
