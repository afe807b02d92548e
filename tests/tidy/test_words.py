"""The tree says nothing of the machine it was written on, and leaves no note to do something later."""

import ast
import re
from collections.abc import Iterator

import pytest

from tidy.tree import ROOT, Source, tracked_files

# Built from parts, so that this file does not find itself.
BANNED = {
    "a path of one machine": re.compile(r"(?<![\w./$}])/(?:work|root|home/\w+)" + r"/\w"),
    "a note for later": re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X" + r"XX)\b"),
    "a mark of a merge": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
NOT_OURS = {"LICENSE", "requirements.lock"}

# Words that say less than the field's noun; docs/GLOSSARY.md has the nouns.
VAGUE = re.compile(
    r"\b(?:di" + r"ce|for" + r"saken|who" + r"ever|no" + r"body|so ma" + r"ny)\b", re.IGNORECASE
)
HEADLESS = re.compile(
    r"def (test_(?:what|who|all|one|it|they|again|a_thing|nothing|nobody|whoever)_\w+)"
)
"""Tests are named `test_<subject>_<does>_<when>`."""
VAGUE_ARE_FREE = (
    *("benchmarks/", "broker/", "protocol/"),
    *("admin/", "checker/", "cli/", "metaserver/", "spark/", "examples/", "migrations/env.py"),
    *("__init__.py", "errors.py", "consumer/", "producer/", "rpc/"),
    *("tests/integration/clients/", "tests/integration/consumers/"),
    *(f"tests/unit/{room}/" for room in ("consumer", "producer", "rpc")),
    *("tests/acceptance/", "tests/crash/", "tests/spark/", "tests/tidy/"),
    *("tests/property/metaserver/", "tests/property/producer/"),
    *(
        f"tests/integration/{room}/"
        for room in ("metaserver", "operations", "rebuild", "resets", "retention")
    ),
    *(f"tests/unit/{room}/" for room in ("admin", "checker", "cli", "metaserver", "spark")),
    *("README.md", "CONTRIBUTING.md", "docs/GLOSSARY.md", "docs/ARCHITECTURE.md"),
    *("docs/OPERATING.md", "docs/ORDER.md", "docs/FORMATS.md"),
)
"""Where no vague word is left; a room that is cleaned is added."""
NAMELESS = {"one", "found"}
"""Names that say nothing of a value: the field's noun is used instead."""
NAMELESS_ARE_FREE = (
    "admin/",
    "benchmarks/",
    "broker/",
    "checker/",
    "cli/",
    "consumer/",
    "examples/",
    "metaserver/",
    "migrations/",
    "producer/",
    "protocol/",
    "rpc/",
    "spark/",
    "tests/integration/clients/",
    "tests/integration/consumers/",
    "tests/integration/metaserver/",
    "tests/integration/operations/",
    "tests/integration/rebuild/",
    "tests/integration/resets/",
    "tests/integration/retention/",
    "tests/property/metaserver/",
    "tests/property/producer/",
    "tests/unit/admin/",
    "tests/unit/checker/",
    "tests/unit/cli/",
    "tests/property/protocol/",
    "tests/unit/broker/",
    "tests/unit/consumer/",
    "tests/unit/metaserver/",
    "tests/unit/producer/",
    "tests/unit/protocol/",
    "tests/unit/rpc/",
    "tests/unit/spark/",
)
"""Where no variable, parameter or field is called so; a room that is cleaned is added, on a line of its own."""


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


def in_texts(pattern: re.Pattern[str], free: tuple[str, ...]) -> list[str]:
    return [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1} {match[0]!r}"
        for name in tracked_files()
        if name.startswith(free) and name.endswith((".py", ".md"))
        for text in [(ROOT / name).read_text()]
        for match in pattern.finditer(text)
    ]


def test_clean_rooms_have_no_vague_word():
    broken = [
        place
        for place in in_texts(VAGUE, VAGUE_ARE_FREE)
        if "test_words.py" not in place and "test_migrations.py" not in place  # a column's old name
    ]
    assert not broken, "\n" + "\n".join(broken)


def test_tests_are_named_by_their_subject():
    broken = in_texts(HEADLESS, ("tests/",))
    assert not broken, "\n" + "\n".join(broken)


def bound_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every name that is given to a value, with its line: variables, parameters, imports, captures."""
    for node in ast.walk(tree):
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


def test_clean_rooms_name_values_by_nouns():
    broken = [
        f"{file}:{line} {name}"
        for file in tracked_files()
        if file.startswith(NAMELESS_ARE_FREE) and file.endswith(".py")
        for name, line in bound_names(Source(ROOT / file).tree)
        if name in NAMELESS
    ]
    assert not broken, "\n" + "\n".join(broken)


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
def test_a_name_is_seen_wherever_it_is_bound(text):
    assert "one" in {name for name, _ in bound_names(ast.parse(text))}
