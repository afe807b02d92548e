"""`keylane access`: what its lists show while they are empty."""

from __future__ import annotations

import pytest

from keylane.cli.commands.access import show_rows


def test_list_says_how_to_add_the_first_row(capsys: pytest.CaptureFixture[str]):
    show_rows("tokens", ("id", "label"), [], "keylane access token create PRINCIPAL")
    assert capsys.readouterr().out == (
        "no tokens; add one with: keylane access token create PRINCIPAL\n"
    )
    show_rows("tokens", ("id", "label"), [(7, "till 3")], "")
    assert "till 3" in capsys.readouterr().out
