"""A part of keylane whose extra is not installed names the extra, in one sentence."""

import subprocess
import sys

import pytest

WITHOUT = """
import runpy, sys

lacking = set(sys.argv[1].split(","))

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
code = sys.argv[2]
sys.argv = ["program", *sys.argv[3:]]
exec(code) if " " in code else runpy.run_module(code, run_name="__main__")
"""
EXTRAS = (
    "aiosqlite,alembic,asyncmy,asyncpg,caio,click,cryptography,jwt,numpy,pandas,prometheus_client,"
    "pyarrow,pydantic,pyspark,pytest,rich,rocksdict,sqlalchemy,uvloop"
)
TOKEN = "kl_" + "a" * 43


def run_without(packages: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code, or a module, in a process that cannot import `packages`."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, packages, code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def advice(package: str, extra: str) -> str:
    """What the error says: keylane is on no package index, but its user has a clone."""
    return (
        f' needs {package}, which the extra "{extra}" brings. In your clone of keylane: '
        f"pip install '.[{extra}]'"
    )


def test_clients_need_no_extra():
    code = "from keylane import Admin, Consumer, Producer; import keylane.sync, keylane.errors"
    done = run_without(EXTRAS, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "code", "extra"),
    [
        ("sqlalchemy", "from keylane.outbox import Outbox", "outbox"),
        ("sqlalchemy", "from keylane.sink import fenced", "outbox"),
        ("pyarrow", "from keylane.arrow import read", "arrow"),
        ("numpy", "from keylane.arrow import read", "arrow"),
        ("pyspark", "import keylane.spark", "spark"),
        (
            "pyarrow",
            "from keylane.consumer.handling.arrow_batch import check_arrow; check_arrow()",
            "arrow",
        ),
        (
            "cryptography",
            "import asyncio\n"
            "from keylane.rpc.http_network import HttpNetwork\n"
            "async def use(): HttpNetwork(token=" + repr(TOKEN) + ")\n"
            "asyncio.run(use())",
            "access",
        ),
    ],
)
def test_import_without_its_extra_names_the_extra(package, code, extra):
    """The error is an ImportError, as programs expect of an import."""
    caught = (
        "try:\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "except ImportError as error:\n    print(type(error).__name__, error.package, error.extra)"
        "\n    print(error.message)"
    )
    done = run_without(package, caught)
    assert done.returncode == 0, done.stderr
    first, message = done.stdout.splitlines()
    assert first == f"MissingExtraError {package} {extra}"
    assert message.endswith(advice(package, extra))


@pytest.mark.parametrize(
    ("package", "module", "arguments", "extra"),
    [
        ("click", "keylane.cli", ["--help"], "cli"),
        ("sqlalchemy", "keylane.cli", ["dev", "--port", "0"], "server"),
        ("uvloop", "keylane.broker", ["--meta", "127.0.0.1:1", "--group", "a"], "server"),
        (
            "rocksdict",
            "keylane.broker",
            ["--meta", "127.0.0.1:1", "--group", "a", "--index", "rocksdb"],
            "server",
        ),
        ("sqlalchemy", "keylane.metaserver", [], "server"),
    ],
)
def test_program_without_its_extra_ends_with_one_sentence(
    tmp_path, package, module, arguments, extra
):
    if module != "keylane.cli":
        arguments = [*arguments, "--data", str(tmp_path / "data"), "--port", "0"]
    done = run_without(package, module, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("keylane: ")
    assert advice(package, extra) in done.stderr
    assert "Traceback" not in done.stderr


def test_command_without_its_extra_ends_with_one_sentence():
    done = run_without(
        "sqlalchemy", "keylane.cli", "outbox", "status", "--database-url", "sqlite://"
    )
    assert done.returncode == 1
    assert advice("sqlalchemy", "outbox") in done.stderr
    assert "Traceback" not in done.stderr


def test_broken_module_of_keylane_is_no_missing_extra():
    done = run_without(
        "nothing", "import sys; sys.modules['keylane.outbox.client'] = None; import keylane.outbox"
    )
    assert "ModuleNotFoundError" in done.stderr
    assert "[MissingExtraError" not in done.stderr
