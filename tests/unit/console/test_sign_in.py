import pytest

from keylane.console.sign_in import cookie_for, form_token, is_own_form, read_token
from keylane.protocol.errors import ConfigError

TOKEN = "kl_" + "a" * 43


def test_cookie_is_kept_from_scripts_and_other_sites():
    cookie = cookie_for(TOKEN, is_secure=False)
    assert cookie.startswith(f"keylane_console={TOKEN}; Path=/console; ")
    assert "; HttpOnly; SameSite=Strict" in cookie
    assert "Secure" not in cookie
    assert cookie_for(TOKEN, is_secure=True).endswith("; Secure")
    assert "Max-Age=0" in cookie_for("", is_secure=True)


def test_token_of_a_form_belongs_to_one_sign_in():
    given = form_token(TOKEN)
    assert TOKEN not in given
    assert is_own_form(TOKEN, given)
    assert not is_own_form("kl_" + "b" * 43, given)
    assert not is_own_form(TOKEN, "ü")
    assert not is_own_form(TOKEN, "")


@pytest.mark.parametrize("text", ["", "nonsense", "kl_short", "a\r\nSet-Cookie: x=y", "ü"])
def test_text_that_is_no_token_is_refused(text):
    with pytest.raises(ConfigError):
        read_token(text)


def test_token_that_no_browser_would_keep_is_refused():
    assert read_token(f"  {TOKEN}\n") == TOKEN
    with pytest.raises(ConfigError, match="a browser keeps"):
        read_token("eyJhbGciOiJIUzI1NiJ9." + "a" * 5_000 + ".b")
