"""docs/PROOF.md is written out of docs/proof.jsonl alone, and README's figures out of that and
docs/PEERS.md.
"""

import pytest

from proof.document import DOCUMENT, SHARES, document
from proof.readme import PEERS, SECTIONS, lines_of, with_lines
from tidy.tree import ROOT


def test_proof_document_is_made_of_the_shares():
    """The page is not edited by hand."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(SHARES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", SECTIONS)
def test_readme_has_the_figures_of_the_proof_and_of_the_peers(page):
    """`PYTHONPATH=tests .venv/bin/python -m proof.readme` writes them."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = lines_of(page, SHARES.read_text(encoding="utf-8"), PEERS.read_text(encoding="utf-8"))
    assert with_lines(page, text, lines) == text
