"""Tokens of an outside issuer: what is believed, and each known way to cheat refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from keylane.metaserver.access.issuer import Issuer
from keylane.metaserver.settings import metaserver_settings
from keylane.protocol.clock import SystemClock
from keylane.protocol.errors import ConfigError, Reason, UnauthenticatedError
from keylane.rpc.access.key_set import REFRESH_INTERVAL_MS_MIN
from keylane.rpc.access.settings import IssuerSettings
from support.access.issuer import AUDIENCE, ISSUER, OutsideIssuer
from support.raising import raises


class Clock(SystemClock):
    """A boot clock that tests set forward."""

    ahead_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.ahead_ms


@pytest.fixture
def outside(tmp_path: Path) -> OutsideIssuer:
    return OutsideIssuer(tmp_path / "jwks.json", one="RS256", two="ES256", three="EdDSA")


def issuer_of(outside: OutsideIssuer, clock: Clock | None = None, **changes: Any) -> Issuer:
    settings = {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "jwks": str(outside.file),
        "jwks_ca": "",
        "algorithms": ("RS256", "ES256"),
        "principal_claim": "sub",
        "groups_claim": "groups",
        "leeway_s": 5,
    }
    return Issuer(IssuerSettings(**(settings | changes)), clock=clock or Clock())


@pytest.mark.parametrize("kid", ["one", "two"])
async def test_token_is_believed_and_names_principal_and_groups(outside: OutsideIssuer, kid: str):
    issuer = issuer_of(outside)
    text = outside.token(kid, groups=["ops", "a b", 7, "ops"])
    identity = await issuer.verify(text)
    assert identity[:2] == ("jwt:alice", ("group:ops",))
    assert abs(identity.ends_at_ms / 1000 - time.time() - 605) < 5
    assert await issuer.verify(text) is identity
    spaced = await issuer.verify(outside.token(kid, groups="ops dev"))
    assert spaced.groups == ("group:ops", "group:dev")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exp": int(time.time()) - 60}, "ended"),
        ({"exp": None}, "MissingRequiredClaimError"),
        ({"aud": "another"}, "InvalidAudienceError"),
        ({"aud": None}, "MissingRequiredClaimError"),
        ({"iss": "https://evil.example"}, "InvalidIssuerError"),
        ({"iss": None}, "MissingRequiredClaimError"),
        ({"nbf": int(time.time()) + 86_400}, "ImmatureSignatureError"),
        ({"iat": int(time.time()) + 86_400}, "ImmatureSignatureError"),
        ({"sub": None}, "name"),
        ({"sub": "a b"}, "name"),
        ({"sub": "*"}, "name"),
        ({"sub": "x" * 300}, "name"),
    ],
)
async def test_token_with_wrong_claims_is_refused(
    outside: OutsideIssuer, changes: dict[str, Any], reason: str
):
    with pytest.raises(UnauthenticatedError) as refused:
        await issuer_of(outside).verify(outside.token(**changes))
    assert refused.value.problem == reason


async def test_clock_of_the_issuer_may_be_off_by_the_leeway_alone(outside: OutsideIssuer):
    now = int(time.time())
    assert await issuer_of(outside, leeway_s=30).verify(outside.token(exp=now - 10))
    with pytest.raises(UnauthenticatedError):
        await issuer_of(outside, leeway_s=0).verify(outside.token(exp=now - 10))


async def test_algorithm_is_never_the_token_s_choice(outside: OutsideIssuer):
    """A public key used as a secret, no signature, a key of another kind, keys that the token
    brings along.
    """
    pem = outside.public_pem()
    tricks = [
        outside.forged({"alg": "HS256", "kid": "one", "typ": "JWT"}, pem),
        outside.forged(
            {"alg": "HS256", "kid": "one"}, json.dumps(outside.document("one")).encode()
        ),
        outside.forged({"alg": "none", "kid": "one"}),
        outside.forged({"alg": "None", "kid": "one"}),
        outside.forged({"alg": "", "kid": "one"}),
        outside.forged({"kid": "one"}),
        outside.forged({"alg": ["RS256"], "kid": "one"}),
        outside.forged({"alg": "RS256", "kid": "one"}, b"x"),
        outside.forged({"alg": "RS256", "kid": "two"}, b"x"),
        outside.forged({"alg": "ES256", "kid": "one"}, b"x"),
        outside.token("three"),
        outside.token("one", header={"crit": ["b64"]}),
    ]
    other = OutsideIssuer(outside.file.with_name("other.json"))
    tricks.append(other.token(header={"jwk": other.document()["keys"][0]}))
    tricks.append(other.token(header={"jku": "https://evil.example/jwks.json"}))
    head, body, mark = outside.token().split(".")
    tricks.append(f"{head}.{outside.token(sub='root').split('.')[1]}.{mark}")
    tricks.append(f"{head}.{body}.")
    for trick in tricks:
        with pytest.raises(UnauthenticatedError):
            await issuer_of(outside).verify(trick)


@pytest.mark.parametrize("text", ["..", "a.b.c", "ey.ey.ey", "\x00.\x00.\x00", "é.é.é", "." * 2])
async def test_text_that_is_no_token_is_refused(outside: OutsideIssuer, text: str):
    with pytest.raises(UnauthenticatedError):
        await issuer_of(outside).verify(text)


@pytest.mark.parametrize("kid", [None, 7, "", "x" * 300, "../../etc/passwd", "unknown"])
async def test_token_of_an_unknown_key_is_refused(outside: OutsideIssuer, kid: object):
    with pytest.raises(UnauthenticatedError) as refused:
        await issuer_of(outside).verify(outside.forged({"alg": "RS256", "kid": kid}, b"x"))
    assert refused.value.problem in ("unknown key", "no token")


async def test_keys_rotate_and_a_key_that_is_gone_is_believed_no_more(outside: OutsideIssuer):
    clock = Clock()
    issuer = issuer_of(outside, clock)
    old = outside.token("one")
    assert await issuer.verify(old)
    outside.add("four")
    new = outside.token("four")
    outside.publish()
    with pytest.raises(UnauthenticatedError):
        await issuer.verify(new)  # the file was read just now
    clock.ahead_ms += REFRESH_INTERVAL_MS_MIN
    assert await issuer.verify(new)
    outside.publish("four")
    clock.ahead_ms += REFRESH_INTERVAL_MS_MIN
    assert await issuer.verify(new)
    with pytest.raises(UnauthenticatedError):
        await issuer.verify(old)


async def test_keys_that_cannot_be_read_are_kept_for_a_while(outside: OutsideIssuer):
    clock = Clock()
    issuer = issuer_of(outside, clock)
    text = outside.token("two")
    assert await issuer.verify(text)
    for broken in (
        "",
        "[]",
        '{"keys": 7}',
        '{"keys": [{"kid": "two", "kty": "EC"}',
        "x" * (2 << 20),
    ):
        outside.file.write_text(broken)
        clock.ahead_ms += REFRESH_INTERVAL_MS_MIN
        assert await issuer.verify(text)
    clock.ahead_ms += 2 * 86_400_000
    with raises(Reason.ISSUER_UNREACHABLE):
        await issuer.verify(text)
    with raises(Reason.ISSUER_UNREACHABLE):
        await issuer_of(outside).verify(text)


def test_settings_refuse_what_would_let_others_in(tmp_path: Path):
    given = {"data": tmp_path, "jwt_issuer": "i", "jwt_audience": "a", "jwt_jwks": "/jwks.json"}
    assert metaserver_settings(given).outside_issuer is not None
    assert metaserver_settings({"data": tmp_path}).outside_issuer is None
    for changes, problem in [
        ({"jwt_audience": ""}, "JWTs need also jwt_audience"),
        ({"jwt_jwks": "http://issuer.example/jwks"}, "https URL"),
        ({"jwt_algorithms": "RS256,HS256"}, "not HS256"),
        ({"jwt_algorithms": "none"}, "not none"),
        ({"jwt_leeway_s": 301}, "jwt_leeway_s"),
    ]:
        with pytest.raises(ConfigError, match=problem):
            metaserver_settings(given | changes)
