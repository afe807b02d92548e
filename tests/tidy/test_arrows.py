"""Which room may import which: the arrows of docs/ARCHITECTURE.md, read from the source.

A failure prints `file:line imports X: the reason`. A new exception is a decision: write it here,
with its reason, and in docs/ARCHITECTURE.md.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch

import pytest

from tidy.tree import FILES, PACKAGES, ROOMS, ROOT, Import, Source, imports_of

PROGRAMS = {"metaserver", "broker", "producer", "consumer", "admin", "outbox", "sink", "spark"}

# room -> the rooms it may import, besides itself
ARROWS: dict[str, set[str]] = {
    "protocol": set(),
    "rpc": {"protocol"},
    "arrow": {"protocol", "rpc"},  # columns of batches and readers of ranges, without Spark
    "user_database": {"protocol"},
    **{program: {"protocol", "rpc"} for program in PROGRAMS},
    "outbox": {"protocol", "rpc", "user_database"},
    "sink": {"protocol", "rpc", "user_database"},
    "consumer": {"protocol", "rpc", "arrow"},
    "producer": {"protocol", "rpc", "arrow"},  # hashes a column of keys
    "spark": {"protocol", "rpc", "arrow", "producer"},  # it writes by the producer's columns
    # it runs the migrations, serves the console's pages, and asks brokers as an admin client does
    "metaserver": {"protocol", "rpc", "migrations", "console", "admin"},
    "otel": {"protocol", "rpc"},  # installs what clients trace with
    # what a page shows and does is what the clients' calls show and do
    "console": {"protocol", "rpc", "admin", "consumer"},
    "checker": {"protocol"},
    "cli": {"protocol", "rpc", "arrow", "checker", "console", *PROGRAMS},
    "migrations": set(),
    "sync": {"protocol", "rpc", "producer", "consumer"},  # for programs without an event loop
    # clusters in memory for users' tests: all that a cluster is made of, and its clients
    "testing": {"protocol", "rpc", "metaserver", "broker", "admin", "consumer"},
    # the public face; keylane.metrics reads what clients count, and builds families as servers do
    "": {"protocol", "rpc", "producer", "consumer", "admin", "sync"},
}

# The machine: files, folders, environment.
MACHINE_MODULES = ["os", "pathlib", "shutil", "tempfile", "fcntl", "mmap", "glob"]
MACHINE = [
    "broker/storage/*",
    "*/settings.py",  # a program reads its settings and names its data folder
    "*/__main__.py",
    "cli/*",
    "rpc/program.py",  # a program sets its umask
    "rpc/operating/machine.py",
    "rpc/operating/service_manager.py",  # systemd gives its socket in variables
    "outbox/client.py",  # so does the holder of a lease
    "rpc/loop_binding.py",  # hears of a fork
    "rpc/access/token_file.py",  # a client reads its token
    "rpc/access/key_set.py",  # reads the keys of an outside issuer
    "rpc/tls/contexts.py",  # reads the files of certificates
    "broker/app.py",  # names the file of the broker's token
    "metaserver/running.py",  # names the files of tokens
    "testing/*.py",  # names data folders, which lie in memory
    "metaserver/sql/database.py",  # where the SQLite file lies
    "metaserver/sql/migrate.py",  # where the migrations lie
    "metaserver/sql/told_history.py",  # the number beside the SQLite file
    "metaserver/sql/open_files.py",  # tries whether a file can be opened
    "spark/reprocess/folder.py",  # the files of a job's output
    "spark/reprocess/job.py",  # the modules of a job's code
    "consumer/arguments.py",  # the manifest behind which a group begins
    "spark/session.py",  # PySpark takes its settings from the environment
]

# Who may import a module. A pattern is a path under the root; every other file may not.
HOME_OF: dict[str, list[str]] = {
    "aiohttp": ["rpc/*"],
    "uvloop": ["rpc/program.py", "cli/*"],
    "sqlalchemy": [
        *("metaserver/*", "migrations/*", "outbox/*", "sink/*", "user_database/*"),
        "testing/machines/*",  # the metaserver's database in memory
    ],
    "pytest": ["testing/plugin.py"],
    "opentelemetry": ["otel/*"],
    "prometheus_client": [
        *("rpc/operating/*", "broker/metrics.py", "metaserver/metrics.py", "metrics.py"),
        *("cli/commands/cluster/reports.py", "cli/top/figures.py"),  # read the figures of servers
    ],
    "cryptography": ["rpc/tls/contexts.py", "rpc/access/signing.py", "cli/commands/cluster/*"],
    "jinja2": ["console/html.py"],
    "jwt": ["metaserver/access/issuer.py"],
    "aiosqlite": ["metaserver/*"],
    "asyncpg": ["metaserver/*"],
    "alembic": ["metaserver/*", "migrations/*", "user_database/migrations.py"],
    "pyspark": ["spark/*"],
    "pyarrow": ["arrow/*", "spark/*", "producer/tables/arrow.py"],
    "pandas": ["spark/*"],
    "numpy": [
        "arrow/*",
        "spark/*",
        "producer/tables/arrow.py",
    ],
    "py4j": ["spark/*"],
    "caio": ["broker/storage/kernel_syncs.py"],
    "rocksdict": ["broker/storage/index/rocksdb.py", "broker/storage/index/rocksdb_tables.py"],
    "click": ["cli/*"],
    "rich": ["cli/*"],
    "textual": ["cli/top/app.py"],
    **dict.fromkeys(MACHINE_MODULES, MACHINE),
    "subprocess": ["cli/*", "spark/session.py"],  # asks Java for its version
    "multiprocessing": ["cli/*", "sync/loop_thread.py"],  # its finalizers, at the end of a child
    "signal": ["rpc/program.py", "rpc/stop_signals.py", "cli/*"],
    "socket": [
        *("rpc/*", "cli/*", "outbox/client.py"),
        "testing/real_world.py",  # refuses them
    ],
    # Clocks: passed in as a value, so that tests and simulations own the time.
    "time": ["protocol/clock.py", "cli/*", "spark/*", "testing/real_world.py"],  # it refuses sleeps
    "datetime": [
        *("metaserver/*", "migrations/*", "cli/*", "spark/*"),
        # a time as a program gives it; no clock is asked
        *(
            "protocol/text.py",
            "protocol/scheduled/deliver_at.py",
            "protocol/text.py",
            "arrow/reading.py",
            "arrow/json_decoder.py",
            "protocol/reading/instants.py",
            "consumer/reading/bounds.py",
            "producer/sending.py",
            "producer/scheduled/sending.py",
            "sync/producer.py",
        ),
        "testing/cluster.py",  # the calendar of virtual time
        "console/lineage/axis.py",  # the words for a time that was stored
        # times as a person types them
        *("console/acts/access.py", "console/acts/groups.py", "console/views/messages.py"),
        "rpc/access/audit.py",  # writes the time of a line, which its caller took
        "admin/client.py",  # a time as a program gives it
        "admin/arguments.py",
        "admin/arguments.py",  # the same, where a word is wanted
        "rpc/operating/log_lines.py",  # writes the time of a record, which logging took
    ],
}

# The contract only computes: its allowed imports are listed.
PROTOCOL_MAY_IMPORT = {
    *("__future__", "abc", "array", "base64", "bisect", "collections", "dataclasses", "enum"),
    "difflib",
    *("functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "struct"),
    *("types", "typing", "unicodedata"),
    "random",  # for the type of the generator that is passed in
    "urllib.parse",  # percent-encoding, no socket
    "datetime",  # a time as a program gives it, in the file that HOME_OF names
    "zlib",  # a checksum and a codec, no file
    "sys",  # the version of Python; test_pure asserts that it is no more
    "ipaddress",  # reads addresses, without a look-up
    *("lz4", "backports", "compression"),  # codecs, no file
    *("msgspec", "xxhash", "crc32c"),
    "typing_extensions",  # for type checkers alone, who have it
}

BANNED_FILE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "shared_code"}


def top(module: str) -> str:
    return module.partition(".")[0]


def in_house_room(target: str) -> str | None:
    parts = target.split(".")
    if parts[0] != "keylane":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def may(source: Source, patterns: list[str]) -> bool:
    return any(fnmatch(source.name, pattern) for pattern in patterns)


def against_the_arrows(source: Source, imported: Import) -> str | None:
    room = in_house_room(imported.target)
    if room is None or room == source.room:
        return None
    if room in ARROWS[source.room]:
        return None
    return f"{source.room or 'the public face'} may import only {sorted(ARROWS[source.room])}"


def absolute_in_house(_source: Source, imported: Import) -> str | None:
    if not imported.relative and top(imported.target) in {"keylane", *ROOMS}:
        return "imports inside the house are relative"
    return None


def away_from_home(source: Source, imported: Import) -> str | None:
    homes = HOME_OF.get(top(imported.target))
    if imported.relative or homes is None or may(source, homes):
        return None
    return f"{top(imported.target)} lives in {', '.join(homes)}"


def in_the_contract(source: Source, imported: Import) -> str | None:
    if source.room != "protocol" or imported.relative:
        return None
    if {
        top(imported.target),
        imported.target,
    } & PROTOCOL_MAY_IMPORT or source.name == "protocol/clock.py":
        return None
    return "protocol/ does no I/O; its allowed imports are listed in this test"


def in_storage(source: Source, imported: Import) -> str | None:
    if source.name.startswith("broker/storage/") and in_house_room(imported.target) == "rpc":
        return "storage knows no network"
    return None


RULES: list[Callable[[Source, Import], str | None]] = [
    against_the_arrows,
    absolute_in_house,
    away_from_home,
    in_the_contract,
    in_storage,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_imports_follow_the_arrows(rule):
    broken = [
        f"{source.name}:{imported.line} imports {imported.target}: {reason}"
        for source in FILES
        for imported in imports_of(source)
        if (reason := rule(source, imported))
    ]
    assert not broken, "\n" + "\n".join(broken)


def builtin_opens(source: Source) -> Iterator[int]:
    for node in source.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"open", "io.open"}:
            yield node.lineno


def test_files_are_opened_only_where_files_belong():
    broken = [
        f"{source.name}:{line} calls open()"
        for source in FILES
        if not may(source, HOME_OF["os"])
        for line in builtin_opens(source)
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_clients_start_tasks_in_one_way():
    """The event loop is the program's, and may take the first step of a task inside of
    `create_task`.
    """
    broken = [
        f"{source.name}:{node.lineno} calls {ast.unparse(node.func)}(); rpc/race.py has start_task"
        for source in FILES
        if source.room in {"consumer", "console", "producer", "outbox", "admin", "sink", "rpc"}
        for node in source.nodes
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith(("create_task", "ensure_future"))
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_every_file_name_is_a_noun_of_its_own():
    broken = [source.name for source in FILES if source.path.stem in BANNED_FILE_NAMES]
    assert not broken, f"name the idea: {broken}"


def test_every_folder_with_code_is_in_the_package_list():
    named = {name.replace("keylane", ".", 1).replace(".", "/").strip("/") for name in PACKAGES}
    folders = {source.path.parent.relative_to(ROOT).as_posix().strip(".") for source in FILES}
    assert folders <= named, "pyproject.toml lacks a package"


def test_third_party_modules_are_declared_somewhere_in_this_test():
    """Every import of another package is one that was decided on."""
    known = {*HOME_OF, *PROTOCOL_MAY_IMPORT, "keylane", *sys.stdlib_module_names}
    strange = {
        f"{source.name}:{imported.line} imports {imported.target}"
        for source in FILES
        for imported in imports_of(source)
        if not imported.relative and top(imported.target) not in known
    }
    assert not strange, "\n" + "\n".join(sorted(strange))
