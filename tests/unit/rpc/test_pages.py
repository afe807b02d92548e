import pytest

from keylane.protocol.errors import InvalidRequestError
from keylane.rpc.pages import FIELDS_MAX, FORM, parse_form


def test_form_has_its_fields_with_empty_ones():
    assert parse_form(FORM, b"a=1&b=&c=%3Cb%3E+%E2%80%AE") == {"a": "1", "b": "", "c": "<b> \u202e"}
    assert parse_form("", b"") == {}


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        (FORM, b"a=%ff"),
        (FORM, b"\xff=1"),
        (FORM, b"&".join(b"a%d=1" % number for number in range(FIELDS_MAX + 1))),
    ],
)
def test_form_that_cannot_be_read_is_refused(content_type, body):
    with pytest.raises(InvalidRequestError):
        parse_form(content_type, body)
