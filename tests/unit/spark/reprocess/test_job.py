"""Jobs by name: their function, and a version that follows their source."""

from __future__ import annotations

import sys

import pytest

from keylane.errors import Reason
from keylane.spark.reprocess.job import load_job
from support.raising import raises


def write(folder, text: str) -> None:
    (folder / "job_of_a_test.py").write_text(text)
    sys.modules.pop("job_of_a_test", None)


def test_code_of_a_job_changes_when_its_source_does(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write(tmp_path, "def run(rows):\n    return rows\n")
    first = load_job("job_of_a_test:run")
    assert (first.name, first.function(3)) == ("job_of_a_test.run", 3)
    assert load_job("job_of_a_test:run", name="again").code == first.code
    write(tmp_path, "def run(rows):\n    return rows.slice(1)\n")
    assert load_job("job_of_a_test:run").code != first.code


FILES = {
    "job_of_a_test.py": "import json, rules_of_a_test\nfrom parts_of_a_test import first\nimport "
    "numpy, keylane\n\n\n"
    "def run(rows):\n    from parts_of_a_test.inner import late\n    return rows\n",
    "rules_of_a_test.py": "from deep_of_a_test import LIMIT\n",
    "deep_of_a_test.py": "LIMIT = 15\n",
    "parts_of_a_test/__init__.py": "",
    "parts_of_a_test/first.py": "from . import second\n",
    "parts_of_a_test/second.py": "",
    "parts_of_a_test/inner/late.py": "",
    "other_of_a_test.py": "",
}


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A job with modules of its own: imported, from a package, within a function, through another
    one, not at all.
    """
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_of_a_test")]:
        del sys.modules[name]


@pytest.mark.parametrize("name", FILES)
def test_code_of_a_job_changes_when_a_module_that_it_imports_does(modules, name):
    """Else a job that is run again mixes pieces of old and new rules under one code."""
    first = load_job("job_of_a_test:run").code
    assert load_job("job_of_a_test:run").code == first
    (modules / name).write_text(FILES[name] + "LIMIT = 30\n")
    for each in [each for each in sys.modules if each.endswith("_of_a_test")]:
        del sys.modules[each]
    assert (load_job("job_of_a_test:run").code == first) == (name == "other_of_a_test.py")


def test_code_of_a_job_has_the_version_that_its_user_gives(modules):
    """Of what no digest sees; it is a name."""
    plain = load_job("job_of_a_test:run").code
    assert load_job("job_of_a_test:run", version="2026.11").code == f"{plain}+2026.11"
    with raises(Reason.NAME_INVALID):
        load_job("job_of_a_test:run", version="a b")


@pytest.mark.parametrize(
    "named", ["", "json", "json:nothing", "no.such.module:run", "json:__doc__"]
)
def test_job_is_refused_when_it_is_no_function(named):
    with raises(Reason.JOB_FAILED):
        load_job(named)
