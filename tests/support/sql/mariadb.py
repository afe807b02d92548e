"""A real MariaDB for the tests: the machine's own server, else Debian's package, unpacked into a
cache and not installed.

It listens on a Unix socket in a folder of its own. Its data needs no grants, so it starts without
a system database.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import asyncmy
import asyncmy.errors

from support.running.shared_end import ending_with_parent

PACKAGE = "mariadb-server-core"
ADVICE = f"install MariaDB, or let the tests download Debian's {PACKAGE} with apt-get"
SECONDS_TO_START = 60
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "keylane-tests" / PACKAGE
OPTIONS = (
    *("--no-defaults", "--skip-networking", "--skip-grant-tables", "--console"),
    *("--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=64M"),
)


def server_program() -> tuple[Path, Path]:
    """The server, and the folder `usr` that it lies in."""
    installed = shutil.which("mariadbd")
    if installed is not None:
        return Path(installed), Path("/usr")
    if not (CACHE / "usr" / "sbin" / "mariadbd").exists():
        _unpack()
    return CACHE / "usr" / "sbin" / "mariadbd", CACHE / "usr"


def _unpack() -> None:
    """Put the package and the libraries that the machine lacks into the cache; several test runs
    may do so at once.
    """
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as name:
        folder = Path(name)
        for part in ("lists/partial", "archives/partial", "packages"):
            (folder / part).mkdir(parents=True)
        own = [  # the machine's own lists stay as they are
            *("-o", f"Dir::State::lists={folder / 'lists'}", "-o", f"Dir::Cache={folder}"),
            *("-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=true"),
        ]
        try:
            _run(folder, "apt-get", *own, "update")
            depends = _run(folder, "apt-cache", *own, "depends", "--important", PACKAGE)
            wanted = [line.split()[-1] for line in depends.splitlines() if "Depends: lib" in line]
            missing = [library for library in wanted if not _is_installed(library)]
            _run(folder / "packages", "apt-get", *own, "download", PACKAGE, *missing)
            for package in (folder / "packages").glob("*.deb"):
                _run(folder, "dpkg-deb", "--extract", str(package), str(folder / "new"))
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", "")
            raise AssertionError(f"no MariaDB for the tests: {error} {output}; {ADVICE}") from error
        if not CACHE.exists():
            (folder / "new").rename(CACHE)


def _is_installed(library: str) -> bool:
    return subprocess.run(["dpkg", "-s", library], capture_output=True, check=False).returncode == 0


def _run(folder: Path, *command: str) -> str:
    return subprocess.run(command, cwd=folder, capture_output=True, check=True, text=True).stdout


class Mariadb:
    """A running server; `url()` is a new, empty database."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def url(self) -> str:
        """The address of a new database."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return f"mysql+asyncmy://keylane@localhost/{name}?unix_socket={self._socket}"

    def execute(self, statement: str) -> None:
        """Run one statement, from any thread and inside any event loop."""

        async def work() -> None:
            connection = await asyncmy.connect(unix_socket=str(self._socket), user="keylane")
            try:
                async with connection.cursor() as cursor:
                    await cursor.execute(statement)
            finally:
                connection.close()

        with ThreadPoolExecutor(1) as aside:
            aside.submit(asyncio.run, work()).result()


@contextmanager
def running_mariadb() -> Iterator[Mariadb]:
    """A server with a folder of its own, gone at the end."""
    program, usr = server_program()
    with tempfile.TemporaryDirectory(prefix="keylane-my-") as name:
        folder = Path(name)
        (folder / "data").mkdir()
        socket = folder / "socket"
        libraries = ":".join(str(path) for path in sorted(usr.glob("lib/*-linux-gnu")))
        command = [
            *(str(program), *OPTIONS, f"--datadir={folder / 'data'}", f"--socket={socket}"),
            *(f"--lc-messages-dir={usr / 'share' / 'mysql'}", f"--pid-file={folder / 'pid'}"),
            *(("--user=root",) if os.getuid() == 0 else ()),
        ]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | ({} if usr == Path("/usr") else {"LD_LIBRARY_PATH": libraries}),
                preexec_fn=ending_with_parent(signal.SIGINT),  # noqa: PLW1509  it calls nothing but the kernel
            )
        try:
            mariadb = Mariadb(socket)
            _wait_until_ready(server, mariadb, folder / "log")
            yield mariadb
        finally:
            server.kill()  # at once: its data is not needed any more
            server.wait(30)


def _wait_until_ready(server: subprocess.Popen[bytes], mariadb: Mariadb, log: Path) -> None:
    until = time.monotonic() + SECONDS_TO_START
    while True:
        assert server.poll() is None, f"MariaDB does not start; {ADVICE}\n{log.read_text()}"
        try:
            return mariadb.execute("SELECT 1")
        except (OSError, asyncmy.errors.Error):
            assert time.monotonic() < until, f"MariaDB does not start: {log.read_text()}"
            time.sleep(0.05)
