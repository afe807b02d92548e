"""The tree says nothing of the machine it was written on, and leaves no note to do something
later.
"""

import ast
import re
from collections import defaultdict

import pytest

from tidy.tree import FILES, ROOT, TEST_FILES, tracked_files

# Built from parts, so that this file does not find itself.
BANNED = {
    "a path of one machine": re.compile(r"(?<![\w./$}])/(?:work|root|home/\w+)" + r"/\w"),
    "a note for later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a mark of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
NOT_OURS = {"LICENSE", "requirements.lock"}

HEADLESS = re.compile(r"def (test_(?:what|who|all|one|it|they|again|nothing|an?|the)_\w+)")
"""Tests are named `test_<subject>_<does>_<when>`; the subject has no article."""


@pytest.mark.parametrize("what", BANNED)
def test_tree_is_free_of_banned_texts(what):
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


def test_lock_names_no_package_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "--hash=sha256:" in lock


def test_tests_are_named_by_their_subject():
    broken = [
        f"{source.name}:{source.text.count(chr(10), 0, match.start()) + 1} {match[1]}"
        for source in TEST_FILES
        for match in HEADLESS.finditer(source.text)
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_class_has_a_name_of_its_own():
    """Among the package's or among the tests', so that a name in a log or a traceback is one
    class.
    """
    files = defaultdict(list)
    for source in [*FILES, *TEST_FILES]:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                files[source in TEST_FILES, node.name].append(source.name)
    assert not {name: places for (_, name), places in files.items() if len(places) > 1}
