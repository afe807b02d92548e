"""The source distribution, and the wheel that is built from it, installed in an empty environment
beside a user's own `consumer.py` and `broker/`.
"""

import email
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
BUILT = shutil.ignore_patterns(
    ".venv*", ".git", "__pycache__", "build", "dist", ".pytest_cache", ".hypothesis"
)

USER_PROGRAM = """
import json

import broker
import consumer
import keylane
from keylane import Consumer, KeylaneError, Message, Producer
from keylane.protocol import errors

print(json.dumps({
    "broker": broker.OWNER,
    "consumer": consumer.OWNER,
    "keylane": keylane.__file__,
    "classes": [Consumer.__module__, Message.__module__, Producer.__module__],
    "same_errors": KeylaneError is errors.KeylaneError,
}))
"""

FORMATS = """
import importlib, json, pkgutil

names = [each.name for each in pkgutil.iter_modules() if each.name.startswith("pyspark_")]
print(json.dumps({name: importlib.import_module(name).DefaultSource.name() for name in names}))
"""

TYPED_PROGRAM = """
import keylane
from keylane import Admin, Consumer, Message, Producer


async def handle(message: Message) -> None:
    reveal_type(message.properties)


async def use() -> None:
    async with Producer("127.0.0.1:7000") as producer:
        reveal_type(await producer.send("s", b"v", key=b"k"))
        try:
            await producer.send("s", "v")
        except keylane.QueueFullError as error:
            reveal_type(error.queued_bytes)
    async with Admin("127.0.0.1:7000") as admin:
        reveal_type((await admin.describe_group("s", "g")).partitions[0].lag)
    Consumer("127.0.0.1:7000", subject="s", group="g", handler=handle)
    Consumer("127.0.0.1:7000", subject="s", group="g", handler=len)
"""


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder of a source distribution and the wheel made from it. They are built from a copy,
    so that the tree stays clean and other tests see nothing half made.
    """
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "a folder of any name"
    shutil.copytree(ROOT, source, ignore=BUILT, symlinks=True)
    made = folder / "dist"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", made, source, cwd=folder)
    return made


@pytest.fixture(scope="module")
def wheel(distributions):
    (made,) = distributions.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory, wheel):
    """A new venv with the wheel in it; it sees our dependencies, but not the checkout."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    install = ["--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, *install, wheel, cwd=folder)
    # A path file adds one folder and does not read the path files in it, so the link
    # from our own environment to the checkout is not followed.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    target = Path(run(python, "-c", code, cwd=folder).strip())
    (target / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def user_folder(tmp_path):
    """A project whose modules have the names of our rooms."""
    for room in ("broker", "protocol", "rpc", "cli"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("OWNER = 'the user'\n")
    for room in ("consumer", "producer", "metaserver"):
        (tmp_path / f"{room}.py").write_text("OWNER = 'the user'\n")
    return tmp_path


def package_files() -> set[str]:
    """The files of the packages, as a wheel names them."""
    names = {
        f"{package.replace('.', '/')}/{path.name}"
        for package in SETUPTOOLS["packages"]
        for path in ROOT.joinpath(*package.removeprefix("keylane").split(".")).glob("*.py")
    }
    for package, patterns in SETUPTOOLS["package-data"].items():
        folder = ROOT.joinpath(*package.split(".")[1:])
        for pattern in patterns:
            found = [each.relative_to(folder).as_posix() for each in folder.glob(pattern)]
            assert found, pattern
            names |= {f"{package.replace('.', '/')}/{name}" for name in found}
    return names


def test_index_accepts_the_distributions(distributions):
    files = sorted(distributions.iterdir())
    assert [path.suffix for path in files] == [".whl", ".gz"]
    run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=distributions)


def test_source_distribution_holds_the_package_and_what_builds_it(distributions):
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {each.name.split("/", 1)[1] for each in opened.getmembers() if each.isfile()}
    made = {name for name in names if name.startswith("keylane.egg-info/")}
    beside = {"LICENSE", "README.md", "pyproject.toml"}
    assert names - made == {
        *beside,
        *("PKG-INFO", "setup.cfg"),  # made too
        *(name.removeprefix("keylane/") for name in package_files()),
    }


def test_wheel_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tops = {name.split("/", 1)[0] for name in names}
    assert len(tops) == 3
    assert {"keylane", "pyspark_keylane"} <= tops
    assert not {name for name in names if name.startswith(("keylane/tests", "keylane/benchmarks"))}
    assert {name for name in names if ".dist-info/" not in name} == package_files()


def test_wheel_brings_clients_only_what_sending_and_receiving_need(wheel):
    """The metadata of the wheel: packages without an extra, and the extras that exist."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    # An older one is refused by pip: "requires a different Python: 3.10.13 not in '>=3.11'".
    assert metadata["Requires-Python"] == ">=3.11"
    needed = metadata.get_all("Requires-Dist", [])
    names = {re.split(r"[^a-z0-9-]", each)[0] for each in needed if "extra ==" not in each}
    assert names == {"aiohttp", "backports-zstd", "crc32c", "lz4", "msgspec", "xxhash"}
    assert {"access", "all", "arrow", "cli", "outbox", "server", "spark"} <= set(
        metadata.get_all("Provides-Extra", [])
    )


def test_spark_finds_the_format_where_the_wheel_is_installed(empty_environment, tmp_path):
    """As PySpark looks for data sources: top-level packages of a name, and the class in them."""
    formats = json.loads(run(empty_environment / "bin" / "python", "-c", FORMATS, cwd=tmp_path))
    assert formats == {"pyspark_keylane": "keylane"}


def test_wheel_leaves_the_users_modules_alone(empty_environment, user_folder):
    python = empty_environment / "bin" / "python"
    (user_folder / "program.py").write_text(USER_PROGRAM)
    for command in (["program.py"], ["-c", USER_PROGRAM]):
        seen = json.loads(run(python, *command, cwd=user_folder))
        assert seen["broker"] == seen["consumer"] == "the user"
        assert Path(seen["keylane"]).is_relative_to(empty_environment)
        assert all(module.startswith("keylane.") for module in seen["classes"])
        assert seen["same_errors"]


@pytest.mark.parametrize("command", [["bin/keylane"], ["bin/python", "-m", "keylane.cli"]])
def test_command_runs_in_an_empty_environment(empty_environment, user_folder, command):
    program = [empty_environment / command[0], *command[1:]]
    assert "demo" in run(*program, "--help", cwd=user_folder)


def checked(command: list[object], folder: Path) -> str:
    """The output of a type checker on a user's program with two faults."""
    (folder / "program.py").write_text(TYPED_PROGRAM)
    command = [sys.executable, "-m", *map(str, command)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_mypy_sees_the_types_of_an_installed_wheel(empty_environment, tmp_path):
    """mypy sees real types, no `Any`; an argument that a call does not take is an error."""
    python = empty_environment / "bin" / "python"
    command = ["mypy", "--strict", "--cache-dir", tmp_path, "--python-executable", python]
    said = checked([*command, "program.py"], tmp_path).splitlines()
    assert [line.split("Revealed type is ")[1] for line in said if "Revealed" in line] == [
        '"typing.Mapping[str, str | bytes]"',
        '"keylane.protocol.message.Receipt"',
        '"int | None"',
        '"int | None"',
    ]
    errors = [line.split(" error: ")[1] for line in said if " error: " in line]
    assert [error.rsplit("[")[-1] for error in errors] == ["call-overload]", "arg-type]"]


def test_basedpyright_sees_the_types_of_an_installed_wheel(empty_environment, tmp_path):
    """As mypy does."""
    python = empty_environment / "bin" / "python"
    command = ["basedpyright", "--outputjson", "--pythonpath", python, "program.py"]
    said = json.loads(checked(command, tmp_path))["generalDiagnostics"]
    assert [
        diagnostic["message"].split(" is ")[-1]
        for diagnostic in said
        if diagnostic["severity"] == "information"
    ] == [
        '"Mapping[str, str | bytes]"',
        '"Receipt"',
        '"int | None"',
        '"int | None"',
    ]
    errors = [diagnostic["rule"] for diagnostic in said if diagnostic["severity"] == "error"]
    assert errors == ["reportArgumentType", "reportArgumentType"]
