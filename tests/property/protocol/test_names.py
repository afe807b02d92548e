"""Names: exactly the documented ones pass."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from keylane.protocol.errors import Reason
from keylane.protocol.ids import check_name
from support.raising import raises

FORM = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z"


@settings(deadline=None)
@given(st.from_regex(FORM, fullmatch=True))
def test_names_of_the_form_pass(name):
    """Every text of the documented form is a name."""
    assert check_name("subject", name) == name


@settings(deadline=None)
@given(st.text(max_size=220).filter(lambda text: not re.match(FORM, text)))
def test_other_texts_do_not(text):
    """Every other text is refused with a typed error that quotes no more than a line of it."""
    with raises(Reason.NAME_INVALID) as caught:
        check_name("subject", text)
    assert len(caught.value.message) < 200
