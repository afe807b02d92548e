"""The tree says nothing of the machine it was written on, and leaves no note to do something later."""

import re

import pytest

from tidy.tree import ROOT, tracked_files

# Built from parts, so that this file does not find itself.
BANNED = {
    "a path of one machine": re.compile(r"(?<![\w./$}])/(?:work|root|home/\w+)" + r"/\w"),
    "a note for later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a mark of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
NOT_OURS = {"LICENSE", "requirements.lock"}


@pytest.mark.parametrize("what", BANNED)
def test_the_tree_is_free_of(what):
    broken = []
    for name in tracked_files():
        if name in NOT_OURS:
            continue
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a binary file, or one that a neighbour just took away
        broken += [
            f"{name}:{text.count(chr(10), 0, match.start()) + 1} {match[0]!r}"
            for match in BANNED[what].finditer(text)
        ]
    assert not broken, f"{what}:\n" + "\n".join(broken)


def test_the_lock_names_no_package_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "--hash=sha256:" in lock
