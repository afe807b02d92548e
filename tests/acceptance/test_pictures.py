"""A picture of a run in virtual time is what its program draws now."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tidy.tree import ROOT

pytestmark = pytest.mark.acceptance


def drawn(folder: Path, name: str) -> str:
    """The picture that its program draws now, which is the one in docs/pictures."""
    for program in (ROOT / "docs" / "pictures").glob("*.py"):
        shutil.copy(program, folder)
    subprocess.run([sys.executable, str(folder / f"{name}.py")], check=True, stderr=subprocess.PIPE)
    picture = (folder / f"{name}.svg").read_text()
    assert picture == (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
    return picture


def test_lineage_is_drawn_as_it_is_shown(tmp_path: Path):
    picture = drawn(tmp_path, "lineage")
    assert picture.count("was handled in the order 1 2 3 4 5 6 7 8<") == 2


def test_life_of_a_subject_is_drawn_as_it_is_shown(tmp_path: Path):
    """One group keeps up; the other one is not even in the open partitions."""
    picture = drawn(tmp_path, "life")
    assert "billing has acked everything" in picture
    assert "in 11 partitions" in picture
