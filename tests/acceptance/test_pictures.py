"""A picture of a run in virtual time is what its program draws now."""

import shutil
import subprocess
import sys

import pytest

from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance


def test_lineage_is_drawn_as_it_is_shown(tmp_path):
    for program in (ROOT / "docs" / "pictures").glob("*.py"):
        shutil.copy(program, tmp_path)
    subprocess.run(
        [sys.executable, str(tmp_path / "lineage.py")], check=True, stderr=subprocess.PIPE
    )
    drawn = (tmp_path / "lineage.svg").read_text()
    assert drawn == (ROOT / "docs" / "pictures" / "lineage.svg").read_text()
    assert drawn.count("was handled in the order 1 2 3 4 5 6 7 8<") == 2
