"""Files of a new cluster: the programs read the settings as they are, and hosts that cannot be are
told at once.
"""

import tomllib
from pathlib import Path

import pytest

from keylane.broker.settings import broker_settings
from keylane.cli.commands.cluster import init
from keylane.cli.commands.cluster.plan import ClusterPlan, ClusterTokens
from keylane.cli.options import OutputFormat
from keylane.metaserver.settings import metaserver_settings
from keylane.protocol.errors import ConfigError, Reason
from support.raising import raises

TOKENS = ClusterTokens({"a.example": "g1", "10.0.0.2": "g2", "::1": "g3"})
GIVEN = {"postgresql": None, "data": "/data", "meta_port": 7000, "broker_port": 7100}


def plan_of(*hosts: str, **changes) -> ClusterPlan:
    return ClusterPlan(hosts=hosts, **{**GIVEN, **changes})


def test_programs_read_the_settings_as_they_are(tmp_path: Path) -> None:
    plan = plan_of("a.example", "10.0.0.2", "::1", postgresql="postgresql://u:p@db/keylane")
    assert plan.metaservers == ["a.example:7000", "10.0.0.2:7000", "[::1]:7000"]
    config = tmp_path / "keylane.toml"
    for number, (host, listens, advertised) in enumerate(
        [("a.example", "0.0.0.0", "a.example"), ("10.0.0.2", "10.0.0.2", ""), ("::1", "::1", "")], 1
    ):
        config.write_text(plan.settings_of(host, TOKENS), encoding="utf-8")
        broker, metaserver = broker_settings({}, config), metaserver_settings({}, config)
        for settings, port in ((broker, 7100), (metaserver, 7000)):
            assert (settings.host, settings.advertised_host) == (listens, advertised)
            assert settings.port == port
            assert settings.tls_cert == tmp_path / "server.pem"
            assert settings.client_tls() is not None
        assert broker.group == f"g{number}"
        assert broker.token_file == tmp_path / "broker.token"
        assert broker.is_guarded
        assert metaserver.is_guarded
        assert len(metaserver.broker_token_hashes) == 3
        assert TOKENS.admin not in config.read_text()
        assert not any(token in config.read_text() for token in TOKENS.of_host.values())
        assert broker.meta == tuple(plan.metaservers)
        assert metaserver.database_url == "postgresql+asyncpg://u:p@db/keylane"


def test_first_host_alone_has_a_metaserver_without_a_shared_database() -> None:
    plan = plan_of("a.example", "b.example")
    assert plan.metaservers == ["a.example:7000"]
    assert set(tomllib.loads(plan.settings_of("a.example", TOKENS))) == {"broker", "metaserver"}
    assert set(tomllib.loads(plan.settings_of("b.example", TOKENS))) == {"broker"}
    assert set(plan.units_of("b.example", "/usr/bin/keylane")) == {"keylane-broker.service"}


@pytest.mark.parametrize(
    ("hosts", "changes", "problems"),
    [
        ((), {}, 1),
        (("a", "a"), {}, 1),
        (("0.0.0.0", "a b", "a:1", "../x", "..", "a"), {}, 5),
        (("a",), {"meta_port": 7100, "data": "data", "postgresql": "mysql://x"}, 3),
        ([f"h{number}" for number in range(101)], {}, 1),
    ],
)
def test_plan_refuses_what_cannot_be(hosts, changes, problems: int) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(*hosts, **changes)
    assert caught.value.problems == problems


def test_hosts_have_one_program_each_where_metaservers_are_apart(tmp_path: Path) -> None:
    plan = plan_of("b1", "b2", meta_only=("m1", "m2"), postgresql="postgresql://u:p@db/keylane")
    assert plan.metaservers == ["m1:7000", "m2:7000"]
    config = tmp_path / "keylane.toml"
    for host in plan.all_hosts:
        program = "broker" if host in plan.hosts else "metaserver"
        config.write_text(plan.settings_of(host, TOKENS), encoding="utf-8")
        assert set(tomllib.loads(config.read_text())) == {program}
        assert set(plan.units_of(host, "/usr/bin/keylane")) == {f"keylane-{program}.service"}
        if program == "broker":
            assert broker_settings({}, config).meta == ("m1:7000", "m2:7000")
        else:
            assert metaserver_settings({}, config).data.name == f"metaserver-{host[1]}"


@pytest.mark.parametrize(
    ("meta_only", "postgresql"),
    [(("m1", "m2"), None), (("a",), "postgresql://db/k"), (("a b",), None)],
)
def test_plan_refuses_metaservers_that_cannot_be(meta_only, postgresql) -> None:
    """Two without a common database; a host that has a broker as well; an impossible name."""
    with pytest.raises(ConfigError) as caught:
        plan_of("a", meta_only=meta_only, postgresql=postgresql)
    assert caught.value.problems == 1


@pytest.mark.parametrize("password", ["pa@ss:w/rd%1", "pa@ss", "pa@s/s", "50%"])
def test_url_with_an_unescaped_password_is_refused_with_the_rule(password: str) -> None:
    with pytest.raises(ConfigError, match=r"@ is written %40.* % is %25") as refused:
        plan_of("a", postgresql=f"postgresql://u:{password}@db/keylane")
    assert password not in str(refused.value)


@pytest.mark.parametrize("password", ["pa%40ss%3Aw%2Frd%251", "plain", ""])
def test_url_with_an_escaped_password_is_taken(password: str) -> None:
    assert plan_of("a", postgresql=f"postgresql://u:{password}@db/keylane").postgresql


def test_init_works_in_the_folder_of_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the first run is left: neither files nor keys."""
    folder, written = tmp_path / "made", []
    write = init._write

    def full(path: Path, content: bytes, mode: int) -> None:
        if len(written) == 5:
            raise OSError(28, "No space left on device")
        written.append(path)
        write(path, content, mode)

    monkeypatch.setattr(init, "_write", full)
    with raises(Reason.CLUSTER_FOLDER, match="No space left"):
        init.init_cluster(folder, plan_of("a"), keylane="keylane", output=OutputFormat.JSON)
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(init, "_write", write)
    init.init_cluster(folder, plan_of("a"), keylane="keylane", output=OutputFormat.JSON)
    assert (folder / "a" / "keylane.toml").exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://",
        "postgresql://h/",
        "postgresql://u@h/d%00x",
        "postgresql://h/d?port=99999",
    ],
)
def test_plan_is_refused_when_its_database_cannot_exist(url: str):
    with pytest.raises(ConfigError, match=r"--postgresql|postgresql://user"):
        plan_of("a", postgresql=url)


def test_plan_takes_a_database_behind_a_host_of_the_query():
    url = "postgresql://u:p@/keylane?host=db&port=5433"
    assert plan_of("a", postgresql=url).postgresql == url
