"""Jobs by name: their function, and a version that follows their source."""

from __future__ import annotations

import sys

import pytest

from keylane.errors import JobFailedError
from keylane.spark.reprocess.job import load_job


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


@pytest.mark.parametrize(
    "named", ["", "json", "json:nothing", "no.such.module:run", "json:__doc__"]
)
def test_job_is_refused_when_it_is_no_function(named):
    with pytest.raises(JobFailedError):
        load_job(named)
