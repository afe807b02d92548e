"""docs/PROOF.md says what was run, and nothing else."""

from proof.document import DOCUMENT, SHARES, document


def test_the_document_is_what_the_shares_say():
    """The page is generated from the results that `make proof` kept."""
    assert DOCUMENT.read_text(encoding="utf-8") == document(SHARES.read_text(encoding="utf-8"))
