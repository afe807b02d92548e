"""docs/PROOF.md is written out of docs/proof.jsonl alone."""

from proof.document import DOCUMENT, SHARES, document


def test_proof_document_is_made_of_the_shares():
    """The page is not edited by hand."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(SHARES.read_text(encoding="utf-8"))
