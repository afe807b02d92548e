"""The documents and the code have the same words, files and names."""

import ast
import enum
import re
from typing import get_type_hints

import pytest

import keylane
import keylane.outbox
import keylane.sink
import keylane.testing
from tidy.tree import FILES, ROOT

TEXT = (ROOT / "docs" / "GLOSSARY.md").read_text()
WORDS = re.compile(r"^\| ([^`|]+) \| .+ \| `([\w/.]+\.py)` `(\w+)` \|$", re.MULTILINE)
"""Word, file, name in the file."""


def test_words_are_found():
    """The search finds rows; a table that writes them in another way fails here."""
    rows = [line for line in TEXT.splitlines() if line.startswith("| ") and ".py` `" in line]
    assert len(WORDS.findall(TEXT)) == len(rows) > 60


def test_code_has_each_word_where_the_glossary_says():
    gone = []
    for word, path, name in WORDS.findall(TEXT):
        file = ROOT / path
        text = file.read_text() if file.is_file() else ""
        if not re.search(rf"\b_?{name}\b", text):
            gone.append(f"{word}: {name} is not in {path}")
    assert not gone, "\n" + "\n".join(gone)


def test_word_has_one_row():
    words = [word.strip() for words, _, _ in WORDS.findall(TEXT) for word in words.split(",")]
    assert sorted(words) == sorted(set(words))


def test_words_with_several_meanings_are_named_at_the_top():
    first, _, rest = TEXT.partition("## ")
    rows = [word.partition(" (")[0] for word, _, _ in WORDS.findall(rest) if " (" in word]
    assert sorted(re.findall(r"\*([a-z ]+)\*", first)) == sorted(set(rows))
    assert all(rows.count(word) > 1 for word in rows)


def state_values() -> dict[str, list[str]]:
    """Enumeration of states → its values, as the glossary writes them; of a state in parts, each
    part.
    """
    states = {}
    for source in FILES:
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and node.name.endswith(("State", "Strategy")):
                module = __import__(
                    f"keylane.{source.name.removesuffix('.py').replace('/', '.')}",
                    fromlist=[node.name],
                )
                kind = getattr(module, node.name)
                for part in (kind, *get_type_hints(kind).values()):
                    if isinstance(part, enum.EnumType):
                        states[part.__name__] = [member.name.lower() for member in part]
    return states


def test_each_state_of_the_system_is_in_the_glossary():
    states = state_values()
    assert {"PartitionState", "OperationState", "OrderStrategy", "SendResult"} <= set(states)
    missing = {
        f"{kind}.{value}"
        for kind, values in states.items()
        for value in values
        if not re.search(rf"\b{value}\b", TEXT)
    }
    assert not missing


def test_each_name_of_the_face_is_in_the_glossary():
    """Errors have a tree of their own, which a test of the face compares with the code."""
    face = TEXT.partition("## The public face")[2]
    missing = {
        name
        for module in (keylane, keylane.admin, keylane.outbox, keylane.sink, keylane.testing)
        for name in module.__all__
        if not name.endswith("Error") and f"`{name}`" not in face
    }
    assert not missing


DOCUMENTS = ("README.md", "CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/GLOSSARY.md")
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md))`")
NAMES = re.compile(r"`((?:\w+/)+\w+\.py)` `(\w+)`(?: and `(\w+)`)?")


@pytest.mark.parametrize("page", DOCUMENTS)
def test_files_and_names_in_a_document_exist(page):
    """A path is written from the root; the names behind a path are in that file."""
    text = (ROOT / page).read_text()
    assert [path for path in FILE.findall(text) if not is_there(path)] == []
    gone = [
        f"{name} in {path}"
        for path, *names in NAMES.findall(text)
        for name in names
        if not re.search(rf"\b_?{name}\b" if name else "", (ROOT / path).read_text())
    ]
    assert not gone


def is_there(path: str) -> bool:
    """From the root, or from inside of a room, as tables of a room have it."""
    return (ROOT / path).is_file() or any(ROOT.glob(f"*/{path}"))


def test_contributing_answers_ten_questions():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(re.findall(r"^\| \d+ \| … ", text, re.MULTILINE)) == 10
