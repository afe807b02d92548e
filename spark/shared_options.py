"""The connection security options that readers and writers share, and advice about unknown options.
Pure.

    tlsCa       PEM file of the CA that signed the servers' certificates          KEYLANE_TLS_CA
    tlsCert     PEM file of a client certificate, if servers require one          KEYLANE_TLS_CERT
    tlsKey      PEM file of the client certificate's private key                  KEYLANE_TLS_KEY
    tokenFile   file with a token, for a cluster with access control              KEYLANE_TOKEN_FILE

A missing option is taken from the environment of the process, which is the driver or an executor.
Both the driver and the tasks read the files, so the files must have the same path on each machine.

Spark shows options in plans, and stores them in catalogs and event logs, so a secret must never be
an option.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from ..arrow.connection_security import PLAIN, ConnectionSecurity
from ..protocol.errors import ConfigError, KeylaneError
from ..protocol.http.tls_settings import TlsSettings

_NAMES_IN_OTHER_SOURCES = {
    "bootstrap.servers": "meta",
    "kafka.bootstrap.servers": "meta",
    "service.url": "meta",
    "nameserver": "meta",
    "topic": "subject",
    "topics": "subject",
    "subscribe": "subject",
    "assign": "partitions",
    "startingoffsets": "start",
    "startingtimestamp": "start",
    "startingtime": "start",
    "endingoffsets": "end",
    "endingtimestamp": "end",
    "endingtime": "end",
}
"""The keylane options that correspond to options of other data sources; names are in lowercase."""
_CREDENTIAL_ADVICE = (
    "a token is not an option, because Spark shows options in plans and logs; write it into a "
    "file, and give tokenFile"
)


def advice(name: str, names: Sequence[str]) -> str:
    """
    Return advice about an unknown option, with the closest known name if there is one.

    Args:
        names: the names of all options.
    """
    if name.lower() == "token":
        return _CREDENTIAL_ADVICE
    suggestion = _NAMES_IN_OTHER_SOURCES.get(name.lower())
    if suggestion not in names:
        by_lowercase = {each.lower(): each for each in names}
        matches = get_close_matches(name.lower(), list(by_lowercase), n=1)
        suggestion = by_lowercase[matches[0]] if matches else None
    return (
        f"unknown; did you mean {suggestion}?"
        if suggestion
        else f"unknown; there are {', '.join(names)}"
    )


TLS_CA, TLS_CERT, TLS_KEY, TOKEN_FILE = NAMES = ("tlsCa", "tlsCert", "tlsKey", "tokenFile")
PATH_MAX = 4_096


def parse_path(text: str) -> str:
    """Return the text, which must be a possible path of a file. Raises ValueError."""
    if "\0" in text or len(text) > PATH_MAX:
        raise ValueError(f"give the path of a file, not {text!r:.80}")
    return text


def parse_token_path(text: str) -> str:
    """
    Return the path of a token file.

    Raises:
        ValueError: the text cannot be a path, or is itself a token, in which case the error does
            not show it.
    """
    if text.startswith("kl_"):
        raise ValueError("this is a token; give the path of a file with it")
    return parse_path(text)


def parse_flag(text: str) -> bool:
    """Return the value of a boolean option. Raises ValueError for texts other than true and
    false.
    """
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"give true or false, not {text!r:.80}")
    return text.lower() == "true"


Parsers = Mapping[str, tuple[str, Callable[[str], object]]]
"""The field of each option and the function that parses its text, by option name."""
SECURITY_PARSERS: Parsers = {
    TLS_CA: (TLS_CA, parse_path),
    TLS_CERT: (TLS_CERT, parse_path),
    TLS_KEY: (TLS_KEY, parse_path),
    TOKEN_FILE: (TOKEN_FILE, parse_token_path),
}


def parse_values(
    texts: Mapping[str, str], parsers: Parsers, problems: dict[str, str]
) -> dict[str, Any]:
    """
    Return the values of the given options, by field.

    Args:
        texts: the texts of the given options, by lowercase name.
        problems: receives a problem for each invalid or missing option, by name.
    """
    values: dict[str, Any] = {}
    for name, (field, parse) in parsers.items():
        text = texts.get(name.lower(), "")
        if not text:
            if name in {"meta", "subject"}:
                problems[name] = "required"
            elif name.lower() in texts:
                problems[name] = "empty"
            continue
        try:
            values[field] = parse(text)
        except (ValueError, KeylaneError) as error:
            problems[name] = error.message if isinstance(error, KeylaneError) else str(error)
    return values


def raise_problems(problems: Mapping[str, str], addition: str = "") -> NoReturn:
    """Raise a ConfigError with the problems by option name, followed by an addition to the
    message.
    """
    descriptions = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    raise ConfigError(f"the options cannot work: {descriptions}{addition}", **problems)


def parse_security(values: dict[str, Any], problems: dict[str, str]) -> ConnectionSecurity:
    """
    Return the TLS settings and token file for the connections of a source.

    Args:
        values: the values of the given options; those that belong to SECURITY_PARSERS are removed.
        problems: receives a problem for each missing option, by name.
    """
    ca, cert, key, token_file = (str(values.pop(name, "")) for name in NAMES)
    incomplete = bool(cert) != bool(key)
    if incomplete:
        problems[TLS_KEY if cert else TLS_CERT] = (
            "a client certificate needs both its file and that of its key"
        )
    elif cert and not ca:
        problems[TLS_CA] = "required with tlsCert and tlsKey"
    if not ca and not token_file:
        return PLAIN
    return ConnectionSecurity(
        tls=TlsSettings(ca=ca, cert=cert, key=key) if ca and not incomplete else None,
        token_file=token_file,
    )
