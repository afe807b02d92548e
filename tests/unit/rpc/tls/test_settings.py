"""Connection settings: other addresses than loopback need TLS, and all problems are reported at
once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keylane.broker.settings import BrokerSettings, broker_settings
from keylane.protocol.errors import ConfigError
from keylane.protocol.http.tls_settings import TlsSettings
from keylane.rpc.tls.settings import ServingSettings, serving_problems, tls_of_environment

PAIR = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_ca": Path("a")}
NEEDED = {"group": "g", "data": "d", "meta": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, None),
        (PAIR, None),
        (PAIR | {"tls_client_ca": Path("b")}, None),
        ({"tls_ca": Path("a")}, None),
        ({"tls_cert": Path("c")}, "TLS needs also tls_ca and tls_key"),
        ({"tls_client_ca": Path("b")}, "tls_client_ca needs also"),
        ({"insecure_network": 1}, "insecure_network must be true or false"),
        ({"host": "0.0.0.0"}, None),
        (PAIR | {"host": "0.0.0.0"}, "host 0.0.0.0 needs advertised_host"),
        ({"host": "::", "insecure_network": True}, "host :: needs advertised_host"),
        ({"host": "::", "advertised_host": "a.example"}, None),
        ({"advertised_host": "0.0.0.0"}, "advertised_host must be a name or address"),
        ({"advertised_host": "http://a"}, "advertised_host must be a name or address"),
        ({"host": ""}, "host must be an address"),
    ],
)
def test_problems_name_what_does_not_fit(values: dict[str, object], problem: str | None) -> None:
    problems = serving_problems(values)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_servers_are_insecure_when_others_reach_them_without_tls() -> None:
    assert not ServingSettings().is_open
    assert not ServingSettings(insecure_network=True).is_insecure
    assert ServingSettings(host="10.0.0.1", insecure_network=True).is_insecure
    secured = ServingSettings(host="10.0.0.1", insecure_network=True, **PAIR)
    assert not secured.is_insecure
    assert secured.is_open
    assert secured.client_tls() == TlsSettings(ca="a", cert="c", key="k")


def test_files_and_environment_give_truth_values_and_paths(tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text('insecure_network = true\ntls_ca = "ca.pem"\n', encoding="utf-8")
    settings = broker_settings(NEEDED, config)
    assert settings.insecure_network is True
    assert settings.tls_ca == tmp_path / "ca.pem"
    variables = {"KEYLANE_BROKER_INSECURE_NETWORK": "false"}
    assert not broker_settings(NEEDED, config, environment=variables).insecure_network
    with pytest.raises(ConfigError, match="insecure_network must be true or false"):
        broker_settings(NEEDED, environment={"KEYLANE_BROKER_INSECURE_NETWORK": "yes"})
    with pytest.raises(ConfigError) as caught:
        BrokerSettings(**NEEDED | {"data": tmp_path, "meta": ("h:1",)}, tls_cert=tmp_path, port=-1)
    assert caught.value.problems == 2


def test_clients_take_tls_from_the_environment() -> None:
    assert tls_of_environment({}) is None
    given = {"KEYLANE_TLS_CA": "a", "KEYLANE_TLS_CERT": "c", "KEYLANE_TLS_KEY": "k"}
    assert tls_of_environment(given) == TlsSettings(ca="a", cert="c", key="k")
    with pytest.raises(ConfigError, match="need also KEYLANE_TLS_CA"):
        tls_of_environment({"KEYLANE_TLS_CERT": "c"})
