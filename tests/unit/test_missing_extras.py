"""A part of keylane whose extra is not installed names the extra, in one sentence."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from keylane.cli.demo import source
from keylane.cli.demo.run import check_packages
from keylane.cli.usage import EXTRA_BY_PACKAGE
from keylane.protocol.errors import MissingExtraError

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
    "aiosqlite,alembic,asyncmy,asyncpg,caio,click,cryptography,jwt,numpy,opentelemetry,pandas,"
    "prometheus_client,pyarrow,pydantic,pyspark,pytest,rich,rocksdict,sqlalchemy,textual,uvloop"
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
        ("opentelemetry", "from keylane.otel import KeylaneInstrumentor", "otel"),
        ("pyarrow", "from keylane.arrow import read", "arrow"),
        ("numpy", "from keylane.arrow import read", "arrow"),
        ("pyspark", "import keylane.spark", "spark"),
        (
            "pyarrow",
            "from keylane.consumer.dispatch.arrow import check_arrow; check_arrow()",
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
        ("sqlalchemy", "from keylane.testing import run", "testing"),
        ("cryptography", "from keylane.testing import VirtualCluster", "testing"),
        (
            "asyncpg",
            "from keylane.outbox import Outbox\nOutbox('127.0.0.1:1', 'postgresql+asyncpg://u@127.0.0.1/d')",
            "postgresql",
        ),
        (
            "asyncmy",
            "from keylane.outbox import Outbox\nOutbox('127.0.0.1:1', 'mysql+asyncmy://u@127.0.0.1/d')",
            "mysql",
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
        (
            "asyncpg",
            "keylane.metaserver",
            ["--database-url", "postgresql+asyncpg://127.0.0.1:1/meta"],
            "postgresql",
        ),
        ("uvloop", "keylane.cli", ["subject", "list"], "cli"),
        ("sqlalchemy", "keylane.cli", ["meta", "migrate"], "server"),
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


@pytest.mark.parametrize("package", ["uvloop", "sqlalchemy", "pandas", "pyarrow", "pyspark"])
def test_demo_names_its_extra_and_leaves_nothing(tmp_path, monkeypatch, package):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run_without(package, "keylane.cli", "demo")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"the demo{advice(package, 'demo')}" in done.stderr
    assert "[MissingExtraError 1012]" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_demo_names_its_extra_when_the_flights_are_missing(monkeypatch):
    monkeypatch.setattr(source, "DISTRIBUTION", "nycflights00")
    with pytest.raises(MissingExtraError, match=re.escape(advice("nycflights00", "demo"))):
        check_packages()


def test_metrics_of_clients_name_their_extra():
    code = "from keylane import metrics; metrics.register()"
    done = run_without("prometheus_client", code)
    assert done.returncode == 1
    assert f"keylane.metrics{advice('prometheus_client', 'metrics')}" in done.stderr


def test_fixture_names_its_extra(tmp_path):
    test = tmp_path / "test_orders.py"
    test.write_text("async def test_orders(keylane_cluster): ...\n")
    done = run_without("sqlalchemy", "pytest", str(test), "--rootdir", str(tmp_path), "-q")
    assert done.returncode == 1
    assert f"MissingExtraError: keylane.testing{advice('sqlalchemy', 'testing')}" in done.stdout


@pytest.mark.parametrize("extra", ["cli", "server", "top"])
def test_commands_know_the_extra_of_each_package(extra):
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    required = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"][extra]
    packages = {re.split(r"[\[<>=;]", line)[0].replace("-", "_") for line in required}
    packages = {{"pyjwt": "jwt"}.get(package, package) for package in packages} - {"keylane"}
    known = {package for package, name in EXTRA_BY_PACKAGE.items() if name == extra}
    assert packages - known == ({"prometheus_client"} if extra == "server" else set())
    assert known <= packages


def test_broken_module_of_keylane_is_no_missing_extra():
    done = run_without(
        "nothing", "import sys; sys.modules['keylane.outbox.client'] = None; import keylane.outbox"
    )
    assert "ModuleNotFoundError" in done.stderr
    assert "[MissingExtraError" not in done.stderr
