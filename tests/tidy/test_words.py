"""The tree says nothing of the machine it was written on, and leaves no note to do something later."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pytest

from tidy.tree import FILES, ROOT, TEST_FILES, source_of, tracked_files

# Built from parts, so that this file does not find itself.
BANNED = {
    "a path of one machine": re.compile(r"(?<![\w./$}])/(?:work|root|home/\w+)" + r"/\w"),
    "a note for later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a mark of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
NOT_OURS = {"LICENSE", "requirements.lock"}

# Words that say less than the field's noun; docs/GLOSSARY.md has the nouns.  A word in quotes is a name.
VAGUE = re.compile(
    r"(?<![a-z])(?!(?<=[\"`])\w+[\"`])"
    r"(?:di" + r"ce|for" + r"saken|who" + r"ever|(?:no|any|some)" + r"body|so ma" + r"ny)(?![a-z])",
    re.IGNORECASE,
)
HEADLESS = re.compile(r"def (test_(?:what|who|all|one|it|they|again|nothing|an?|the)_\w+)")
"""Tests are named `test_<subject>_<does>_<when>`; the subject has no article."""
TEST_NAME_WORDS_MIN = 3
"""After `test_`."""
RECORDED = "docs/PROOF.md"
"""It lists runs that were recorded, under the names of their day."""
NAMELESS = {"one", "found"}
"""Names that say nothing of a value: the field's noun is used instead."""


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


def in_texts(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1} {match[0]!r}"
        for name in tracked_files()
        if name.endswith((".py", ".md")) and name != RECORDED
        for text in [(ROOT / name).read_text()]
        for match in pattern.finditer(text)
    ]


def test_texts_have_no_vague_word():
    broken = in_texts(VAGUE)
    assert not broken, "\n" + "\n".join(broken)


def test_tests_are_named_by_their_subject():
    broken = in_texts(HEADLESS)
    assert not broken, "\n" + "\n".join(broken)


def test_tests_have_names_of_three_words():
    """`test_<subject>_<does>_<when>`: fewer words do not say what is asserted."""
    broken = [
        f"{source.name}:{node.lineno} {node.name}"
        for source in TEST_FILES
        for node in source.nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and node.name.count("_") < TEST_NAME_WORDS_MIN
    ]
    assert not broken, "\n" + "\n".join(broken)


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Every name that is given to a value, with its line: variables, parameters, imports, captures."""
    for node in nodes:
        match node:
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.alias():
                yield node.asname or node.name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno
            case ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, node.lineno


def test_values_are_named_by_nouns():
    broken = [
        f"{file}:{line} {name}"
        for file in tracked_files()
        if file.endswith(".py")
        for name, line in bound_names(source_of(ROOT / file).nodes)
        if name in NAMELESS
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_class_has_a_name_of_its_own():
    """Among the package's or among the tests', so that a name in a log or a traceback is one class."""
    files = defaultdict(list)
    for source in [*FILES, *TEST_FILES]:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef):
                files[source in TEST_FILES, node.name].append(source.name)
    assert not {name: places for (_, name), places in files.items() if len(places) > 1}


@pytest.mark.parametrize(
    "text",
    [
        "one = 1",
        "for one in (): pass",
        "[one for one in ()]",
        "lambda one: 1",
        "def f(*one): pass",
        "(one := 1)",
        "from a import b as one",
        "try: pass\nexcept E as one: pass",
        "match 1:\n    case [*one]: pass",
    ],
)
def test_name_is_seen_wherever_it_is_bound(text):
    assert "one" in {name for name, _ in bound_names(ast.walk(ast.parse(text)))}
